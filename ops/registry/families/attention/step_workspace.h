#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_STEP_WORKSPACE_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_STEP_WORKSPACE_H_

// Private: the workspace of operators of attention whose step has limits.

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/attention/schedule_bound.h"
#include "quern/core/status_macros.h"

namespace quern {

// Bytes for the plan's Execute on up to max_workers workers: with `schedule`
// and, if limits.max_sequences > 0, with every schedule of up to max_rows
// tokens within `limits`. `schedule` counts beside the limits, because it may
// have been built for more workers than either says.
template <typename Plan, typename Schedule>
absl::StatusOr<int64_t> StepWorkspaceBytes(const Plan& plan,
                                           const Schedule& schedule,
                                           AttentionLimits limits,
                                           int64_t max_rows, int max_workers) {
  QUERN_ASSIGN_OR_RETURN(const int64_t now,
                         plan.WorkspaceBytes(schedule, max_workers));
  if (limits.max_sequences == 0) return now;
  limits.max_tokens = max_rows;
  QUERN_ASSIGN_OR_RETURN(const int64_t most,
                         plan.WorkspaceBytes(limits, max_workers));
  return std::max(now, most);
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_STEP_WORKSPACE_H_
