#include "quern/ops/norm/rms_norm_gated.h"

#include <algorithm>
#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/norm/inverse_rms.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

constexpr char kOp[] = "rms_norm_gated";

}  // namespace

RmsNormGatedPlan::RmsNormGatedPlan(const RmsNormGatedSpec& spec)
    : spec_(spec),
      kernels_(GetRmsNormGatedKernels(spec.activation)),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)),
      weight_blocks_(GetRowBlockKernels(spec.weight_dtype, spec.dtype)) {
  if (spec_.group == 0) spec_.group = spec_.hidden;
}

absl::StatusOr<RmsNormGatedPlan> RmsNormGatedPlan::Create(
    const RmsNormGatedSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "group", spec.group, 0, spec.hidden));
  if (spec.group != 0 && spec.hidden % spec.group != 0) {
    return InvalidArgument(kOp, "group=", spec.group,
                           "; need a divisor of hidden=", spec.hidden);
  }
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "eps", spec.eps, "finite eps"));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  return RmsNormGatedPlan(spec);
}

absl::Status RmsNormGatedPlan::CheckArgs(const AnyTensorView& x,
                                         const AnyTensorView& z,
                                         const AnyTensorView& weight,
                                         const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.dtype, {kAnyExtent, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weight", weight, spec_.weight_dtype, {spec_.hidden}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.dtype, {x.extent(0), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", weight, "out", out));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  if (spec_.gate == GateWhen::kNone) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "z", z, spec_.dtype, {x.extent(0), spec_.hidden}));
  return CheckInPlaceOrApart(kOp, "z", z, "out", out);
}

// Passes over each group twice while it stays in cache. The second pass
// computes the gate again, because that costs less than storing it.
void RmsNormGatedPlan::Execute(const AnyTensorView& x, const AnyTensorView& z,
                               const AnyTensorView& weight,
                               const AnyTensorView& out,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, z, weight, out));
  const bool gated = spec_.gate != GateWhen::kNone;
  const RowsOf xs(x), zs(gated ? z : x), outs(out);
  const char* const weights = static_cast<const char*>(weight.data());
  const size_t size = SizeOf(spec_.dtype);
  const size_t weight_size = SizeOf(spec_.weight_dtype);
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  const size_t group = static_cast<size_t>(spec_.group);
  ParallelRows(
      executor, x.extent(0), 3 * spec_.hidden, [&](int64_t begin, int64_t end) {
        alignas(64) float v[kRowBlock];
        alignas(64) float other[kRowBlock];
        for (int64_t t = begin; t < end; ++t) {
          const auto gate = [&](size_t at, size_t count, GateWhen when) {
            if (spec_.gate != when) return;
            blocks_.load(zs[t] + at * size, count, other);
            kernels_.gate(other, count, v);
          };
          const auto load = [&](size_t at, size_t count) {
            blocks_.load(xs[t] + at * size, count, v);
            gate(at, count, GateWhen::kGateFirst);
          };
          for (size_t g = 0; g < hidden; g += group) {
            float sum = 0.0f;
            for (size_t i = 0; i < group; i += kRowBlock) {
              const size_t count = std::min(kRowBlock, group - i);
              load(g + i, count);
              sum += kernels_.sum_squares(v, count);
            }
            const auto sum_again = [&] {
              double squares = 0;
              for (size_t i = 0; i < group; i += kRowBlock) {
                const size_t count = std::min(kRowBlock, group - i);
                load(g + i, count);
                squares += SumSquaresInDouble(v, static_cast<int64_t>(count));
              }
              return squares;
            };
            const float inverse =
                InverseRms(sum, spec_.group, spec_.eps, sum_again);
            for (size_t i = 0; i < group; i += kRowBlock) {
              const size_t count = std::min(kRowBlock, group - i);
              load(g + i, count);
              kernels_.scale(inverse, count, v);
              gate(g + i, count, GateWhen::kNormFirst);
              weight_blocks_.load(weights + (g + i) * weight_size, count,
                                  other);
              blocks_.mul_store(v, other, count, false,
                                outs[t] + (g + i) * size);
            }
          }
        }
      });
}

}  // namespace quern
