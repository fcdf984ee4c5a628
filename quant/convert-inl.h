// SIMD conversion between f32 and the narrow formats, for any kernel. The rules
// are those of quant/convert.h, bit for bit on every instruction set:
//
//   LoadF32(df, p), LoadNF32(df, p, n)        p: float, BFloat16, Float16,
//   StoreF32(v, df, p), StoreNF32(v, df, p, n)   Float8E4M3 or Float8E5M2
//
//   LoadF32x2(df, p, a, b)                    two vectors: a, then b
//   StoreF32x2(a, b, df, p)                   back
//
//   EvenF32(df, codes), OddF32(df, codes)     of a vector of bf16 codes; and
//   EncodeBF16Pairs(df, even, odd)            back: no code crosses a lane
//   EncodeBF16NumberPairs(df, even, odd)      the same, if none is NaN
//
// df is a tag of float. Lanes beyond n load as zero; nothing beyond n is read
// or written. Stores overflow as OverflowMode::kIeee.

// Per-target include guard.
#if defined(QUERN_QUANT_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_CONVERT_INL_H_
#undef QUERN_QUANT_CONVERT_INL_H_
#else
#define QUERN_QUANT_CONVERT_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/dtype.h"
#include "quern/quant/float_format.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether vcvtph2ps / vcvtps2ph are part of the target: they round to nearest
// even, keep denormals under any MXCSR, and treat NaN as our rule does.
// Highway's emulation for older targets is not used: it drops the NaN payload.
#undef QUERN_NATIVE_F16
#if (HWY_TARGET <= HWY_AVX2) && HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
#define QUERN_NATIVE_F16 1
#else
#define QUERN_NATIVE_F16 0
#endif

// Whether vcvtneps2bf16 and vcvtne2ps2bf16 are: one instruction where our rule
// takes seven a vector. They are that rule but for denormals, which they flush:
// where there is one, the rule is spelled out.
#undef QUERN_NATIVE_BF16
#if HWY_NATIVE_DOT_BF16 && HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define QUERN_NATIVE_BF16 1
#else
#define QUERN_NATIVE_BF16 0
#endif

// Whether a vector has at most two blocks of 16 bytes, and bytes are looked up
// within each.
#undef QUERN_SHORT_VECTORS
#if HWY_ARCH_X86 && HWY_TARGET >= HWY_AVX2 && HWY_TARGET <= HWY_SSE4
#define QUERN_SHORT_VECTORS 1
#else
#define QUERN_SHORT_VECTORS 0
#endif

// The unsigned integer that holds a code of T.
template <typename T>
using CodeOf = hwy::UnsignedFromSize<sizeof(T)>;

// `code` holds one code of T in each 32-bit lane, upper bits zero.
template <typename T, class DF, class DI = hn::RebindToSigned<DF>>
HWY_INLINE hn::Vec<DF> DecodeLanes(DF df, hn::Vec<DI> code) {
  using F = quant_internal::FloatFormat<T>;
  constexpr int kAdded = 23 - F::kMantissaBits;
  const DI di;
  if constexpr (F::kExponentBits == 8) {
    return hn::BitCast(df, hn::ShiftLeft<kAdded>(code));
  } else {
    const auto set = [di](uint32_t x)
                         HWY_ATTR { return hn::Set(di, static_cast<int>(x)); };
    const auto abs = hn::And(code, set(F::kSign - 1));
    const auto sign =
        hn::And(hn::ShiftLeft<31 - F::kExponentBits - F::kMantissaBits>(code),
                set(0x80000000u));
    const auto moved = hn::ShiftLeft<kAdded>(abs);
    const auto normal =
        hn::Add(moved, set(static_cast<uint32_t>(127 - F::kBias) << 23));
    // Exact, and no operand or result is a denormal f32.
    constexpr uint32_t kUnit =
        static_cast<uint32_t>(127 + 1 - F::kBias - F::kMantissaBits) << 23;
    const auto small = hn::BitCast(
        di, hn::Mul(hn::ConvertTo(df, abs), hn::BitCast(df, set(kUnit))));
    auto bits = hn::IfThenElse(hn::Lt(abs, hn::Set(di, 1 << F::kMantissaBits)),
                               small, normal);
    if constexpr (F::kHasInfinity) {
      const auto infinity = set(F::kOverflow);
      bits = hn::IfThenElse(hn::Gt(infinity, abs), bits,
                            hn::Or(moved, set(quant_internal::kF32Infinity)));
      bits = hn::Or(bits, hn::IfThenElseZero(hn::Gt(abs, infinity),
                                             set(quant_internal::kF32Quiet)));
    } else {
      bits = hn::IfThenElse(
          hn::Eq(abs, set(F::kOverflow)),
          set(quant_internal::kF32Infinity | quant_internal::kF32Quiet), bits);
    }
    return hn::BitCast(df, hn::Or(bits, sign));
  }
}

// The codes of T, one in each 32-bit lane, upper bits zero. `clamp` holds
// ClampF32Bits<T>(overflow).
template <typename T, class DF, class DI = hn::RebindToSigned<DF>>
HWY_INLINE hn::Vec<DI> EncodeLanes(DF df, hn::Vec<DF> v, hn::Vec<DI> clamp) {
  using F = quant_internal::FloatFormat<T>;
  constexpr int kDropped = 23 - F::kMantissaBits;
  const DI di;
  const hn::RebindToUnsigned<DF> du;
  const auto set = [di](uint32_t x)
                       HWY_ATTR { return hn::Set(di, static_cast<int>(x)); };
  const auto bits = hn::BitCast(di, v);
  const auto abs = hn::And(bits, set(0x7FFFFFFFu));
  const auto is_nan = hn::Gt(abs, set(quant_internal::kF32Infinity));
  const auto x = hn::Min(abs, clamp);
  const auto sign =
      hn::BitCast(di, hn::ShiftRight<31 - F::kExponentBits - F::kMantissaBits>(
                          hn::BitCast(du, hn::Xor(bits, abs))));

  auto code = hn::Zero(di);
  if constexpr (F::kExponentBits == 8) {
    // To nearest even, as below; the limit is in x already.
    const auto odd = hn::And(hn::ShiftRight<kDropped>(x), hn::Set(di, 1));
    code = hn::ShiftRight<kDropped>(
        hn::Add(hn::Add(x, set((1u << (kDropped - 1)) - 1)), odd));
  } else {
    // A power of two so large that its unit in the last place is the unit that
    // x has in T: the sum rounds x to it, and holds how many. Nothing here is a
    // denormal f32 except x, which then rounds to zero either way.
    const auto exponent =
        hn::Max(hn::And(x, set(quant_internal::kF32Infinity)),
                set(static_cast<uint32_t>(128 - F::kBias) << 23));
    const auto magic = hn::Add(exponent, set(uint32_t{kDropped} << 23));
    const auto sum =
        hn::BitCast(di, hn::Add(hn::BitCast(df, x), hn::BitCast(df, magic)));
    // The units count the hidden bit, which stands for one of the exponent.
    code = hn::Add(hn::Sub(sum, magic),
                   hn::Sub(hn::ShiftRight<kDropped>(exponent),
                           set(static_cast<uint32_t>(128 - F::kBias)
                               << F::kMantissaBits)));
  }
  if constexpr (F::kHasInfinity) {
    const auto payload =
        hn::And(hn::ShiftRight<kDropped>(abs), set(F::kQuiet * 2 - 1));
    const auto nan = hn::Or(payload, set(F::kOverflow | F::kQuiet));
    code = hn::IfThenElse(is_nan, nan, code);
  } else {
    code = hn::IfThenElse(is_nan, set(F::kOverflow), code);
  }
  return hn::Or(code, sign);
}

// bf16 codes of numbers in the upper half of each lane. The lower half is
// unspecified; where v is NaN, the whole lane is.
template <class DF, class DU = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<DU> RoundBF16UpperHalf(DF, hn::Vec<DF> v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  // Adding half a unit, less one if the kept part is even, carries exactly
  // where rounding to nearest even goes up. Not vcvtneps2bf16: it flushes
  // denormals.
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd);
}

// The same with NaN, which OverflowMode::kIeee keeps. Half the work of
// EncodeLanes: the sign never moves, and whoever wants the codes can pick upper
// halves.
template <class DF, class DU = hn::RebindToUnsigned<DF>>
HWY_INLINE hn::Vec<DU> EncodeBF16UpperHalf(DF df, hn::Vec<DF> v) {
  const DU du;
  const auto quiet =
      hn::Or(hn::BitCast(du, v), hn::Set(du, quant_internal::kF32Quiet));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet,
                        RoundBF16UpperHalf(df, v));
}

#if QUERN_SHORT_VECTORS
// Swaps the upper half of the first block and the lower half of the second.
template <class D>
HWY_INLINE hn::Vec<D> SwapMiddleQuarters(D d, hn::Vec<D> v) {
  if constexpr (sizeof(hn::Vec<D>) == 16) {
    return v;
  } else {
    const hn::Repartition<uint64_t, D> d64;
    return hn::BitCast(
        d, hn::Per4LaneBlockShuffle<3, 1, 2, 0>(hn::BitCast(d64, v)));
  }
}
#endif

#if QUERN_NATIVE_BF16
HWY_INLINE bool AnyDenormal(hn::Vec512<float> v) {
  return _mm512_fpclass_ps_mask(v.raw, 0x20) != 0;
}
// Either zero.
HWY_INLINE bool AnyZero(hn::Vec512<uint16_t> codes) {
  return _mm512_testn_epi16_mask(codes.raw, _mm512_set1_epi16(0x7FFF)) != 0;
}
#endif

// Half (or quarter) vectors of codes to a vector of f32, and back.
template <typename T, class DF, class DC = hn::Rebind<CodeOf<T>, DF>>
HWY_INLINE hn::Vec<DF> DecodeCodes(DF df, hn::Vec<DC> codes) {
#if QUERN_NATIVE_F16
  if constexpr (hwy::IsSame<T, Float16>()) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::PromoteTo(df, hn::BitCast(dh, codes));
  }
#endif
  const hn::RebindToSigned<DF> di;
  return DecodeLanes<T>(df, hn::PromoteTo(di, codes));
}
template <typename T, class DF, class DC = hn::Rebind<CodeOf<T>, DF>>
HWY_INLINE hn::Vec<DC> EncodeCodes(DF df, hn::Vec<DF> v) {
#if QUERN_NATIVE_F16
  if constexpr (hwy::IsSame<T, Float16>()) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::BitCast(DC(), hn::DemoteTo(dh, v));
  }
#endif
  if constexpr (hwy::IsSame<T, BFloat16>()) {
#if QUERN_NATIVE_BF16
    if constexpr (HWY_MAX_LANES_D(DF) == 16) {
      if (HWY_LIKELY(!AnyDenormal(v))) {
        const hn::Rebind<hwy::bfloat16_t, DF> dbf16;
        return hn::BitCast(DC(), hn::DemoteTo(dbf16, v));
      }
    }
#endif
    return hn::TruncateTo(DC(), hn::ShiftRight<16>(EncodeBF16UpperHalf(df, v)));
  }
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const auto clamp = hn::Set(
      di,
      static_cast<int>(quant_internal::ClampF32Bits<T>(OverflowMode::kIeee)));
  return hn::TruncateTo(DC(), hn::BitCast(du, EncodeLanes<T>(df, v, clamp)));
}

// Even and odd elements are the halves of 32-bit lanes, and the upper half of a
// f32 is a bf16.
template <class DF, class DC = hn::Repartition<uint16_t, DF>>
HWY_INLINE hn::Vec<DF> EvenF32(DF df, hn::Vec<DC> codes) {
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::BitCast(du, codes)));
}
template <class DF, class DC = hn::Repartition<uint16_t, DF>>
HWY_INLINE hn::Vec<DF> OddF32(DF df, hn::Vec<DC> codes) {
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(df,
                     hn::And(hn::BitCast(du, codes), hn::Set(du, 0xFFFF0000u)));
}
template <class DC, class V>
HWY_INLINE hn::Vec<DC> JoinUpperHalves(DC dc, V even, V odd) {
  return hn::OddEven(hn::BitCast(dc, odd),
                     hn::BitCast(dc, hn::ShiftRight<16>(even)));
}
// A NaN whose lower half is 0 becomes its upper half, as every NaN is that
// comes from widened codes, or from none.
template <class DF, class DC = hn::Repartition<uint16_t, DF>>
HWY_INLINE hn::Vec<DC> EncodeBF16NumberPairs(DF, hn::Vec<DF> even,
                                             hn::Vec<DF> odd) {
  const DC dc;
  const hn::RebindToUnsigned<DF> du;
  const auto even_bits = hn::BitCast(du, even);
  const auto odd_bits = hn::BitCast(du, odd);
  const auto upper = JoinUpperHalves(dc, even_bits, odd_bits);
  const auto lower = hn::OddEven(hn::BitCast(dc, hn::ShiftLeft<16>(odd_bits)),
                                 hn::BitCast(dc, even_bits));
  // Rounding goes up from half a unit, 2^15; above it if the kept part is even.
  const auto even_kept = hn::AndNot(upper, hn::Set(dc, uint16_t{1}));
  return hn::Add(upper, hn::ShiftRight<15>(hn::SaturatedSub(lower, even_kept)));
}
template <class DF, class DC = hn::Repartition<uint16_t, DF>>
HWY_INLINE hn::Vec<DC> EncodeBF16Pairs(DF df, hn::Vec<DF> even,
                                       hn::Vec<DF> odd) {
  const DC dc;
#if QUERN_NATIVE_BF16
  if constexpr (HWY_MAX_LANES_D(DF) == 16) {
    const hn::Repartition<hwy::bfloat16_t, DF> dbf16;
    const auto halves = hn::BitCast(dc, hn::OrderedDemote2To(dbf16, even, odd));
    // A zero may have been a denormal: half the work of asking both for one.
    if (HWY_LIKELY(!AnyZero(halves))) {
      const hn::RebindToUnsigned<DF> du;
      const auto i = hn::Iota(du, 0);
      const auto order =
          hn::Or(i, hn::ShiftLeft<16>(hn::Add(i, hn::Set(du, uint32_t{16}))));
      return hn::TableLookupLanes(
          halves, hn::IndicesFromVec(dc, hn::BitCast(dc, order)));
    }
  }
#endif
  if (HWY_LIKELY(hn::AllFalse(df, hn::IsEitherNaN(even, odd)))) {
    return EncodeBF16NumberPairs(df, even, odd);
  }
  return JoinUpperHalves(dc, EncodeBF16UpperHalf(df, even),
                         EncodeBF16UpperHalf(df, odd));
}

#if QUERN_SHORT_VECTORS
// The even codes, then the odd ones.
template <class DC>
HWY_INLINE hn::Vec<DC> EvenThenOdd(DC dc, hn::Vec<DC> pairs) {
  const hn::Repartition<uint8_t, DC> d8;
  const auto blocks =
      hn::TableLookupBytes(hn::BitCast(d8, pairs),
                           hn::Dup128VecFromValues(d8, 0, 1, 4, 5, 8, 9, 12, 13,
                                                   2, 3, 6, 7, 10, 11, 14, 15));
  return hn::BitCast(dc, SwapMiddleQuarters(d8, blocks));
}
#endif

// Codes of 16 bits: those of a, then those of b.
template <typename T, class DF, class DC = hn::Repartition<CodeOf<T>, DF>>
HWY_INLINE hn::Vec<DC> EncodeCodes2(DF df, hn::Vec<DF> a, hn::Vec<DF> b) {
  static_assert(sizeof(T) == 2, "two vectors of f32 fill one of codes");
  const DC dc;
  if constexpr (hwy::IsSame<T, BFloat16>()) {
#if QUERN_NATIVE_BF16
    if constexpr (HWY_MAX_LANES_D(DF) == 16) {
      if (HWY_LIKELY(!AnyDenormal(a) && !AnyDenormal(b))) {
        const hn::Repartition<hwy::bfloat16_t, DF> dbf16;
        return hn::BitCast(dc, hn::OrderedDemote2To(dbf16, a, b));
      }
    }
#endif
#if QUERN_SHORT_VECTORS
    if constexpr (HWY_MAX_LANES_D(DF) >= 4) {
      return EvenThenOdd(dc, EncodeBF16Pairs(df, a, b));
    }
#endif
    return hn::ConcatOdd(dc, hn::BitCast(dc, EncodeBF16UpperHalf(df, b)),
                         hn::BitCast(dc, EncodeBF16UpperHalf(df, a)));
  } else {
    return hn::Combine(dc, EncodeCodes<T>(df, b), EncodeCodes<T>(df, a));
  }
}

template <class DF>
HWY_INLINE hn::Vec<DF> LoadF32(DF df, const float* p) {
  return hn::LoadU(df, p);
}
template <class DF>
HWY_INLINE hn::Vec<DF> LoadNF32(DF df, const float* p, size_t n) {
  return hn::LoadN(df, p, n);
}
template <class DF, typename T>
HWY_INLINE hn::Vec<DF> LoadF32(DF df, const T* p) {
  const hn::Rebind<CodeOf<T>, DF> dc;
  return DecodeCodes<T>(df,
                        hn::LoadU(dc, reinterpret_cast<const CodeOf<T>*>(p)));
}
template <class DF, typename T>
HWY_INLINE hn::Vec<DF> LoadNF32(DF df, const T* p, size_t n) {
  const hn::Rebind<CodeOf<T>, DF> dc;
  return DecodeCodes<T>(
      df, hn::LoadN(dc, reinterpret_cast<const CodeOf<T>*>(p), n));
}

template <class DF, typename T>
HWY_INLINE void LoadF32x2(DF df, const T* p, hn::Vec<DF>& a, hn::Vec<DF>& b) {
#if QUERN_SHORT_VECTORS
  if constexpr (hwy::IsSame<T, BFloat16>() && HWY_MAX_LANES_D(DF) >= 4) {
    const hn::Repartition<uint16_t, DF> dc;
    const auto codes = SwapMiddleQuarters(
        dc, hn::LoadU(dc, reinterpret_cast<const uint16_t*>(p)));
    a = hn::BitCast(df, hn::InterleaveLower(dc, hn::Zero(dc), codes));
    b = hn::BitCast(df, hn::InterleaveUpper(dc, hn::Zero(dc), codes));
    return;
  }
#endif
  a = LoadF32(df, p);
  b = LoadF32(df, p + hn::Lanes(df));
}

template <class DF>
HWY_INLINE void StoreF32(hn::Vec<DF> v, DF df, float* p) {
  hn::StoreU(v, df, p);
}
template <class DF>
HWY_INLINE void StoreNF32(hn::Vec<DF> v, DF df, float* p, size_t n) {
  hn::StoreN(v, df, p, n);
}
template <class DF, typename T>
HWY_INLINE void StoreF32(hn::Vec<DF> v, DF df, T* p) {
  const hn::Rebind<CodeOf<T>, DF> dc;
  hn::StoreU(EncodeCodes<T>(df, v), dc, reinterpret_cast<CodeOf<T>*>(p));
}
template <class DF, typename T>
HWY_INLINE void StoreNF32(hn::Vec<DF> v, DF df, T* p, size_t n) {
  const hn::Rebind<CodeOf<T>, DF> dc;
  hn::StoreN(EncodeCodes<T>(df, v), dc, reinterpret_cast<CodeOf<T>*>(p), n);
}

template <class DF>
HWY_INLINE void StoreF32x2(hn::Vec<DF> a, hn::Vec<DF> b, DF df, float* p) {
  hn::StoreU(a, df, p);
  hn::StoreU(b, df, p + hn::Lanes(df));
}
template <class DF, typename T>
HWY_INLINE void StoreF32x2(hn::Vec<DF> a, hn::Vec<DF> b, DF df, T* p) {
  if constexpr (sizeof(T) == 2) {
    const hn::Repartition<CodeOf<T>, DF> dc;
    hn::StoreU(EncodeCodes2<T>(df, a, b), dc, reinterpret_cast<CodeOf<T>*>(p));
  } else {
    StoreF32(a, df, p);
    StoreF32(b, df, p + hn::Lanes(df));
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
