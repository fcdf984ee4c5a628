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

// A last partial vector is summed whole, because its other lanes are zero.
float Sum(const float* v, size_t n) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    sum = hn::Add(sum, hn::Load(d, v + i));
  }
  return hn::ReduceSum(d, sum);
}

void Deviations(const float* v, size_t n, float mean, float* sum,
                float* squares) {
  const DF d;
  const auto m = hn::Set(d, mean);
  auto s = hn::Zero(d), s2 = s;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    const auto x = hn::Sub(hn::Load(d, v + i), m);
    s = hn::Add(s, x);
    s2 = hn::MulAdd(x, x, s2);
  }
  if (i < n) {
    // The other lanes are zero and not the mean.
    const auto x = hn::IfThenElseZero(hn::FirstN(d, n - i),
                                      hn::Sub(hn::Load(d, v + i), m));
    s = hn::Add(s, x);
    s2 = hn::MulAdd(x, x, s2);
  }
  *sum = hn::ReduceSum(d, s);
  *squares = hn::ReduceSum(d, s2);
}

void Scale(float mean, float rest, float scale, size_t n, float* v) {
  const DF d;
  const auto m = hn::Set(d, mean), r = hn::Set(d, rest), s = hn::Set(d, scale);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto x = hn::Sub(hn::Sub(hn::Load(d, v + i), m), r);
    hn::Store(hn::Mul(x, s), d, v + i);
  }
}

void Multiply(const float* w, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, v + i), hn::Load(d, w + i)), d, v + i);
  }
}

LayerNormKernels GetKernels() {
  LayerNormKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.add = &Add;
  kernels.sum = &Sum;
  kernels.deviations = &Deviations;
  kernels.scale = &Scale;
  kernels.multiply = &Multiply;
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
