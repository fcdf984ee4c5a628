// Per-target include: e^x and e^x - 1 for x <= 0.

// clang-format off
#if defined(QUERN_CORE_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CORE_EXP_INL_H_
#undef QUERN_CORE_EXP_INL_H_
#else
#define QUERN_CORE_EXP_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Below this both results are at their limits, 0 and -1, in f32.
constexpr float kExpLowest = -128.0f;

// m * 2^k for whole k in [-185, 0]; NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> MulPow2(D d, hn::Vec<D> m, hn::Vec<D> k) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  // One instruction in place of ten.
  if constexpr (sizeof(hn::Vec<D>) == 64) {
    return hn::Vec<D>{_mm512_scalef_ps(m.raw, k.raw)};
  }
#endif
  const hn::RebindToSigned<D> di;
  const auto ki = hn::ConvertTo(di, k);
  // 2^-185 is not an f32, its root is.
  const auto a = hn::ShiftRight<1>(ki);
  const auto b = hn::Sub(ki, a);
  const auto bias = hn::Set(di, 127);
  const auto pow_a = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(a, bias)));
  const auto pow_b = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(b, bias)));
  return hn::Mul(hn::Mul(m, pow_a), pow_b);
}

// e^x = 2^k * (1 + q), k whole and |ln(1 + q)| <= ln(2) / 2, so that k = 0 and
// q = e^x - 1 near 0, where e^x - 1 must not cancel.
template <class D>
struct ExpParts {
  hn::Vec<D> q;
  hn::Vec<D> k;
};

// x - k ln(2). ln(2) in two parts; the first has 16 significant bits, so k
// times it is exact with or without fused multiply-add.
template <class D>
HWY_INLINE hn::Vec<D> ExpRemainder(D d, hn::Vec<D> x, hn::Vec<D> k) {
  const auto r = hn::NegMulAdd(k, hn::Set(d, 0.693145751953125f), x);
  return hn::NegMulAdd(k, hn::Set(d, 1.42860677e-6f), r);
}

// x in [kExpLowest, 0] or NaN; NaN gives q = NaN. The Taylor series of e^r - 1
// through r^7 is within 2^-25.9 of it, relative, for |r| <= ln(2) / 2.
template <class D>
HWY_INLINE ExpParts<D> SplitExp(D d, hn::Vec<D> x) {
  const auto k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  const auto r = ExpRemainder(d, x, k);

  auto p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  ExpParts<D> parts;
  parts.q = hn::MulAdd(hn::Mul(p, r), r, r);
  parts.k = k;
  return parts;
}

// e^x for x in [kExpLowest, 0], within 5 + |x| / 20 units of 2^-24, relative,
// where the result is normal; NaN for NaN. 1 + r + r^2 Q(r) is within 1.8 units
// of e^r for |r| <= ln(2) / 2, Q of degree 3 by Remez.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
#if HWY_NATIVE_FMA
  // k times ln(2) is not rounded before it is subtracted, and this ln(2) is off
  // by no more than 2^-29: 1 / 20 of a unit for each 1 of x.
  const auto r = hn::NegMulAdd(k, hn::Set(d, 0.693147182f), x);
#else
  const auto r = ExpRemainder(d, x, k);
#endif
  auto p = hn::Set(d, 0.00831251037f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.0418902472f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16667115f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.499992309f));
  p = hn::MulAdd(p, r, one);
  return MulPow2(d, hn::MulAdd(p, r, one), k);
}

// e^x - 1 for x in [kExpLowest, 0], within 4 units of 2^-24, relative; NaN for
// NaN.
template <class D>
HWY_INLINE hn::Vec<D> ExpM1NonPositive(D d, hn::Vec<D> x) {
  const auto parts = SplitExp(d, x);
  const auto pow = MulPow2(d, hn::Set(d, 1.0f), parts.k);
  return hn::MulAdd(parts.q, pow, hn::Sub(pow, hn::Set(d, 1.0f)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
