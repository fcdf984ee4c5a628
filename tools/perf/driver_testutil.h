#ifndef QUERN_TOOLS_PERF_DRIVER_TESTUTIL_H_
#define QUERN_TOOLS_PERF_DRIVER_TESTUTIL_H_

// Runs the driver on a command line and reads what it prints.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/tools/perf/driver.h"
#include "quern/tools/perf/json_testutil.h"
#include "quern/tools/perf/op.h"

namespace quern {

struct Outcome {
  int exit_code;
  std::string out;
  std::string progress;
};

// This machine with small caches: tests time nothing, and some servers have a
// last level of 480 MiB, whose copies of operands take minutes to fill.
inline CpuInfo SmallMachine() {
  CpuInfo cpu = GetCpuInfo();
  cpu.l2_bytes = std::min<int64_t>(cpu.l2_bytes, 1 << 20);
  cpu.l3_bytes = std::min<int64_t>(cpu.l3_bytes, 8 << 20);
  return cpu;
}

inline Outcome Perf(absl::string_view line, bool terminal = false) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, ' ', absl::SkipEmpty());
  std::ostringstream out, progress;
  const int exit_code =
      RunPerf(AllOps(), words, SmallMachine(), terminal, out, progress);
  return {exit_code, out.str(), progress.str()};
}

// The best instruction set of this CPU but one: another than the driver runs
// on by itself, where there are two.
inline std::string NextBestIsa() {
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return hwy::TargetName(targets[targets.size() > 1 ? 1 : 0]);
}

// Every line is one whole object that names the op; no value is unprintable.
inline void ExpectJsonLines(const std::string& text, const std::string& op,
                            size_t lines) {
  const std::vector<std::string> all =
      absl::StrSplit(text, '\n', absl::SkipEmpty());
  EXPECT_EQ(all.size(), lines) << text;
  for (const std::string& line : all) {
    const auto fields = FlatJson::Parse(line);
    ASSERT_TRUE(fields.has_value()) << line;
    EXPECT_EQ(fields->at("op"), op);
    EXPECT_NE(fields->at("median_us"), "null");
  }
}

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_DRIVER_TESTUTIL_H_
