#include "quern/core/sets/avx3.h"
#include "quern/ops/sampling/sampler_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sampling/sampler_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
constexpr size_t kBlock = static_cast<size_t>(kSamplerBlock);

// Sums of doubles have 16 lanes, whatever the vectors: a vector of at most
// eight takes every sixteenth number from its first lane on.
constexpr size_t kSumLanes = 16;
using DD = hn::CappedTag<double, 8>;
using DHalf = hn::Rebind<float, DD>;

// Adds 16 sums in pairs.
HWY_INLINE double SumOfLanes(double* lanes) {
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

float Largest(const float* HWY_RESTRICT logits) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  // Comparisons with NaN are false.
  auto most = hn::Neg(hn::Inf(d));
  for (size_t i = 0; i < kBlock; i += lanes) {
    const auto l = hn::LoadU(d, logits + i);
    most = hn::IfThenElse(hn::Gt(l, most), l, most);
  }
  return hn::ReduceMax(d, most);
}

// a * b, which the compiler does not fuse with a sum.
HWY_INLINE VF Product(VF a, VF b, VF zero) {
  return hn::Or(hn::Mul(a, b), zero);
}

// e^x for x in [-87, 0]: 2^k e^r with |r| <= ln(2) / 2, and 1 + r + r^2 Q(r)
// within 1.8 units of e^r, Q of degree 3 by Remez. ln(2) is in two parts; the
// first has 16 significant bits, so k times it is exact.
HWY_INLINE VF Exp(VF x, VF zero) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const auto one = hn::Set(d, 1.0f);
  const auto k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  auto r = hn::Sub(x, hn::Mul(k, hn::Set(d, 0.693145751953125f)));
  r = hn::Sub(r, Product(k, hn::Set(d, 1.42860677e-6f), zero));
  auto p = hn::Set(d, 0.00831251037f);
  p = hn::Add(Product(p, r, zero), hn::Set(d, 0.0418902472f));
  p = hn::Add(Product(p, r, zero), hn::Set(d, 0.16667115f));
  p = hn::Add(Product(p, r, zero), hn::Set(d, 0.499992309f));
  p = hn::Add(Product(p, r, zero), one);
  p = hn::Add(Product(p, r, zero), one);
  // The result is a normal number, so k is added to its exponent.
  return hn::BitCast(
      d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::ConvertTo(di, k))));
}

void Weights(const float* HWY_RESTRICT logits, const WeightRule& rule,
             float* HWY_RESTRICT weights) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto largest = hn::Set(d, rule.largest);
  const auto temperature = hn::Set(d, rule.temperature);
  const auto least_logit = hn::Set(d, rule.least_logit);
  const auto least_weight = hn::Set(d, rule.least_weight);
  const auto zero = hn::Set(d, rule.zero);
  const auto lowest = hn::Set(d, -87.0f);
  for (size_t i = 0; i < kBlock; i += lanes) {
    const auto l = hn::LoadU(d, logits + i);
    const auto x = hn::Div(hn::Sub(l, largest), temperature);
    const auto counts = hn::Ge(x, lowest);
    auto w =
        hn::IfThenElseZero(counts, Exp(hn::IfThenElseZero(counts, x), zero));
    // Also where both are infinite, and their difference is NaN.
    w = hn::IfThenElse(hn::Eq(l, largest), hn::Set(d, 1.0f), w);
    w = hn::IfThenElseZero(
        hn::And(hn::Ge(l, least_logit), hn::Ge(w, least_weight)), w);
    hn::StoreU(w, d, weights + i);
  }
}

double Sum(const float* HWY_RESTRICT weights) {
  const DD d;
  const DHalf d_half;
  const size_t lanes = hn::Lanes(d);
  double sums[kSumLanes];
  for (size_t first = 0; first < kSumLanes; first += lanes) {
    auto sum = hn::Zero(d);
    for (size_t i = first; i < kBlock; i += kSumLanes) {
      sum = hn::Add(sum, hn::PromoteTo(d, hn::LoadU(d_half, weights + i)));
    }
    hn::StoreU(sum, d, sums + first);
  }
  return SumOfLanes(sums);
}

SamplerMoments Moments(const float* HWY_RESTRICT logits,
                       const WeightRule& rule) {
  const DD d;
  const DHalf d_half;
  const size_t lanes = hn::Lanes(d);
  const auto largest = hn::Set(d, static_cast<double>(rule.largest));
  const auto zero = hn::Set(d, static_cast<double>(rule.zero));
  const auto none = hn::Neg(hn::Inf(d));
  double sums[kSumLanes], squares[kSumLanes];
  SamplerMoments moments;
  for (size_t first = 0; first < kSumLanes; first += lanes) {
    auto sum = hn::Zero(d);
    auto square = hn::Zero(d);
    for (size_t i = first; i < kBlock; i += kSumLanes) {
      const auto l = hn::PromoteTo(d, hn::LoadU(d_half, logits + i));
      const auto counts = hn::Gt(l, none);
      const auto off = hn::IfThenElseZero(counts, hn::Sub(largest, l));
      moments.count += static_cast<int64_t>(hn::CountTrue(d, counts));
      sum = hn::Add(sum, off);
      square = hn::Add(square, hn::Or(hn::Mul(off, off), zero));
    }
    hn::StoreU(sum, d, sums + first);
    hn::StoreU(square, d, squares + first);
  }
  moments.sum = SumOfLanes(sums);
  moments.squares = SumOfLanes(squares);
  return moments;
}

SamplerCounts Counts(const float* HWY_RESTRICT logits, float value) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto than = hn::Set(d, value);
  SamplerCounts counts;
  for (size_t i = 0; i < kBlock; i += lanes) {
    const auto l = hn::LoadU(d, logits + i);
    counts.greater += static_cast<int32_t>(hn::CountTrue(d, hn::Gt(l, than)));
    counts.equal += static_cast<int32_t>(hn::CountTrue(d, hn::Eq(l, than)));
  }
  return counts;
}

SamplerKernels GetKernels() {
  SamplerKernels kernels;
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.largest = &Largest;
  kernels.weights = &Weights;
  kernels.sum = &Sum;
  kernels.moments = &Moments;
  kernels.counts = &Counts;
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
SamplerKernels GetSamplerKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
