#include "quern/ops/norm/l2_norm.h"

#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/norm/inverse_rms.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "l2_norm";

}  // namespace

absl::StatusOr<L2NormPlan> L2NormPlan::Create(const L2NormSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "eps", spec.eps, "finite eps"));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "x_dtype", spec.x_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kFloatDTypes));
  if (!HasRmsNormKernels(spec.x_dtype, spec.x_dtype, spec.out_dtype,
                         spec.x_dtype)) {
    return Unimplemented(kOp, "x is ", DTypeName(spec.x_dtype), ", out ",
                         DTypeName(spec.out_dtype),
                         "; need f32 or bf16 each, or f16 (out also f32)");
  }
  return L2NormPlan(spec);
}

// The kernels of rms_norm without a weight: a sum of squares and a product.
L2NormPlan::L2NormPlan(const L2NormSpec& spec)
    : spec_(spec),
      kernels_(GetRmsNormKernels(spec.x_dtype, spec.x_dtype, spec.out_dtype,
                                 spec.x_dtype)) {}

absl::Status L2NormPlan::CheckArgs(const L2NormArgs& args) const {
  const AnyTensorView& x = args.x;
  if (x.rank() == 3) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, spec_.x_dtype,
                                     {kAnyExtent, kAnyExtent, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out", args.out, spec_.out_dtype,
                    {x.extent(0), x.extent(1), spec_.hidden}));
  } else {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "x", x, spec_.x_dtype, {kAnyExtent, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", args.out, spec_.out_dtype,
                                      {x.extent(0), spec_.hidden}));
  }
  return CheckInPlaceOrApart(kOp, "x", x, "out", args.out);
}

void L2NormPlan::Execute(const L2NormArgs& args,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  if (IsEmpty(args.x)) return;
  const bool by_head = args.x.rank() == 3;
  const int64_t heads = by_head ? args.x.extent(1) : 1;
  ParallelRows(executor, args.x.extent(0), 2 * heads * spec_.hidden,
               [&](int64_t begin, int64_t end) {
                 if (!by_head) return Normalise(args.x, args.out, begin, end);
                 for (int64_t t = begin; t < end; ++t) {
                   Normalise(HeadsOf(args.x, t), HeadsOf(args.out, t), 0,
                             heads);
                 }
               });
}

// Does not stream, because the delta rule reads q and k next.
void L2NormPlan::Normalise(const AnyTensorView& x, const AnyTensorView& out,
                           int64_t begin, int64_t end) const {
  const RowsOf xs(x), outs(out);
  const size_t n = static_cast<size_t>(spec_.hidden);
  RmsNormScale scale = {};
  for (int64_t i = begin; i < end; ++i) {
    // The mean over one is the sum.
    scale.scale = InverseRms(kernels_.sum_squares(xs[i], n), 1, spec_.eps, [&] {
      return SumSquaresInDouble(spec_.x_dtype, xs[i], spec_.hidden);
    });
    scale.next = i + 1 < end ? xs[i + 1] : nullptr;
    kernels_.scale_x(xs[i], scale, outs[i], n);
  }
}

}  // namespace quern
