#ifndef QUERN_TOOLS_PERF_SETTINGS_H_
#define QUERN_TOOLS_PERF_SETTINGS_H_

// What a command line says besides the operator's own keys.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/tools/perf/args.h"

namespace quern {

inline constexpr absl::string_view kLimits = "limits";

// What every line of the driver takes, and what every operator takes besides.
inline constexpr Key kCommonKeys[] = {
    {"threads", "0", "workers; 0: one a core; at most one a logical CPU"},
    {"isa", "best",
     "instruction set, e.g. AVX2, AVX2_VNNI; best: this CPU's best"},
    {"runs", "21", "timed samples"},
    {"format", "auto", "table, json; auto: table on a terminal"},
};
inline constexpr Key kOpKeys[] = {
    {"warm", "0", "1: one working set, hot in cache; 0: rotate over DRAM"},
    {"check", "0", "1: compare with the reference in double first"},
};

struct Settings {
  int threads = 1;
  int64_t runs = 1;
  bool warm = false;
  bool check = false;
  bool table = false;
  std::string isa;  // empty: the best
};

// InvalidArgument: a value that is none of those. `terminal`: as in RunPerf.
absl::StatusOr<Settings> ReadSettings(const Args& args, const CpuInfo& cpu,
                                      bool terminal);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_SETTINGS_H_
