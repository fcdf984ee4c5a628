#include <cstddef>

#include "quern/core/sets/avx3.h"
#include "quern/ops/activation/sigmoid_mul_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/sigmoid_mul_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;

// With e = e^-|g|, the sigmoid is 1 / (1 + e) for g >= 0 and e / (1 + e) for
// g < 0, so that nothing overflows.
void Sigmoid(size_t n, float* g) {
  const DF d;
  const auto one = hn::Set(d, 1.0f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto v = hn::Load(d, g + i);
    const auto e = ExpNonPositive(d, AtLeastExpLowest(d, hn::Neg(hn::Abs(v))));
    const auto numerator = hn::IfThenElse(hn::Lt(v, hn::Zero(d)), e, one);
    hn::Store(hn::Div(numerator, hn::Add(e, one)), d, g + i);
  }
}

SigmoidMulKernels GetKernels() {
  SigmoidMulKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.sigmoid = &Sigmoid;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
SigmoidMulKernels GetSigmoidMulKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
