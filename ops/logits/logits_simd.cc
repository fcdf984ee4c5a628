#include "quern/ops/logits/logits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logits/logits_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// tanh(v). With m = exp(-2|v|) - 1, tanh |v| = -m / (2 + m), which does not
// cancel near 0.
HWY_INLINE VF Tanh(VF v) {
  const DF d;
  const auto lowest = hn::Set(d, kExpLowest);
  const auto x = hn::Mul(hn::Set(d, -2.0f), hn::Abs(v));
  const auto m =
      ExpM1NonPositive(d, hn::IfThenElse(hn::Lt(x, lowest), lowest, x));
  const auto magnitude = hn::Div(hn::Neg(m), hn::Add(m, hn::Set(d, 2.0f)));
  return hn::CopySign(magnitude, v);
}

void CapAndScale(float* logits, size_t n, float cap, float scale) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto vcap = hn::Set(d, cap);
  const auto vscale = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto t = Tanh(hn::Div(hn::LoadU(d, logits + i), vcap));
    hn::StoreU(hn::Mul(hn::Mul(t, vcap), vscale), d, logits + i);
  }
  if (i < n) {
    const auto t = Tanh(hn::Div(hn::LoadN(d, logits + i, n - i), vcap));
    hn::StoreN(hn::Mul(hn::Mul(t, vcap), vscale), d, logits + i, n - i);
  }
}

void Scale(float* logits, size_t n, float scale) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto vscale = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, logits + i), vscale), d, logits + i);
  }
  if (i < n) {
    hn::StoreN(hn::Mul(hn::LoadN(d, logits + i, n - i), vscale), d, logits + i,
               n - i);
  }
}

LogitsKernels GetKernels() {
  LogitsKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.cap_and_scale = &CapAndScale;
  kernels.scale = &Scale;
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
LogitsKernels GetLogitsKernels() { return HWY_DYNAMIC_DISPATCH(GetKernels)(); }
}  // namespace quern
#endif  // HWY_ONCE
