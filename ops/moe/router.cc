#include "quern/ops/moe/router.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/load_row.h"
#include "quern/ops/moe/router_kernels.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_block_kernels.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "router";

}  // namespace

RouterPlan::RouterPlan(const RouterSpec& spec)
    : spec_(spec),
      kernels_(GetRouterKernels(spec.score)),
      logits_blocks_(GetRowBlockKernels(spec.logits_dtype, DType::kF32)),
      bias_blocks_(GetRowBlockKernels(spec.bias_dtype, DType::kF32)) {}

absl::StatusOr<RouterPlan> RouterPlan::Create(const RouterSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "experts", spec.experts, 1, RouterSpec::kMaxExperts));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "groups", spec.groups, 1, spec.experts));
  if (spec.experts % spec.groups != 0) {
    return InvalidArgument(kOp, "groups=", spec.groups,
                           "; need a divisor of experts=", spec.experts);
  }
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "top_groups", spec.top_groups, 1, spec.groups));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "top_k", spec.top_k, 1,
      std::min(RouterSpec::kMaxTopK, spec.top_groups * spec.GroupExperts())));
  if (spec.biased && spec.groups > 1 && spec.GroupExperts() < 2) {
    return InvalidArgument(kOp, "groups=", spec.groups,
                           " of experts=", spec.experts,
                           "; with a bias, need 2 experts in a group");
  }
  QUERN_RETURN_IF_ERROR(
      CheckPositive(kOp, "scale", spec.scale, "finite scale"));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "logits_dtype", spec.logits_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "bias_dtype", spec.bias_dtype, kFloatDTypes));
  return RouterPlan(spec);
}

absl::Status RouterPlan::CheckArgs(const AnyTensorView& logits,
                                   const AnyTensorView& bias,
                                   const MatrixView<float>& weights,
                                   const MatrixView<int32_t>& ids) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "logits", logits, spec_.logits_dtype,
                                   {kAnyExtent, spec_.experts}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "weights", weights, DType::kF32,
                                    {logits.extent(0), spec_.top_k}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "ids", ids, DType::kI32,
                                    {logits.extent(0), spec_.top_k}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "logits", logits, "weights", weights));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "logits", logits, "ids", ids));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weights", weights, "ids", ids));
  if (!spec_.biased) {
    if (bias.rank() == 0) return absl::OkStatus();
    return InvalidArgument(kOp, "bias is given; need none, as the spec says");
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "bias", bias, spec_.bias_dtype, {spec_.experts}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "bias", bias, "weights", weights));
  return CheckApart(kOp, "bias", bias, "ids", ids);
}

void RouterPlan::Route(const AnyTensorView& logits, const void* bias,
                       const MatrixView<float>& weights,
                       const MatrixView<int32_t>& ids, int64_t begin,
                       int64_t end) const {
  RouterRow row;
  const size_t size = SizeOf(spec_.logits_dtype);
  const RowsOf from(logits), to(weights), to_ids(ids);
  if (spec_.biased) {
    LoadRow(bias_blocks_, static_cast<const char*>(bias), spec_.experts,
            SizeOf(spec_.bias_dtype), row.bias);
  }
  for (int64_t t = begin; t < end; ++t) {
    LoadRow(logits_blocks_, from[t], spec_.experts, size, row.logits);
    kernels_.route(spec_, row, reinterpret_cast<float*>(to[t]),
                   reinterpret_cast<int32_t*>(to_ids[t]));
  }
}

void RouterPlan::Execute(const AnyTensorView& logits, const AnyTensorView& bias,
                         const MatrixView<float>& weights,
                         const MatrixView<int32_t>& ids,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(logits, bias, weights, ids));
  // A score and a choice take as long as the loads and stores of some 8
  // elements of a plain loop.
  ParallelRows(executor, logits.extent(0), 8 * spec_.experts,
               [&](int64_t begin, int64_t end) {
                 Route(logits, bias.data(), weights, ids, begin, end);
               });
}

}  // namespace quern
