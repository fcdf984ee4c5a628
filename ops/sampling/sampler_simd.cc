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

// Four maxima, because each comparison waits for the one before.
float Largest(const float* HWY_RESTRICT logits) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  // Comparisons with NaN are false.
  const auto larger = [](VF l, VF most) HWY_ATTR {
    return hn::IfThenElse(hn::Gt(l, most), l, most);
  };
  auto m0 = hn::Neg(hn::Inf(d)), m1 = m0, m2 = m0, m3 = m0;
  for (size_t i = 0; i < kBlock; i += 4 * lanes) {
    m0 = larger(hn::LoadU(d, logits + i), m0);
    m1 = larger(hn::LoadU(d, logits + i + lanes), m1);
    m2 = larger(hn::LoadU(d, logits + i + 2 * lanes), m2);
    m3 = larger(hn::LoadU(d, logits + i + 3 * lanes), m3);
  }
  return hn::ReduceMax(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3)));
}

// a * b + c, rounded once on every instruction set.
HWY_INLINE VF FusedMulAdd(VF a, VF b, VF c) {
  const DF d;
#if HWY_NATIVE_FMA || HWY_TARGET == HWY_SCALAR
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  // The product is exact in double. The sum is rounded to odd there: an even
  // one that is inexact goes to the odd neighbour on the side of what it lost.
  // So it is no tie of f32 unless the exact sum is.
  const hn::RepartitionToWide<DF> dd;
  const hn::RebindToSigned<decltype(dd)> di;
  const auto half = [&](auto a2, auto b2, auto c2) HWY_ATTR {
    const auto product = hn::Mul(a2, b2);
    const auto sum = hn::Add(product, c2);
    const auto part = hn::Sub(sum, product);
    const auto lost =
        hn::Add(hn::Sub(product, hn::Sub(sum, part)), hn::Sub(c2, part));
    const auto bits = hn::BitCast(di, sum);
    const auto one = hn::Set(di, 1);
    const auto inexact = hn::RebindMask(di, hn::Ne(lost, hn::Zero(dd)));
    const auto even = hn::Eq(hn::And(bits, one), hn::Zero(di));
    const auto same = hn::RebindMask(
        di, hn::Gt(hn::Mul(hn::CopySign(hn::Set(dd, 1.0), lost), sum),
                   hn::Zero(dd)));
    const auto step = hn::IfThenElse(same, one, hn::Set(di, -1));
    return hn::BitCast(
        dd, hn::Add(bits, hn::IfThenElseZero(hn::And(inexact, even), step)));
  };
  const hn::Half<DF> dh;
  const auto low = half(hn::PromoteLowerTo(dd, a), hn::PromoteLowerTo(dd, b),
                        hn::PromoteLowerTo(dd, c));
  const auto high = half(hn::PromoteUpperTo(dd, a), hn::PromoteUpperTo(dd, b),
                         hn::PromoteUpperTo(dd, c));
  return hn::Combine(d, hn::DemoteTo(dh, high), hn::DemoteTo(dh, low));
#endif
}
// c - a * b
HWY_INLINE VF FusedNegMulAdd(VF a, VF b, VF c) {
#if HWY_NATIVE_FMA
  return hn::NegMulAdd(a, b, c);
#else
  return FusedMulAdd(hn::Neg(a), b, c);
#endif
}

// How e^(difference / temperature) is computed.
struct ExpRule {
  VF scale;      // log2(e) / temperature
  VF high, low;  // their sum is temperature * ln(2)
  VF inverse;    // 1 / temperature
};

// e^(x / temperature) for exponents in [-87, 0], within 4 units of 2^-24,
// relative: 2^k e^r with |r| <= ln(2) / 2, where r = (x - k ln(2) temperature)
// / temperature, and 1 + r + r^2 Q(r) within 1.8 units of e^r, Q of degree 3 by
// Remez. For other exponents the result is any number or NaN.
HWY_INLINE VF Exp(VF x, const ExpRule& rule) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  // A sum with 1.5 * 2^23 rounds to a whole number, which the last bits hold.
  const auto shifter = hn::Set(d, 0x1.8p23f);
  const auto t = FusedMulAdd(x, rule.scale, shifter);
  const auto k = hn::Sub(t, shifter);
  const auto r =
      hn::Mul(FusedNegMulAdd(k, rule.low, FusedNegMulAdd(k, rule.high, x)),
              rule.inverse);
  const auto r2 = hn::Mul(r, r);
  const auto high =
      FusedMulAdd(r, hn::Set(d, 0.00831251037f), hn::Set(d, 0.0418902472f));
  const auto low =
      FusedMulAdd(r, hn::Set(d, 0.16667115f), hn::Set(d, 0.499992309f));
  const auto p =
      hn::Add(FusedMulAdd(FusedMulAdd(high, r2, low), r2, r), hn::Set(d, 1.0f));
  // The result is a normal number, so k is added to its exponent.
  return hn::BitCast(
      d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t))));
}

// kFilters: a logit or a weight may be too small. kExtreme: the largest logit
// is infinite, or 1 / temperature near the ends of f32.
template <bool kFilters, bool kExtreme>
HWY_INLINE void WeightsBy(const float* HWY_RESTRICT logits,
                          const WeightRule& rule, float* HWY_RESTRICT weights) {
  const DF d;
  const float temperature = kExtreme ? 1.0f : rule.temperature;
  const double ln2 = 0.693147180559945309 * static_cast<double>(temperature);
  const auto high = static_cast<float>(ln2);
  const ExpRule exp = {
      hn::Set(d, static_cast<float>(1.0 / ln2)), hn::Set(d, high),
      hn::Set(d, static_cast<float>(ln2 - static_cast<double>(high))),
      hn::Set(d, 1.0f / temperature)};
  const auto lowest = hn::Set(d, -87.0f * temperature);
  const auto largest = hn::Set(d, rule.largest);
  const auto divisor = hn::Set(d, rule.temperature);
  const auto least_logit = hn::Set(d, rule.least_logit);
  const auto least_weight = hn::Set(d, rule.least_weight);
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    const auto l = hn::LoadU(d, logits + i);
    auto x = hn::Sub(l, largest);
    if constexpr (kExtreme) x = hn::Div(x, divisor);
    auto w = hn::IfThenElseZero(hn::Ge(x, lowest), Exp(x, exp));
    if constexpr (kExtreme) {
      // Also where both are infinite, and their difference is NaN.
      w = hn::IfThenElse(hn::Eq(l, largest), hn::Set(d, 1.0f), w);
    }
    if constexpr (kFilters) {
      w = hn::IfThenElseZero(
          hn::And(hn::Ge(l, least_logit), hn::Ge(w, least_weight)), w);
    }
    hn::StoreU(w, d, weights + i);
  }
}

// From memory, where a load widens: sums of the vectors as they are computed
// take a quarter more time (Zen 5, 2026).
double Sum(const float* HWY_RESTRICT weights) {
  const DD d;
  const DHalf d_half;
  const size_t lanes = hn::Lanes(d);
  const auto load = [&](size_t i) HWY_ATTR {
    return hn::PromoteTo(d, hn::LoadU(d_half, weights + i));
  };
  double sums[kSumLanes];
  for (size_t first = 0; first < kSumLanes; first += 2 * lanes) {
    auto s0 = hn::Zero(d), s1 = s0;
    for (size_t i = first; i < kBlock; i += kSumLanes) {
      s0 = hn::Add(s0, load(i));
      s1 = hn::Add(s1, load(i + lanes));
    }
    hn::StoreU(s0, d, sums + first);
    hn::StoreU(s1, d, sums + first + lanes);
  }
  return SumOfLanes(sums);
}

double Weights(const float* HWY_RESTRICT logits, const WeightRule& rule,
               float* HWY_RESTRICT weights) {
  constexpr float kMost = hwy::HighestValue<float>();
  const float t = rule.temperature;
  if (!(rule.largest <= kMost && t > 0x1p-60f && t < 0x1p60f)) {
    WeightsBy<true, true>(logits, rule, weights);
  } else if (rule.least_logit < -kMost && rule.least_weight <= 0.0f) {
    WeightsBy<false, false>(logits, rule, weights);
  } else {
    WeightsBy<true, false>(logits, rule, weights);
  }
  return Sum(weights);
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

int32_t Greater(const float* HWY_RESTRICT logits, float value) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const auto than = hn::Set(d, value);
  auto count = hn::Zero(di);
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    // A lane is -1 where the comparison is true.
    const auto greater = hn::Gt(hn::LoadU(d, logits + i), than);
    count = hn::Sub(count, hn::BitCast(di, hn::VecFromMask(d, greater)));
  }
  return hn::ReduceSum(di, count);
}

SamplerKernels GetKernels() {
  SamplerKernels kernels;
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.largest = &Largest;
  kernels.weights = &Weights;
  kernels.sum = &Sum;
  kernels.moments = &Moments;
  kernels.greater = &Greater;
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
