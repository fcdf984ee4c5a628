#ifndef QUERN_TOOLS_PERF_RUN_CASE_H_
#define QUERN_TOOLS_PERF_RUN_CASE_H_

// Private to the driver: a command line of an operator becomes cases, and each
// case a row.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limits.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/settings.h"

namespace quern {

// Restricts the choice of kernels to `isa` for the life of this object. An
// empty name restricts nothing.
class ScopedIsa {
 public:
  explicit ScopedIsa(const std::string& isa);
  ~ScopedIsa();
  ScopedIsa(const ScopedIsa&) = delete;
  ScopedIsa& operator=(const ScopedIsa&) = delete;
};

// FailedPrecondition unless what --isa asked for is what ran (IsaHas). An
// operator without kernels (kNoIsa) runs the same code on every instruction
// set.
absl::Status ProveIsa(absl::string_view op, const Settings& settings,
                      absl::string_view ran);

// The operator of that name; null for an unknown one.
const OpEntry* FindOp(absl::Span<const OpEntry> ops, absl::string_view name);

// The keys of an operator's command line, read from `words`.
absl::StatusOr<Args> ParseOpArgs(const OpEntry& entry,
                                 absl::Span<const absl::string_view> words);

// A case that was not refused.
struct ReadyCase {
  std::string layer;
  std::unique_ptr<Op> op;
  int64_t sets = 0;  // working sets that its calls rotate over
};

// Returns every case of a command line, none of which has data yet, so that a
// refusal comes before the first one runs. InvalidArgument, besides: more
// memory than is free.
absl::StatusOr<std::vector<ReadyCase>> PrepareCases(const OpEntry& entry,
                                                    const Args& args,
                                                    const Settings& settings,
                                                    const CpuInfo& cpu);

// Measures cases one after another, by the same workers and next to the same
// limits. Not thread-safe.
class CaseRunner {
 public:
  // `name` begins a refusal. FailedPrecondition: the limits are not of
  // settings.isa. `progress` must outlive the runner.
  static absl::StatusOr<CaseRunner> Create(absl::string_view name,
                                           const Settings& settings,
                                           const CpuInfo& cpu,
                                           std::ostream& progress);

  // Sets up a case of `entry`, checks it if the settings say so, and measures
  // it.
  absl::StatusOr<Row> Run(const OpEntry& entry, const ReadyCase& ready);

  Limits& limits() { return limits_; }
  Executor& executor() { return *executor_; }

 private:
  CaseRunner(const Settings& settings, int64_t cache_bytes,
             std::unique_ptr<HwyExecutor> executor, Limits limits,
             std::ostream& progress);

  Settings settings_;
  int64_t cache_bytes_;
  std::unique_ptr<HwyExecutor> executor_;
  Limits limits_;
  std::ostream* progress_;
};

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RUN_CASE_H_
