// f8e4m3 codes of products of bf16 numbers, two neighbours at a time, so that
// no number leaves the 32-bit lane of its pair until codes are packed:
//
//   E4M3Magnitudes(d16, x, factor)   in each 32-bit lane: the codes of
//                                    |x[2i] * factor| and |x[2i + 1] * factor|
//                                    in bytes 0 and 1, zeros in bytes 2 and 3
//   PackE4M3(d16, m0, m1, x0, x1)    the codes of two such vectors, with the
//                                    signs of x: all of the first, then all
//                                    of the second
//   PackE4M3Blocks(...)              the same for x86, an instruction less: in
//                                    each block of 16 bytes 8 of the first,
//                                    then 8 of the second
//
// x is a vector of bf16 codes. The product is rounded to f32 and then to
// e4m3, to nearest with ties to even, as quant/convert.h says.

// clang-format off
#if defined(QUERN_QUANT_E4M3_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_E4M3_PAIRS_INL_H_
#undef QUERN_QUANT_E4M3_PAIRS_INL_H_
#else
#define QUERN_QUANT_E4M3_PAIRS_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What a product may be.
enum class CodeRange {
  kFits,  // a number, |x * factor| < 464
  kAny,   // saturates at 448; NaN becomes NaN
};

// A sum whose lower 16 bits, as a signed number, are n - 1128, and whose upper
// 16 bits are 128 E, so that 16 (n + 8 (E - 141)) = 16 * code: see below.
//
// Let p be the power of two of y >= 0, or that of the denormals of e4m3: y has
// 4 bits before the fraction of p / 8. The sum y + (2^20 + 2^13 - 141) p has a
// unit of p / 8 and so rounds y to that, to nearest even, and holds the number
// n of units, 0 <= n <= 16. With p = 2^e the code is n + 8 (e + 6), and E = e +
// 147 is the exponent of the sum. The 2^13 is one unit of the upper half, from
// which the lower half borrows.
template <class DF>
HWY_INLINE hn::Vec<hn::Repartition<int16_t, DF>> E4M3Sum(DF df, hn::Vec<DF> y) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Repartition<int16_t, DF> di16;
  const auto power =
      hn::BitCast(df, hn::And(hn::BitCast(du, hn::Max(y, hn::Set(df, 0x1p-6f))),
                              hn::Set(du, 0x7F800000u)));
  return hn::BitCast(
      di16, hn::MulAdd(power, hn::Set(df, 0x1p20f + 0x1p13f - 141.0f), y));
}

template <CodeRange kRange, class DF>
HWY_INLINE hn::Vec<DF> E4M3Operand(DF df, hn::Vec<DF> y) {
  if constexpr (kRange == CodeRange::kAny) {
    // NaN: what its code would stand for.
    return hn::IfThenElse(hn::IsNaN(y), hn::Set(df, 480.0f),
                          hn::Min(y, hn::Set(df, 448.0f)));
  } else {
    (void)df;
    return y;
  }
}

// kScale times the code of y, kScale = 16 or 256.
template <CodeRange kRange, int kScale, class DF>
HWY_INLINE hn::Vec<hn::RebindToSigned<DF>> ScaledE4M3(DF df, hn::Vec<DF> y) {
  const hn::RebindToSigned<DF> di;
  const hn::Repartition<int16_t, DF> di16;
  const auto weights =
      hn::BitCast(di16, hn::Set(di, (kScale / 16) << 16 | kScale));
  return hn::WidenMulPairwiseAdd(di, E4M3Sum(df, E4M3Operand<kRange>(df, y)),
                                 weights);
}

template <CodeRange kRange, class D16, class DF = hn::Repartition<float, D16>,
          class DI = hn::RebindToSigned<DF>>
HWY_INLINE hn::Vec<DI> E4M3Magnitudes(D16 d16, hn::Vec<D16> x,
                                      hn::Vec<DF> factor) {
  const DF df;
  const auto abs = hn::And(x, hn::Set(d16, 0x7FFF));
  const auto even =
      ScaledE4M3<kRange, 16>(df, hn::Mul(EvenF32(df, abs), factor));
  const auto odd =
      ScaledE4M3<kRange, 256>(df, hn::Mul(OddF32(df, abs), factor));
  return hn::Or(hn::ShiftRight<4>(even), odd);
}

// Signs come from vectors of 16 bits that were narrowed with saturation.
template <class D8, class DI8 = hn::RebindToSigned<D8>>
HWY_INLINE hn::Vec<D8> WithSigns(D8 d8, hn::Vec<D8> codes, hn::Vec<DI8> signs) {
  return hn::Or(codes,
                hn::And(hn::BitCast(d8, signs), hn::Set(d8, uint8_t{0x80})));
}

template <class D16, class DI = hn::Repartition<int32_t, D16>,
          class D8 = hn::Repartition<uint8_t, D16>>
HWY_INLINE hn::Vec<D8> PackE4M3(D16 d16, hn::Vec<DI> m0, hn::Vec<DI> m1,
                                hn::Vec<D16> x0, hn::Vec<D16> x1) {
  const D8 d8;
  const hn::RebindToSigned<D16> di16;
  return WithSigns(
      d8, hn::BitCast(d8, hn::OrderedDemote2To(d16, m0, m1)),
      hn::OrderedDemote2To(hn::RebindToSigned<D8>(), hn::BitCast(di16, x0),
                           hn::BitCast(di16, x1)));
}

template <class D16, class DI = hn::Repartition<int32_t, D16>,
          class D8 = hn::Repartition<uint8_t, D16>>
HWY_INLINE hn::Vec<D8> PackE4M3Blocks(D16 d16, hn::Vec<DI> m0, hn::Vec<DI> m1,
                                      hn::Vec<D16> x0, hn::Vec<D16> x1) {
  const D8 d8;
  const hn::RebindToSigned<D16> di16;
  return WithSigns(
      d8, hn::BitCast(d8, hn::ReorderDemote2To(d16, m0, m1)),
      hn::ReorderDemote2To(hn::RebindToSigned<D8>(), hn::BitCast(di16, x0),
                           hn::BitCast(di16, x1)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
