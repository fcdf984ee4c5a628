#include "quern/tools/perf/settings.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/tools/perf/args.h"

namespace quern {

absl::StatusOr<Settings> ReadSettings(const Args& args, const CpuInfo& cpu,
                                      bool terminal) {
  Settings settings;
  const auto workers = [](int cpus) {
    return std::clamp(cpus, 1, int{HwyExecutor::kMaxWorkers});
  };
  QUERN_ASSIGN_OR_RETURN(const int64_t threads,
                         args.Int("threads", 0, workers(cpu.cpus_available)));
  settings.threads =
      threads == 0 ? workers(cpu.cores_available) : static_cast<int>(threads);
  QUERN_ASSIGN_OR_RETURN(settings.runs, args.Int("runs", 1, 100000));
  if (args.op() != kLimits) {
    QUERN_ASSIGN_OR_RETURN(settings.warm, args.Flag("warm"));
    QUERN_ASSIGN_OR_RETURN(settings.check, args.Flag("check"));
  }
  QUERN_ASSIGN_OR_RETURN(const std::string format,
                         args.Choice("format", {"auto", "table", "json"}));
  settings.table = format == "table" || (format == "auto" && terminal);
  if (args.Text("isa") != "best") {
    settings.isa = absl::AsciiStrToUpper(args.Text("isa"));
    if (!absl::c_linear_search(cpu.targets, settings.isa)) {
      return InvalidArgument(args.op(), "--isa=\"", args.Text("isa"),
                             "\" is not on this CPU; need one of best, ",
                             absl::StrJoin(cpu.targets, ", "));
    }
  }
  return settings;
}

}  // namespace quern
