// Per-target include: e^x and e^x - 1 for x <= 0, and ln(1 + w) for what such
// an e^x is.

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

// Below this argument e^x and e^x - 1 are at their limits, 0 and -1, in f32.
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

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// 0.499996327 * 2^(i / 32).
alignas(64) constexpr float kExpTable[32] = {
    0.499996334f, 0.510944843f, 0.522133052f, 0.533566296f, 0.545249879f,
    0.557189286f, 0.569390118f, 0.581858158f, 0.594599187f, 0.607619226f,
    0.620924354f, 0.634520829f, 0.648415029f, 0.662613451f, 0.677122772f,
    0.691949844f, 0.707101583f, 0.722585082f, 0.738407671f, 0.754576683f,
    0.771099746f, 0.78798461f,  0.80523926f,  0.822871685f, 0.840890229f,
    0.859303355f, 0.878119648f, 0.897347927f, 0.916997313f, 0.937076926f,
    0.957596242f, 0.978564858f};

// e^x = 2^k * 2^(i / 32) * e^r, |r| <= ln(2) / 64. e^r is 0.499996327 ((r +
// 1.00002204)^2 + 0.99997062) within 0.9 units, by Remez: two vectors of table
// are four multiply-adds less.
HWY_INLINE hn::Vec512<float> ExpByTable(hn::Vec512<float> x) {
  const hn::Full512<float> d;
  // Its unit in the last place is 1 / 32, so that the lower five bits are i.
  const auto round = hn::Set(d, 0x1.8p18f);
  const auto rounded = hn::MulAdd(x, hn::Set(d, 1.44269504f), round);
  const auto power = hn::Vec512<float>{_mm512_permutex2var_ps(
      hn::Load(d, kExpTable).raw, _mm512_castps_si512(rounded.raw),
      hn::Load(d, kExpTable + 16).raw)};
  const auto k = hn::Sub(rounded, round);  // and i / 32
  const auto r = hn::NegMulAdd(k, hn::Set(d, 0.693147182f), x);
  const auto s = hn::Add(r, hn::Set(d, 1.00002204f));
  const auto q = hn::MulAdd(s, s, hn::Set(d, 0.99997062f));
  // The instruction rounds its second argument down.
  return hn::Vec512<float>{_mm512_scalef_ps(hn::Mul(q, power).raw, k.raw)};
}
#endif

// e^x for x in [kExpLowest, 0], within 5 + |x| / 20 units of 2^-24, relative,
// where the result is normal; NaN for NaN. k times ln(2) is not rounded before
// it is subtracted where there is fused multiply-add, and the nearest f32 is
// off by no more than 2^-29: 1 / 20 of a unit for each 1 of x.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (sizeof(hn::Vec<D>) == 64) return ExpByTable(x);
#endif
  const auto one = hn::Set(d, 1.0f);
  const auto k = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
#if HWY_NATIVE_FMA
  const auto r = hn::NegMulAdd(k, hn::Set(d, 0.693147182f), x);
#else
  const auto r = ExpRemainder(d, x, k);
#endif
  // 1 + r + r^2 Q(r) is within 1.8 units of e^r for |r| <= ln(2) / 2, Q of
  // degree 3 by Remez.
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

// ln(1 + w) for w in [0, 1], within 4 units of 2^-24, relative; 0 for 0, NaN
// for NaN. With z = w / (2 + w) <= 1/3 it is 2 atanh(z) = 2 z (1 + z^2 / 3 +
// z^4 / 5 + ...), and what follows z^14 / 15 is below 2^-29.
template <class D>
HWY_INLINE hn::Vec<D> Log1pOfFraction(D d, hn::Vec<D> w) {
  const auto z = hn::Div(w, hn::Add(w, hn::Set(d, 2.0f)));
  const auto z2 = hn::Mul(z, z);
  auto p = hn::Set(d, 1.0f / 15);
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 13));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 11));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 9));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 7));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 5));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f / 3));
  p = hn::MulAdd(p, z2, hn::Set(d, 1.0f));
  return hn::Mul(hn::Add(z, z), p);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
