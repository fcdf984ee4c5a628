#include "quern/core/float_type.h"
#include "quern/core/sets/avx3.h"
#include "quern/quant/int8_quantize_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/int8_quantize_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"
#include "quern/quant/quantize_row-inl.h"
#include "quern/quant/rounded_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Without its sign bit, the code of a floating-point type grows with the value,
// so that integer maxima do: of 16-bit types with twice the lanes of f32, no
// conversion, and a defined place for NaN.
template <typename Code>
uint32_t MaxAbs(const void* x, size_t n) {
  const hn::ScalableTag<Code> d;
  const size_t lanes = hn::Lanes(d);
  const Code* codes = static_cast<const Code*>(x);
  const auto magnitude = hn::Set(d, hwy::HighestValue<Code>());
  auto max0 = hn::Zero(d), max1 = max0, max2 = max0, max3 = max0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto v0 = hn::LoadU(d, codes + i);
    const auto v1 = hn::LoadU(d, codes + i + lanes);
    const auto v2 = hn::LoadU(d, codes + i + 2 * lanes);
    const auto v3 = hn::LoadU(d, codes + i + 3 * lanes);
    max0 = hn::Max(max0, hn::And(v0, magnitude));
    max1 = hn::Max(max1, hn::And(v1, magnitude));
    max2 = hn::Max(max2, hn::And(v2, magnitude));
    max3 = hn::Max(max3, hn::And(v3, magnitude));
  }
  for (; i < n; i += lanes) {
    const auto v = hn::LoadN(d, codes + i, HWY_MIN(lanes, n - i));
    max0 = hn::Max(max0, hn::And(v, magnitude));
  }
  max0 = hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));
  return static_cast<uint32_t>(hn::ReduceMax(d, max0));
}

// Swaps codes and integers that are ordered as the values are.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V OrderedCode(D d, V code) {
  constexpr int kSignBit = 8 * sizeof(hn::TFromD<D>) - 1;
  const auto magnitude = hn::Set(d, hwy::HighestValue<hn::TFromD<D>>());
  return hn::Xor(code, hn::And(hn::ShiftRight<kSignBit>(code), magnitude));
}

template <typename Code>
void MinMax(const void* x, size_t n, uint32_t* min, uint32_t* max) {
  const hn::ScalableTag<Code> d;
  const size_t lanes = hn::Lanes(d);
  const Code* codes = static_cast<const Code*>(x);
  auto min0 = hn::Zero(d), min1 = min0, max0 = min0, max1 = min0;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto v0 = OrderedCode(d, hn::LoadU(d, codes + i));
    const auto v1 = OrderedCode(d, hn::LoadU(d, codes + i + lanes));
    min0 = hn::Min(min0, v0);
    max0 = hn::Max(max0, v0);
    min1 = hn::Min(min1, v1);
    max1 = hn::Max(max1, v1);
  }
  for (; i < n; i += lanes) {
    const auto v = OrderedCode(
        d, hn::LoadN(d, codes + i, HWY_MIN(lanes, n - i)));  // 0 beyond n
    min0 = hn::Min(min0, v);
    max0 = hn::Max(max0, v);
  }
  using Unsigned = hwy::MakeUnsigned<Code>;
  const auto code = [](Code ordered) -> uint32_t {
    const auto u = static_cast<Unsigned>(ordered);
    const auto magnitude = static_cast<Unsigned>(hwy::HighestValue<Code>());
    return static_cast<Unsigned>(ordered < 0 ? u ^ magnitude : u);
  };
  *min = code(hn::ReduceMin(d, hn::Min(min0, min1)));
  *max = code(hn::ReduceMax(d, hn::Max(max0, max1)));
}

// Sixteen bits are enough for a number of steps once x is within this many.
constexpr float kMostSteps = 256.0f;

// What quantises a row. kAnyX: x may be anything, as where the scale is given;
// else x is finite and |x * inverse| < 256. Functions, not lambdas: GCC 12 does
// not inline a lambda that is called twice, and calls it for every vector.
template <typename T, bool kAnyX>
struct Quantizer {
  using D8 = hn::ScalableTag<int8_t>;
  using D16 = hn::Repartition<int16_t, D8>;
  using DU16 = hn::Repartition<uint16_t, D8>;
  using DU32 = hn::Repartition<uint32_t, D8>;
  using DF = hn::Repartition<float, D8>;

  const T* x;
  float inverse;
  int16_t zero_point;
  int8_t flip;

  HWY_INLINE hn::Vec<DU32> Steps(hn::Vec<DF> v) const {
    const DF df;
    if constexpr (kAnyX) {
      const auto most = hn::Set(df, kMostSteps / inverse);
      v = hn::IfThenElseZero(hn::Eq(v, v), v);  // NaN
      v = hn::Max(hn::Min(v, most), hn::Neg(most));
    }
    return hn::BitCast(DU32(), RoundedProduct(df, v, hn::Set(df, inverse)));
  }

  // Quantises as many elements as int16 has lanes, from element i on.
  HWY_INLINE hn::Vec<D16> Pair(size_t i) const {
    const DF df;
    const DU16 du16;
    const DU32 du32;
    auto v = hn::Zero(du16);
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      // In place: even and odd elements are the halves of 32-bit lanes, and the
      // upper half of a f32 is a bf16.
      const auto codes = hn::BitCast(
          du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(x + i)));
      const auto even = Steps(hn::BitCast(df, hn::ShiftLeft<16>(codes)));
      const auto odd =
          Steps(hn::BitCast(df, hn::And(codes, hn::Set(du32, 0xFFFF0000u))));
      v = hn::OddEven(hn::BitCast(du16, hn::ShiftLeft<16>(odd)),
                      hn::BitCast(du16, even));
    } else {
      v = hn::OrderedTruncate2To(du16, Steps(LoadF32(df, x + i)),
                                 Steps(LoadF32(df, x + i + hn::Lanes(df))));
    }
    const D16 d16;
    return hn::SaturatedAdd(hn::BitCast(d16, v), hn::Set(d16, zero_point));
  }

  // Quantises as many elements as int8 has lanes.
  HWY_INLINE hn::Vec<D8> Step(size_t i) const {
    const D8 d8;
    const auto codes =
        hn::OrderedDemote2To(d8, Pair(i), Pair(i + hn::Lanes(d8) / 2));
    return hn::Xor(codes, hn::Set(d8, flip));
  }

  // At most as many as f32 has.
  HWY_INLINE void Part(size_t i, size_t part, int8_t* q) const {
    const DF df;
    const hn::Rebind<uint16_t, DF> du16;
    const hn::Rebind<int16_t, DF> d16;
    const hn::Rebind<int8_t, DF> d8;
    const auto v = hn::TruncateTo(du16, Steps(LoadNF32(df, x + i, part)));
    const auto codes = hn::DemoteTo(
        d8, hn::SaturatedAdd(hn::BitCast(d16, v), hn::Set(d16, zero_point)));
    hn::StoreN(hn::Xor(codes, hn::Set(d8, flip)), d8, q + i, part);
  }
};

template <typename T, bool kAnyX>
void Quantize(const void* x, size_t n, float inverse, int32_t zero_point,
              uint8_t flip, const void* next, bool stream, void* q) {
  const Quantizer<T, kAnyX> quantizer = {static_cast<const T*>(x), inverse,
                                         static_cast<int16_t>(zero_point),
                                         static_cast<int8_t>(flip)};
  QuantizeRow<T, int8_t>(quantizer, n, next, stream, q);
}

void Flush() { hwy::FlushStream(); }

template <typename T>
Int8QuantizeKernels KernelsOf() {
  using Code = hwy::SignedFromSize<sizeof(T)>;
  Int8QuantizeKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.max_abs = &MaxAbs<Code>;
  kernels.min_max = &MinMax<Code>;
  kernels.quantize = &Quantize<T, false>;
  kernels.quantize_any = &Quantize<T, true>;
  kernels.flush = &Flush;
  return kernels;
}

Int8QuantizeKernels GetKernels(DType dtype) {
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
Int8QuantizeKernels GetInt8QuantizeKernels(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
