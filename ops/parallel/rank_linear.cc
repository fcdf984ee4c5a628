#include "quern/ops/parallel/rank_linear.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

absl::StatusOr<LinearPlan> CreateRankLinear(
    absl::string_view op, const LinearSpec& spec,
    absl::Span<const LinearSource> sources, Executor& executor) {
  const DType w = sources.front().codes.dtype();
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "w", w, kFloatDTypes));
  LinearWeightsSpec weights_spec;
  for (const LinearSource& source : sources) {
    weights_spec.n += source.codes.extent(0);
  }
  weights_spec.k = sources.front().codes.extent(1);
  weights_spec.format = FormatOfFloats(w);
  weights_spec.gated = IsGated(spec.activation);
  QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                         LinearWeights::Pack(weights_spec, sources, executor));
  return LinearPlan::Create(spec, weights, executor);
}

absl::StatusOr<int64_t> RankWorkspaceBytes(absl::string_view op,
                                           int64_t row_bytes,
                                           const LinearPlan* linear,
                                           int64_t max_m, int max_workers) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "max_m", max_m, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "max_workers", max_workers, 1));
  int64_t rows = 0, linear_bytes = 0;
  if (linear != nullptr) {
    QUERN_ASSIGN_OR_RETURN(linear_bytes,
                           linear->WorkspaceBytes(max_m, max_workers));
  }
  WorkspaceLayout layout;
  const bool fits = CheckedMul(max_m, row_bytes, &rows);
  layout.Allocate<uint8_t>("rows", rows);
  layout.Allocate<uint8_t>("linear", linear_bytes);
  if (fits && !layout.overflow()) return layout.bytes();
  return absl::ResourceExhaustedError(
      absl::StrCat(op, ": max_m=", max_m,
                   " needs a workspace of 2^63 bytes or "
                   "more; need less"));
}

}  // namespace quern
