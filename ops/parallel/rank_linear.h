#ifndef QUERN_OPS_PARALLEL_RANK_LINEAR_H_
#define QUERN_OPS_PARALLEL_RANK_LINEAR_H_

// Private: the linear layer that one rank computes, on weights that are f32,
// bf16 or f16.

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

// Creates a plan over the matrices `sources`, each [n, k] and all of one dtype,
// stacked. Unimplemented, in the name of `op`, for weights other than f32, bf16
// and f16. Also refuses what LinearWeights::Pack and LinearPlan::Create refuse.
absl::StatusOr<LinearPlan> CreateRankLinear(
    absl::string_view op, const LinearSpec& spec,
    absl::Span<const LinearSource> sources, Executor& executor);

// Bytes of workspace for max_m rows of row_bytes, followed by the workspace of
// `linear`, which may be null. InvalidArgument if max_m < 0 or max_workers < 1.
// ResourceExhausted for 2^63 bytes or more.
absl::StatusOr<int64_t> RankWorkspaceBytes(absl::string_view op,
                                           int64_t row_bytes,
                                           const LinearPlan* linear,
                                           int64_t max_m, int max_workers);

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_RANK_LINEAR_H_
