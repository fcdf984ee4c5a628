#include "quern/ops/registry/families/rows/norm_declaration.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/activation.h"

namespace quern {
namespace {

using Spec = RmsNormSpec;
using Args = RmsNormArgs;

// The reference. Sum and norm are not rounded; the normalised row is rounded to
// the weight's dtype, and then the product. With 1 + weight, which is f32, and
// with exact sums, the product alone is rounded. h(i) is element i of the
// unrounded row; write(i, normed) is only called after the last call of h.
template <typename H, typename Write>
void NativeRow(const Spec& spec, const AnyTensorView& weights, const H& h,
               const Write& write) {
  double squares = 0;
  for (int64_t i = 0; i < spec.SpanColumns(); ++i) {
    squares += double{h(i)} * double{h(i)};
  }
  const double mean = squares / static_cast<double>(spec.SpanColumns());
  // simd sums again in double where f32 has overflowed.
  const float inverse =
      mean <= double{std::numeric_limits<float>::max()}
          ? 1.0f / std::sqrt(static_cast<float>(mean) + spec.eps)
          : static_cast<float>(1.0 / std::sqrt(mean + double{spec.eps}));
  const ScalarRow weight(
      spec.weight == NormWeight::kNone ? AnyTensorView() : weights, 0);
  const bool one_plus = spec.weight == NormWeight::kOnePlus;
  const NativeRound rd(spec.weight_dtype);
  for (int64_t i = 0; i < spec.hidden; ++i) {
    const float v = h(i) * inverse;
    float normed = v;
    if (!weight.null()) {
      const float w = one_plus ? spec.shift + weight[i] : weight[i];
      normed = one_plus || spec.sum == NormSum::kExact ? v * w : rd(rd(v) * w);
    }
    write(i, normed);
  }
}

}  // namespace

void NativeRmsNorm(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    NativeRow(
        spec, args.weight, [&](int64_t i) { return x[i]; },
        [&](int64_t i, float normed) { out.Set(i, normed); });
  }
}

void NativeAddRmsNorm(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), residual(args.residual, t), out(args.out, t);
    NativeRow(
        spec, args.weight, [&](int64_t i) { return x[i] + residual[i]; },
        [&](int64_t i, float normed) {
          residual.Set(i, x[i] + residual[i]);
          out.Set(i, normed);
        });
  }
}

absl::Status CheckRmsNorm(const RmsNormPlan& plan, const Args& args) {
  return plan.CheckArgs(args.x, args.weight, args.out);
}
void ExecuteRmsNorm(const RmsNormPlan& plan, const Args& args, Workspace,
                    Executor& executor) {
  plan.Execute(args.x, args.weight, args.out, executor);
}
absl::Status CheckAddRmsNorm(const RmsNormPlan& plan, const Args& args) {
  return plan.CheckAddArgs(args);
}
void ExecuteAddRmsNorm(const RmsNormPlan& plan, const Args& args, Workspace,
                       Executor& executor) {
  plan.ExecuteAdd(args, executor);
}

}  // namespace quern
