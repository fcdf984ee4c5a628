// Times an operator next to the limits of this machine. See --help and
// docs/benchmarking.md.

#include <unistd.h>

#include <iostream>
#include <vector>

#include "absl/strings/string_view.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/tools/perf/driver.h"
#include "quern/tools/perf/op.h"

int main(int argc, char** argv) {
  const std::vector<absl::string_view> words(argv + 1, argv + argc);
  return quern::RunPerf(quern::AllOps(), words, quern::GetCpuInfo(),
                        isatty(STDOUT_FILENO) != 0, std::cout, std::cerr);
}
