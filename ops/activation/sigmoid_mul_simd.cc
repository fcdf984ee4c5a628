#include <cstddef>

#include "quern/core/sets/avx3.h"
#include "quern/ops/activation/sigmoid_mul_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/sigmoid_mul_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;

void SigmoidInPlace(size_t n, float* g) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(Sigmoid(d, hn::Load(d, g + i)), d, g + i);
  }
}

SigmoidMulKernels GetKernels() {
  SigmoidMulKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.sigmoid = &SigmoidInPlace;
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
