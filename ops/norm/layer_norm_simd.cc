#include "quern/core/sets/avx3.h"
#include "quern/ops/norm/layer_norm_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/layer_norm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;

void Add(const float* r, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, v + i), hn::Load(d, r + i)), d, v + i);
  }
}

// Four sums hide the latency of an addition. `at(i)` is a whole vector, and
// zeros from n on.
template <class At>
HWY_INLINE float SumOf(const At& at, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::Add(s0, at(i));
    s1 = hn::Add(s1, at(i + lanes));
    s2 = hn::Add(s2, at(i + 2 * lanes));
    s3 = hn::Add(s3, at(i + 3 * lanes));
  }
  for (; i < n; i += lanes) s0 = hn::Add(s0, at(i));
  return hn::ReduceSum(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

LayerNormMoments Moments(const float* HWY_RESTRICT v, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  LayerNormMoments moments;
  // A last partial vector is summed whole, because its other lanes are zero.
  const float sum =
      SumOf([v](size_t i) HWY_ATTR { return hn::Load(DF(), v + i); }, n);
  moments.mean = sum / static_cast<float>(n);
  const auto m = hn::Set(d, moments.mean);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  auto q0 = s0, q1 = s0, q2 = s0, q3 = s0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto x0 = hn::Sub(hn::Load(d, v + i), m);
    const auto x1 = hn::Sub(hn::Load(d, v + i + lanes), m);
    const auto x2 = hn::Sub(hn::Load(d, v + i + 2 * lanes), m);
    const auto x3 = hn::Sub(hn::Load(d, v + i + 3 * lanes), m);
    s0 = hn::Add(s0, x0);
    s1 = hn::Add(s1, x1);
    s2 = hn::Add(s2, x2);
    s3 = hn::Add(s3, x3);
    q0 = hn::MulAdd(x0, x0, q0);
    q1 = hn::MulAdd(x1, x1, q1);
    q2 = hn::MulAdd(x2, x2, q2);
    q3 = hn::MulAdd(x3, x3, q3);
  }
  for (; i < n; i += lanes) {
    // The lanes after the last number are zero and not the mean.
    const auto x = hn::IfThenElseZero(hn::FirstN(d, n - i),
                                      hn::Sub(hn::Load(d, v + i), m));
    s0 = hn::Add(s0, x);
    q0 = hn::MulAdd(x, x, q0);
  }
  moments.rest = hn::ReduceSum(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
  moments.squares = hn::ReduceSum(d, hn::Add(hn::Add(q0, q1), hn::Add(q2, q3)));
  return moments;
}

template <bool kWeight, bool kBias>
HWY_INLINE void ScaleBy(const LayerNormScale& by, const float* HWY_RESTRICT w,
                        const float* HWY_RESTRICT b, size_t n,
                        float* HWY_RESTRICT v) {
  const DF d;
  const auto m = hn::Set(d, by.mean), r = hn::Set(d, by.rest);
  const auto s = hn::Set(d, by.scale);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    auto x = hn::Mul(hn::Sub(hn::Sub(hn::Load(d, v + i), m), r), s);
    if constexpr (kWeight && kBias) {
      x = hn::MulAdd(x, hn::Load(d, w + i), hn::Load(d, b + i));
    } else if constexpr (kWeight) {
      x = hn::Mul(x, hn::Load(d, w + i));
    } else if constexpr (kBias) {
      x = hn::Add(x, hn::Load(d, b + i));
    }
    hn::Store(x, d, v + i);
  }
}

void Scale(const LayerNormScale& scale, const float* w, const float* b,
           size_t n, float* v) {
  if (w != nullptr) {
    b != nullptr ? ScaleBy<true, true>(scale, w, b, n, v)
                 : ScaleBy<true, false>(scale, w, b, n, v);
  } else {
    b != nullptr ? ScaleBy<false, true>(scale, w, b, n, v)
                 : ScaleBy<false, false>(scale, w, b, n, v);
  }
}

LayerNormKernels GetKernels() {
  LayerNormKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.add = &Add;
  kernels.moments = &Moments;
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
LayerNormKernels GetLayerNormKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
