// Per-target include: activations of f32, in f32, and how many units of
// 2^-24, relative, they are off at most:
//
//   Silu(d, v) = v / (1 + e^-v)                    10
//   Gelu(d, v) = v * Phi(v)                        16 + min(v^2 / 2, 110)
//     Phi(v) = erfc(-v / sqrt(2)) / 2
//   GeluTanh(d, v) = v / (1 + e^-w),               10 + 4 min(|w|, 110)
//     w = 2 sqrt(2 / pi) (v + 0.044715 v^3): v / 2 * (1 + tanh(w / 2))
//
// plus an absolute 140 * 2^-149, for where an e^x is no normal number its own
// rounding is multiplied by v. Far enough down all are -0, -infinity included
// (the limit); infinity gives infinity, NaN gives NaN, and -0 gives -0.

// clang-format off
#if defined(QUERN_CORE_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CORE_ACTIVATION_INL_H_
#undef QUERN_CORE_ACTIVATION_INL_H_
#else
#define QUERN_CORE_ACTIVATION_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// max(x, kExpLowest); NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> AtLeastExpLowest(D d, hn::Vec<D> x) {
  const auto lowest = hn::Set(d, kExpLowest);
#if HWY_ARCH_X86
  return hn::Max(lowest, x);  // the second operand if either is NaN
#else
  return hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
#endif
}

// -min(|w|, -kExpLowest). A NaN gives NaN, or an unspecified number with
// 512-bit vectors.
template <class D>
HWY_INLINE hn::Vec<D> ExpArgument(D d, hn::Vec<D> w) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (sizeof(hn::Vec<D>) == 64) {
    // The smaller magnitude (2), with its sign set (12).
    return hn::Vec<D>{
        _mm512_range_ps(w.raw, hn::Set(d, kExpLowest).raw, 12 + 2)};
  }
#endif
  return AtLeastExpLowest(d, hn::Neg(hn::Abs(w)));
}

// e^-|x| and 1 / (1 + e^-x), NaN for NaN. With e = e^-|x| the latter is
// 1 / (1 + e) from zero on and e / (1 + e) below, so that nothing overflows.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfMinusAbs(D d, hn::Vec<D> x) {
  return ExpNonPositive(d, AtLeastExpLowest(d, hn::Neg(hn::Abs(x))));
}
template <class D>
HWY_INLINE hn::Vec<D> Sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto e = ExpOfMinusAbs(d, x);
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(e, one));
}

// x / y for y in [1, 2], within 3 units of 2^-24.
template <class D>
HWY_INLINE hn::Vec<D> DivBySmall(D d, hn::Vec<D> x, hn::Vec<D> y) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3 && HWY_TARGET != HWY_AVX3_ZEN4
  // Good to 2^-14, and to 2^-28 after a step of Newton's. On Zen 4 a quotient
  // costs two multiplications, and this four (2026).
  const auto r = hn::ApproximateReciprocal(y);
  const auto error = hn::NegMulAdd(y, r, hn::Set(d, 1.0f));
  return hn::Mul(x, hn::MulAdd(r, error, r));
#else
  (void)d;
  return hn::Div(x, y);
#endif
}

// x / (1 + e^-w) for w of the sign of x >= kExpLowest. With e = e^-|w| that is
// x / (1 + e) above zero and x * e / (1 + e) below, so that nothing overflows.
template <class D>
HWY_INLINE hn::Vec<D> MulSigmoid(D d, hn::Vec<D> x, hn::Vec<D> w) {
  const auto e = ExpNonPositive(d, ExpArgument(d, w));
  const auto negative = hn::Lt(x, hn::Zero(d));
  const auto numerator = hn::MaskedMulOr(x, negative, x, e);
  return DivBySmall(d, numerator, hn::Add(e, hn::Set(d, 1.0f)));
}

// Clamping v first makes -infinity a number whose product with e = 0 is -0.
template <class D>
HWY_INLINE hn::Vec<D> Silu(D d, hn::Vec<D> v) {
  const auto x = AtLeastExpLowest(d, v);
  return MulSigmoid(d, x, x);
}

// v / (1 + e^(-slope v)) for slope > 0. Clamping v makes -infinity finite;
// below the clamp e^(slope v) is 0 in any case.
template <class D>
HWY_INLINE hn::Vec<D> SlopedSilu(D d, float slope, hn::Vec<D> v) {
  const auto lowest = hn::Set(d, kExpLowest / slope);
  const auto x = hn::IfThenElse(hn::Lt(v, lowest), lowest, v);
  return MulSigmoid(d, x, hn::Mul(x, hn::Set(d, slope)));
}

// min(v, most) and max(v, least) by a select, so that NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> AtMost(D d, hn::Vec<D> v, float most) {
  const auto limit = hn::Set(d, most);
  return hn::IfThenElse(hn::Gt(v, limit), limit, v);
}
template <class D>
HWY_INLINE hn::Vec<D> AtLeast(D d, hn::Vec<D> v, float least) {
  const auto limit = hn::Set(d, least);
  return hn::IfThenElse(hn::Lt(v, limit), limit, v);
}

// w / v of GeluTanh: 2 sqrt(2 / pi), and 0.044715 times that.
template <class D>
HWY_INLINE hn::Vec<D> GeluTanhSlope(D d, hn::Vec<D> v) {
  return hn::MulAdd(hn::Mul(v, v), hn::Set(d, 0.0713548163f),
                    hn::Set(d, 1.59576912f));
}

template <class D>
HWY_INLINE hn::Vec<D> GeluTanh(D d, hn::Vec<D> v) {
  const auto x = AtLeastExpLowest(d, v);
  return MulSigmoid(d, x, hn::Mul(x, GeluTanhSlope(d, x)));
}

// With z = |v| / sqrt(2) and t = 1 / (1 + 0.325 z), erfc(z) = t e^(-z^2) Q(2 t
// - 1): Q interpolates at Chebyshev's points for z <= 9.5 and is within 2^-25.6
// of that, relative; the slope 0.325 was the best of a scan.
template <class D>
HWY_INLINE hn::Vec<D> Gelu(D d, hn::Vec<D> v) {
  const auto x = AtLeastExpLowest(d, v);
  const auto one = hn::Set(d, 1.0f);
  const auto half = hn::Set(d, 0.5f);
  const auto t =
      hn::Div(one, hn::MulAdd(hn::Abs(x), hn::Set(d, 0.229809704f), one));
  const auto u = hn::Sub(hn::Add(t, t), one);
  auto q = hn::Set(d, 0.00011919212556676939f);
  q = hn::MulAdd(q, u, hn::Set(d, -0.00029872803133912385f));
  q = hn::MulAdd(q, u, hn::Set(d, -0.0010028084507212043f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.0004722244048025459f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.01147016417235136f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.044007133692502975f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.1075197234749794f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.1976410299539566f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.2902507483959198f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.3498213291168213f));
  const auto minus_z2 = hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f));
  const auto e = ExpNonPositive(d, AtLeastExpLowest(d, minus_z2));
  const auto tail = hn::Mul(hn::Mul(q, hn::Mul(t, half)), e);
  const auto phi =
      hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail));
  return hn::Mul(x, phi);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
