#include "quant/int8_quantize_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/int8_quantize_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quant/convert-inl.h"

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
    const auto at = [&](size_t j) HWY_ATTR {
      return hn::And(hn::LoadU(d, codes + i + j * lanes), magnitude);
    };
    max0 = hn::Max(max0, at(0));
    max1 = hn::Max(max1, at(1));
    max2 = hn::Max(max2, at(2));
    max3 = hn::Max(max3, at(3));
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

// rint(v * factor), the product not rounded before, in the lower 16 bits of
// each lane; the upper ones are unspecified. |v * factor| < 2^15.
template <class DF, class DI = hn::RebindToSigned<DF>>
HWY_INLINE hn::Vec<DI> Steps(DF df, hn::Vec<DF> v, hn::Vec<DF> factor) {
  const DI di;
  // Added to a number whose unit in the last place is 1, and whose mantissa is
  // 0 in the lower bits, a small one is rounded to an integer there.
#if HWY_NATIVE_FMA
  return hn::BitCast(di, hn::MulAdd(v, factor, hn::Set(df, 0x1.8p23f)));
#else
  // The product of two f32 is exact in double.
  const hn::RepartitionToWide<DF> dd;
  const auto unit = hn::Set(dd, 0x1.8p52);
  const auto lower = hn::Add(
      hn::Mul(hn::PromoteLowerTo(dd, v), hn::PromoteLowerTo(dd, factor)), unit);
  const auto upper = hn::Add(
      hn::Mul(hn::PromoteUpperTo(dd, v), hn::PromoteUpperTo(dd, factor)), unit);
  return hn::ConcatEven(di, hn::BitCast(di, upper), hn::BitCast(di, lower));
#endif
}

// kAnyX: x may be anything, as where the scale is given; else x is finite and
// |x * inverse| < 256.
template <typename T, bool kAnyX>
void Quantize(const void* x, size_t n, float inverse, int32_t zero_point,
              uint8_t flip, const void* next, bool stream, void* q) {
  const hn::ScalableTag<int8_t> d8;
  const hn::Repartition<int16_t, decltype(d8)> d16;
  const hn::Repartition<uint16_t, decltype(d8)> du16;
  const hn::Repartition<uint32_t, decltype(d8)> du32;
  const hn::Repartition<float, decltype(d8)> df;
  const hn::Rebind<int16_t, decltype(df)> dp16;  // as many lanes as df
  const hn::Rebind<uint16_t, decltype(df)> dpu16;
  const hn::Rebind<int8_t, decltype(df)> dp8;
  const size_t lanes = hn::Lanes(df);
  const size_t step = hn::Lanes(d8);
  const T* from = static_cast<const T*>(x);
  const uint8_t* ahead = static_cast<const uint8_t*>(next);
  int8_t* to = static_cast<int8_t*>(q);
  const auto factor = hn::Set(df, inverse);
  const auto last = hn::Set(df, kMostSteps / inverse);
  const int16_t z = static_cast<int16_t>(zero_point);
  const int8_t sign = static_cast<int8_t>(flip);

  const auto steps = [&](hn::Vec<decltype(df)> v) HWY_ATTR {
    if constexpr (kAnyX) {
      v = hn::IfThenElseZero(hn::Eq(v, v), v);  // NaN
      v = hn::Max(hn::Min(v, last), hn::Neg(last));
    }
    return hn::BitCast(du32, Steps(df, v, factor));
  };
  const auto quantize_part = [&](size_t i, size_t part) HWY_ATTR {
    const auto v = steps(LoadNF32(df, from + i, part));
    const auto w = hn::SaturatedAdd(hn::BitCast(dp16, hn::TruncateTo(dpu16, v)),
                                    hn::Set(dp16, z));
    hn::StoreN(hn::Xor(hn::DemoteTo(dp8, w), hn::Set(dp8, sign)), dp8, to + i,
               part);
  };
  // As many elements as int16 has lanes.
  const auto quantize_pair = [&](size_t i) HWY_ATTR {
    auto v = hn::Zero(du16);
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      // Without moving lanes: the odd ones are f32 but for bits below theirs.
      const auto codes = hn::BitCast(
          du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from + i)));
      const auto even = steps(hn::BitCast(df, hn::ShiftLeft<16>(codes)));
      const auto odd =
          steps(hn::BitCast(df, hn::And(codes, hn::Set(du32, 0xFFFF0000u))));
      v = hn::OddEven(hn::BitCast(du16, hn::ShiftLeft<16>(odd)),
                      hn::BitCast(du16, even));
    } else {
      v = hn::OrderedTruncate2To(du16, steps(LoadF32(df, from + i)),
                                 steps(LoadF32(df, from + i + lanes)));
    }
    return hn::SaturatedAdd(hn::BitCast(d16, v), hn::Set(d16, z));
  };
  const auto quantize_step = [&](size_t i) HWY_ATTR {
    for (size_t bytes = 0; bytes < step * sizeof(T); bytes += 64) {
      hwy::Prefetch(ahead + i * sizeof(T) + bytes);
    }
    return hn::Xor(
        hn::OrderedDemote2To(d8, quantize_pair(i), quantize_pair(i + step / 2)),
        hn::Set(d8, sign));
  };

  size_t i = 0;
  if (stream) {
    // Whole cache lines only: a line written in parts would be read first.
    const size_t head =
        HWY_MIN(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    for (; i < head; i += lanes) quantize_part(i, HWY_MIN(lanes, head - i));
    i = head;
    for (; i + step <= n; i += step) hn::Stream(quantize_step(i), d8, to + i);
  }
  for (; i + step <= n; i += step) hn::StoreU(quantize_step(i), d8, to + i);
  for (; i < n; i += lanes) quantize_part(i, HWY_MIN(lanes, n - i));
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
  switch (dtype) {
    case DType::kBF16:
      return KernelsOf<BFloat16>();
    case DType::kF16:
      return KernelsOf<Float16>();
    default:
      return KernelsOf<float>();
  }
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
