#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/norm/rms_norm_gated_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/rms_norm_gated_simd.cc"
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

void GateSilu(const float* z, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, v + i), Silu(d, hn::Load(d, z + i))), d,
              v + i);
  }
}

void GateSigmoid(const float* z, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, v + i), Sigmoid(d, hn::Load(d, z + i))), d,
              v + i);
  }
}

// A last partial vector is summed whole, because its other lanes are zero.
float SumSquares(const float* v, size_t n) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto x = hn::Load(d, v + i);
    sum = hn::MulAdd(x, x, sum);
  }
  return hn::ReduceSum(d, sum);
}

void Scale(float scale, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, v + i), hn::Set(d, scale)), d, v + i);
  }
}

RmsNormGatedKernels GetKernels(NormGate gate) {
  RmsNormGatedKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.gate = gate == NormGate::kSilu ? &GateSilu : &GateSigmoid;
  kernels.sum_squares = &SumSquares;
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
RmsNormGatedKernels GetRmsNormGatedKernels(NormGate gate) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(gate);
}
}  // namespace quern
#endif  // HWY_ONCE
