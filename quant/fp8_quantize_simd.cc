#include <cstddef>
#include <cstdint>

#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_dl.h"
#include "quern/quant/fp8_quantize_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/fp8_quantize_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"
#include "quern/quant/e4m3_pairs-inl.h"
#include "quern/quant/quantize_row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D8 = hn::ScalableTag<uint8_t>;
using D16 = hn::Repartition<uint16_t, D8>;
using D32 = hn::Repartition<uint32_t, D8>;
using DF = hn::Repartition<float, D8>;

// Whether one instruction looks up a vector of bytes in 128 of them.
#undef QUERN_FP8_BY_TABLE
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define QUERN_FP8_BY_TABLE 1
#else
#define QUERN_FP8_BY_TABLE 0
#endif

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// y if |y| >= least, else least with the sign of y; not for NaN.
HWY_INLINE hn::Vec<DF> AtLeastMagnitude(hn::Vec<DF> y, float least) {
  const DF df;
  // The larger magnitude (3), with the sign of the first (0).
  return hn::Vec<DF>{_mm512_range_ps(y.raw, hn::Set(df, least).raw, 3)};
}

// y if |y| <= most, else most with the sign of y; unspecified for NaN.
HWY_INLINE hn::Vec<DF> AtMostMagnitude(hn::Vec<DF> y, float most) {
  const DF df;
  return hn::Vec<DF>{_mm512_range_ps(y.raw, hn::Set(df, most).raw, 2)};
}

// For |y| < 464: the code of y less its sign in the lower byte of each lane,
// the sign in bit 11, the rest unspecified.
//
// Let p be the power of two of y, or that of the denormals of e4m3: y has 4
// bits before the fraction of p / 8. The sum y + 2^20 p has a unit of p / 8 and
// so rounds y to that, to nearest even, and holds the number n of units,
// 0 <= n <= 16, in the lower bits. With p = 2^e the code is n + 8 (e + 6); the
// exponent of the sum, moved to where it counts eights, is 8 (e + 147), and 152
// units in advance (19 / 8 of p, an even number) make the rest 0 modulo 256.
HWY_INLINE hn::Vec<D32> Codes(hn::Vec<DF> y) {
  const DF df;
  const D32 d32;
  const auto at_least = hn::BitCast(d32, AtLeastMagnitude(y, 0x1p-6f));
  const auto power =
      hn::BitCast(df, hn::And(at_least, hn::Set(d32, 0xFF800000u)));
  const auto sum =
      hn::BitCast(d32, hn::MulAdd(power, hn::Set(df, 0x1p20f + 19.0f), y));
  return hn::Add(sum, hn::ShiftRight<20>(sum));
}

// What quantises a row. kAnyX: x may be anything; else |x * inverse| < 464.
// Functions, not lambdas: GCC 12 does not inline a lambda that is called twice.
template <typename T, bool kAnyX>
struct Quantizer {
  HWY_INLINE hn::Vec<D32> CodesOf(hn::Vec<DF> v) const {
    const DF df;
    auto y = hn::Mul(v, hn::Set(df, inverse));
    if constexpr (kAnyX) {
      // NaN: what its code would stand for.
      y = hn::IfThenElse(hn::IsNaN(y), hn::Set(df, 480.0f),
                         AtMostMagnitude(y, 448.0f));
    }
    return Codes(y);
  }
  // The sign joins the code.
  template <class D>
  HWY_INLINE hn::Vec<D> Signed(D d, hn::Vec<D> codes) const {
    return hn::BitwiseIfThenElse(hn::Set(d, 0x80), hn::ShiftRight<4>(codes),
                                 codes);
  }
  // In the lower bytes; of bf16.
  HWY_INLINE hn::Vec<D16> PairOf(hn::Vec<D16> bf16) const {
    const DF df;
    const D16 d16;
    const auto even = CodesOf(EvenF32(df, bf16));
    const auto odd = CodesOf(OddF32(df, bf16));
    return Signed(d16, hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(odd)),
                                   hn::BitCast(d16, even)));
  }
  HWY_INLINE hn::Vec<D16> Pair(size_t i) const {
    const DF df;
    const D16 d16;
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      return PairOf(hn::LoadU(d16, reinterpret_cast<const uint16_t*>(x + i)));
    } else {
      return Signed(d16, hn::OrderedTruncate2To(
                             d16, CodesOf(LoadF32(df, x + i)),
                             CodesOf(LoadF32(df, x + i + hn::Lanes(df)))));
    }
  }
  HWY_INLINE hn::Vec<D8> Step(size_t i) const {
    const D8 d8;
    return hn::OrderedTruncate2To(d8, Pair(i), Pair(i + hn::Lanes(d8) / 2));
  }
  // At most as many as f32 has lanes.
  HWY_INLINE void Part(size_t i, size_t part, uint8_t* q) const {
    const hn::Rebind<uint8_t, DF> d8;
    const auto codes = Signed(D32(), CodesOf(LoadNF32(DF(), x + i, part)));
    hn::StoreN(hn::TruncateTo(d8, codes), d8, q + i, part);
  }
  const T* x;
  float inverse;
};

#else
// Quantizer where no instruction takes the larger magnitude with its sign.
template <typename T, bool kAnyX>
struct Quantizer {
  using DI16 = hn::Repartition<int16_t, D8>;
  static constexpr CodeRange kRange =
      kAnyX ? CodeRange::kAny : CodeRange::kFits;

  // The codes of two vectors of bf16.
  HWY_INLINE hn::Vec<D8> Pairs(hn::Vec<D16> x0, hn::Vec<D16> x1) const {
    const D16 d16;
    const auto factor = hn::Set(DF(), inverse);
    return PackE4M3(d16, E4M3Magnitudes<kRange>(d16, x0, factor),
                    E4M3Magnitudes<kRange>(d16, x1, factor), x0, x1);
  }
  HWY_INLINE hn::Vec<DF> Product(hn::Vec<DF> v) const {
    return hn::Mul(v, hn::Set(DF(), inverse));
  }
  // Codes without their signs, in the lower bytes; of two products.
  HWY_INLINE hn::Vec<D16> Magnitudes(hn::Vec<DF> y0, hn::Vec<DF> y1) const {
    const DF df;
    return hn::ShiftRight<4>(
        hn::OrderedDemote2To(D16(), ScaledE4M3<kRange, 16>(df, hn::Abs(y0)),
                             ScaledE4M3<kRange, 16>(df, hn::Abs(y1))));
  }
  // The signs of two products; the rest is unspecified.
  static HWY_INLINE hn::Vec<DI16> Signs(hn::Vec<DF> y0, hn::Vec<DF> y1) {
    const hn::RebindToSigned<DF> di;
    return hn::OrderedDemote2To(DI16(), hn::BitCast(di, y0),
                                hn::BitCast(di, y1));
  }
  HWY_INLINE hn::Vec<D8> Step(size_t i) const {
    const D8 d8;
    const D16 d16;
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      const auto* codes = reinterpret_cast<const uint16_t*>(x + i);
      return Pairs(hn::LoadU(d16, codes),
                   hn::LoadU(d16, codes + hn::Lanes(d16)));
    } else {
      const DF df;
      const size_t lanes = hn::Lanes(df);
      const auto y0 = Product(LoadF32(df, x + i));
      const auto y1 = Product(LoadF32(df, x + i + lanes));
      const auto y2 = Product(LoadF32(df, x + i + 2 * lanes));
      const auto y3 = Product(LoadF32(df, x + i + 3 * lanes));
      return WithSigns(
          d8,
          hn::OrderedTruncate2To(d8, Magnitudes(y0, y1), Magnitudes(y2, y3)),
          hn::OrderedDemote2To(hn::RebindToSigned<D8>(), Signs(y0, y1),
                               Signs(y2, y3)));
    }
  }
  // At most as many as f32 has lanes.
  HWY_INLINE void Part(size_t i, size_t part, uint8_t* q) const {
    const DF df;
    const D32 d32;
    const hn::Rebind<uint8_t, DF> d8;
    const auto y = Product(LoadNF32(df, x + i, part));
    const auto code = hn::ShiftRight<4>(
        hn::BitCast(d32, ScaledE4M3<kRange, 16>(df, hn::Abs(y))));
    const auto sign =
        hn::And(hn::ShiftRight<24>(hn::BitCast(d32, y)), hn::Set(d32, 0x80u));
    hn::StoreN(hn::TruncateTo(d8, hn::Or(code, sign)), d8, q + i, part);
  }
  const T* x;
  float inverse;
};

#endif

#if QUERN_FP8_BY_TABLE
// Quantises bf16 v = +-2^e (1 + m / 128) by a table. Where y = fl(v *
// inverse) is a normal number of e4m3, 2^-6 <= |y| < 464, one more in e doubles
// y, rounding included, and adds 8 to its code: that is 8 e and one of 128
// numbers, which m selects. They are bytes, and fill two vectors.
class ByTable {
 public:
  explicit HWY_INLINE ByTable(const Quantizer<BFloat16, false>& quantizer)
      : quantizer_(quantizer) {
    // The table is of the v whose y is in [0.5, 2].
    const D16 d16;
    const auto one = hwy::BitCastScalar<uint32_t>(1.0f / quantizer.inverse);
    const auto first = hn::Iota(d16, static_cast<uint16_t>(one >> 23 << 7));
    lower_ = Entries(first, 0);
    upper_ = Entries(first, 64);
    // A little above 2^-6, and rounded up.
    const auto least =
        hwy::BitCastScalar<uint32_t>(0x1.01p-6f / quantizer.inverse);
    least2_ = hn::Set(d16, static_cast<uint16_t>(2 * ((least >> 16) + 1)));
  }

  HWY_INLINE hn::Vec<D8> Step(size_t i) const {
    const D8 d8;
    const D16 d16;
    const auto* v = reinterpret_cast<const uint16_t*>(quantizer_.x + i);
    const auto v0 = hn::LoadU(d16, v);
    const auto v1 = hn::LoadU(d16, v + hn::Lanes(d16));
    // Twice a code has lost its sign.
    const auto least = hn::Min(hn::Add(v0, v0), hn::Add(v1, v1));
    if (HWY_UNLIKELY(!hn::AllFalse(d16, hn::Lt(least, least2_)))) {
      return quantizer_.Step(i);
    }
    const auto codes = hn::ConcatEven(d8, Code(v1), Code(v0));
    const auto signs =
        hn::ConcatOdd(d8, hn::BitCast(d8, v1), hn::BitCast(d8, v0));
    return hn::BitwiseIfThenElse(hn::Set(d8, 0x80), signs, codes);
  }
  HWY_INLINE void Part(size_t i, size_t part, uint8_t* q) const {
    quantizer_.Part(i, part, q);
  }

 private:
  // The lower byte of v >> 4 is 8 e and three bits of m; the table has the
  // rest.
  HWY_INLINE hn::Vec<D8> Entries(hn::Vec<D16> first, uint16_t m) const {
    const D16 d16;
    const auto v0 = hn::Add(first, hn::Set(d16, m));
    const auto v1 = hn::Add(v0, hn::Set(d16, 32));
    return hn::OrderedTruncate2To(
        D8(), hn::Sub(quantizer_.PairOf(v0), hn::ShiftRight<4>(v0)),
        hn::Sub(quantizer_.PairOf(v1), hn::ShiftRight<4>(v1)));
  }
  // In the lower bytes. An index is seven bits: m.
  HWY_INLINE hn::Vec<D8> Code(hn::Vec<D16> v) const {
    const auto of_m =
        hn::Vec<D8>{_mm512_permutex2var_epi8(lower_.raw, v.raw, upper_.raw)};
    return hn::Add(of_m, hn::BitCast(D8(), hn::ShiftRight<4>(v)));
  }

  Quantizer<BFloat16, false> quantizer_;
  hn::Vec<D8> lower_, upper_;
  hn::Vec<D16> least2_;
};

// Elements of a row that are worth a table: it costs as much as five steps
// save.
constexpr size_t kMinByTable = 512;
#endif

template <typename T, bool kAnyX>
void Quantize(const void* x, size_t n, float inverse, const void* next,
              bool stream, void* q) {
  const Quantizer<T, kAnyX> quantizer = {static_cast<const T*>(x), inverse};
#if QUERN_FP8_BY_TABLE
  if constexpr (hwy::IsSame<T, BFloat16>() && !kAnyX) {
    // Rows that are streamed go without the table: memory is slower than both
    // ways, and arithmetic between the fetches spreads them
    // (docs/performance_notes.md#quant).
    if (!stream && n >= kMinByTable) {
      QuantizeRow<T, uint8_t>(ByTable(quantizer), n, next, false, q);
      return;
    }
  }
#endif
  QuantizeRow<T, uint8_t>(quantizer, n, next, stream, q);
}

void Flush() { hwy::FlushStream(); }

template <typename T>
Fp8QuantizeKernels KernelsOf() {
  Fp8QuantizeKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.quantize = &Quantize<T, false>;
  kernels.quantize_any = &Quantize<T, true>;
  kernels.flush = &Flush;
  return kernels;
}

Fp8QuantizeKernels GetKernels(DType dtype) {
  return WithFloatType(dtype, [](auto t) { return KernelsOf<decltype(t)>(); });
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
Fp8QuantizeKernels GetFp8QuantizeKernels(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
