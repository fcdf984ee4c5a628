// What a line of 16 words is multiplied by and how: a Dot of
// gemm/kernels/register_tile-inl.h that also has
//
//   kWordBytes    bytes of a word of keys and values where it is stored
//   Exp2          of a logit less the maximum: a weight
//   StoreWeights  the weights of one vector of tokens, as words
//   Logit         a logit of its sum of products: the sum itself, unless keys
//                 are widened times a power of two

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_LINE_ARITHMETIC_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_LINE_ARITHMETIC_INL_H_
#undef QUERN_ATTENTION_KERNELS_LINE_ARITHMETIC_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_LINE_ARITHMETIC_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/kernels/softmax_state-inl.h"
#include "quern/core/dtype.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using LineF32 = LineTag<float>;
using LineU32 = hn::RebindToUnsigned<LineF32>;
using VF32 = hn::Vec<LineF32>;

constexpr size_t kVecLanes = HWY_MAX_LANES_D(LineF32);
constexpr size_t kLineVecs = kGroupTokens / kVecLanes;
constexpr size_t kRowWords = kChunkGroups * kGroupTokens;

// Keys are widened to what they are.
struct PlainLogits {
  static HWY_INLINE VF32 Logit(VF32 sum) { return sum; }
};

// Weights in f32.
struct F32Weights : PlainLogits {
  static constexpr size_t kWordBytes = 4;
  static HWY_INLINE VF32 Exp2(VF32 x) { return Exp2OfNegative(LineF32(), x); }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    hn::StoreU(p, LineF32(), reinterpret_cast<float*>(row + token));
  }
};

// a * b + sum in the register of the sum.
HWY_INLINE VF32 MulAddInPlace(VF32 a, VF32 b, VF32 sum) {
#if HWY_TARGET == HWY_AVX2 && HWY_COMPILER_GCC_ACTUAL && HWY_ARCH_X86_64
  // With 12 sums in 16 registers GCC 12 leaves sums in the registers of factors
  // and moves or spills them.
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
  return sum;
#else
  return hn::MulAdd(a, b, sum);
#endif
}

// Products and sums in f32: a word is the bits of a float.
template <class Dot>
struct InPlace : Dot {
  static HWY_INLINE VF32 MulAdd(VF32 b, uint32_t word, VF32 sum) {
    return MulAddInPlace(hn::BitCast(LineF32(), hn::Set(LineU32(), word)), b,
                         sum);
  }
};

template <typename T>
struct FmaPairs : InPlace<DotPairsF32<T>>, F32Weights {};
struct FmaF32 : InPlace<DotF32>, F32Weights {};

// Pairs of int8 or fp8, each half of which becomes f32 on its way.
template <typename T>
struct FmaBytes : InPlace<FmaSums>, F32Weights {
  static constexpr size_t kSub = 2;
  static constexpr size_t kWordElements = 2;
  static constexpr size_t kWordBytes = 2;
  using DW = hn::Rebind<uint16_t, LineF32>;
  template <size_t kI>
  static HWY_INLINE VF32 LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen<kI>(hn::LoadU(DW(), reinterpret_cast<const uint16_t*>(line)));
  }
  template <size_t kI>
  static HWY_INLINE VF32 LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return Widen<kI>(
        hn::LoadN(DW(), reinterpret_cast<const uint16_t*>(line), n));
  }

 private:
  using DI = hn::RebindToSigned<LineF32>;
  template <size_t kI>
  static HWY_INLINE VF32 Widen(hn::Vec<DW> words) {
    if constexpr (hwy::IsSame<T, int8_t>()) {
      const hn::RebindToSigned<DW> dw;
      const auto pairs = hn::PromoteTo(DI(), hn::BitCast(dw, words));
      return hn::ConvertTo(
          LineF32(), kI == 0 ? hn::ShiftRight<24>(hn::ShiftLeft<24>(pairs))
                             : hn::ShiftRight<8>(pairs));
    } else {
#if QUERN_NATIVE_F16
      return WidenByF16<kI>(words);
#else
      const auto pairs = hn::PromoteTo(DI(), words);
      return DecodeLanes<T>(LineF32(), kI == 0
                                           ? hn::And(pairs, hn::Set(DI(), 0xFF))
                                           : hn::ShiftRight<8>(pairs));
#endif
    }
  }
#if QUERN_NATIVE_F16
  // e5m2 is the upper byte of an f16. e4m3 has a bit of the exponent less: as
  // an f16 with an upper 0 in its place it is 2^-8 of what it means, denormals
  // too, but for the NaN.
  template <size_t kI>
  static HWY_INLINE VF32 WidenByF16(hn::Vec<DW> words) {
    const DW dw;
    const hn::Rebind<hwy::float16_t, LineF32> dh;
    const auto upper = kI == 0 ? hn::ShiftLeft<8>(words) : words;
    if constexpr (hwy::IsSame<T, Float8E5M2>()) {
      return hn::PromoteTo(
          LineF32(),
          hn::BitCast(dh, hn::And(upper, hn::Set(dw, uint16_t{0xFF00}))));
    } else {
      const hn::RebindToSigned<DW> ds;
      const auto nan = hn::Set(dw, uint16_t{0xBF80});
      const auto moved = hn::And(
          hn::BitCast(dw, hn::ShiftRight<1>(hn::BitCast(ds, upper))), nan);
      const auto is_nan =
          hn::Eq(hn::Or(moved, hn::Set(dw, uint16_t{0x8000})), nan);
      const auto f16 = hn::Or(moved, hn::VecFromMask(dw, is_nan));
      return hn::Mul(hn::PromoteTo(LineF32(), hn::BitCast(dh, f16)),
                     hn::Set(LineF32(), 256.0f));
    }
  }
#endif
};

#if HWY_NATIVE_DOT_BF16 && HWY_ARCH_X86
// Weights rounded to bf16.
struct DotPairs : DotPairsBF16, PlainLogits {
  static constexpr size_t kWordBytes = 4;
  // 2^x for x <= 0 within 2^-18 of it, relatively: a weight is rounded to 2^-9.
  // Exactly 1 for 0; NaN for NaN. 2^x = 2^floor(x) * 2^f, and on [0, 1) the
  // second factor is a polynomial (minimax, the constant term fixed at 1).
  static HWY_INLINE VF32 Exp2(VF32 x) {
    const LineF32 df;
    const VF32 f{
        _mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    VF32 p = hn::Set(df, 0.013426684f);
    p = hn::MulAdd(p, f, hn::Set(df, 0.0522424743f));
    p = hn::MulAdd(p, f, hn::Set(df, 0.241280205f));
    p = hn::MulAdd(p, f, hn::Set(df, 0.693044845f));
    p = hn::MulAdd(p, f, hn::Set(df, 1.0f));
    return VF32{_mm512_scalef_ps(p.raw, x.raw)};
  }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    const hn::Rebind<hwy::bfloat16_t, LineF32> dh;
    hn::StoreU(hn::DemoteTo(dh, p), dh,
               reinterpret_cast<hwy::bfloat16_t*>(row) + token);
  }
};

// Pairs of int8, which become the same pairs of bf16 on their way.
struct DotI8 : DotPairs {
  static constexpr size_t kWordBytes = 2;
  using DW = hn::Rebind<uint16_t, LineF32>;
  template <size_t>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen(hn::LoadU(DW(), reinterpret_cast<const uint16_t*>(line)));
  }
  template <size_t>
  static HWY_INLINE hn::Vec<DB> LoadNB(const uint8_t* HWY_RESTRICT line,
                                       size_t n) {
    return Widen(hn::LoadN(DW(), reinterpret_cast<const uint16_t*>(line), n));
  }

 private:
  static HWY_INLINE hn::Vec<DB> Widen(hn::Vec<DW> words) {
    const hn::Repartition<int8_t, DW> d8;
    const hn::RebindToSigned<LineF32> di;
    const auto bytes = hn::BitCast(d8, words);
    const auto to_f32 = [&](auto half) HWY_ATTR {
      return hn::ConvertTo(LineF32(), hn::PromoteTo(di, half));
    };
    const hn::Half<decltype(d8)> dh;
    return hn::OrderedDemote2To(DB(), to_f32(hn::LowerHalf(dh, bytes)),
                                to_f32(hn::UpperHalf(dh, bytes)));
  }
};

// The bf16 of an fp8 code without its sign, by halves: what 7 bits choose.
struct Fp8Table {
  alignas(64) uint8_t lower[128];
  alignas(64) uint8_t upper[128];
  // Byte i of the lower halves, then of the upper: 0 64 1 65 ...
  alignas(64) uint8_t order[64];
};
template <typename T>
constexpr Fp8Table MakeFp8Table() {
  constexpr bool kE4M3 = hwy::IsSame<T, Float8E4M3>();
  constexpr unsigned kMantissa = kE4M3 ? 3 : 2;
  constexpr unsigned kBias = kE4M3 ? 7 : 15;
  constexpr unsigned kFirstNaN = kE4M3 ? 0x7F : 0x7D;
  constexpr unsigned kInfinity = kE4M3 ? 0x80 : 0x7C;
  Fp8Table table = {};
  for (unsigned code = 0; code < 128; ++code) {
    const unsigned exponent = code >> kMantissa;
    const unsigned mantissa = code & ((1u << kMantissa) - 1);
    unsigned bf16 = (exponent + 127 - kBias) << 7 | mantissa << (7 - kMantissa);
    if (exponent == 0) {  // mantissa * 2^(1 - bias - bits of it)
      unsigned top = kMantissa;
      while (top > 0 && mantissa >> top == 0) --top;
      bf16 = mantissa == 0 ? 0
                           : (128 - kBias - kMantissa + top) << 7 |
                                 (mantissa << (7 - top) & 0x7F);
    } else if (code >= kFirstNaN) {
      bf16 = 0x7FC0;
    } else if (code == kInfinity) {
      bf16 = 0x7F80;
    }
    table.lower[code] = static_cast<uint8_t>(bf16 & 0xFF);
    table.upper[code] = static_cast<uint8_t>(bf16 >> 8);
    table.order[code / 2] = static_cast<uint8_t>(code / 4 + code / 2 % 2 * 64);
  }
  return table;
}

template <typename T>
struct DotFp8 : DotPairs {
  static constexpr size_t kWordBytes = 2;
  template <size_t>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)));
  }
  template <size_t>
  static HWY_INLINE hn::Vec<DB> LoadNB(const uint8_t* HWY_RESTRICT line,
                                       size_t n) {
    const hn::Rebind<uint16_t, LineF32> d;
    return Widen(hn::LoadN(d, reinterpret_cast<const uint16_t*>(line), n).raw);
  }

 private:
  // Looks up the lower 7 bits of each byte.
  static HWY_INLINE __m512i Lookup(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index,
                                    _mm512_load_si512(table + 64));
  }
  static HWY_INLINE hn::Vec<DB> Widen(__m256i codes) {
    static constexpr Fp8Table kTable = MakeFp8Table<T>();
    const __m512i index = _mm512_castsi256_si512(codes);
    const __m512i lower = Lookup(kTable.lower, index);
    // a | (b & c)
    const __m512i upper = _mm512_ternarylogic_epi32(
        Lookup(kTable.upper, index), index, _mm512_set1_epi8(-128), 0xF8);
    const __m512i order = _mm512_load_si512(kTable.order);
    return hn::Vec<DB>{_mm512_permutex2var_epi8(lower, order, upper)};
  }
};
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
