#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/norm/rms_norm_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/rms_norm_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using DC = hn::Repartition<uint16_t, DF>;

// Two vectors of elements, in an order that only the producer knows.
struct Two {
  VF a, b;
};

template <typename... T>
constexpr bool AllBF16() {
  return (hwy::IsSame<T, BFloat16>() && ...);
}

HWY_INLINE const uint16_t* Codes(const BFloat16* p) {
  return reinterpret_cast<const uint16_t*>(p);
}
HWY_INLINE uint16_t* Codes(BFloat16* p) {
  return reinterpret_cast<uint16_t*>(p);
}

// The even and the odd elements of a vector of bf16. This takes half the
// instructions of widening them in order.
HWY_INLINE Two EvenOdd(hn::Vec<DC> codes) {
  return {EvenF32(DF(), codes), OddF32(DF(), codes)};
}

// Returns the sum of h(i)^2. h.Full(i) gives one vector of elements from i on,
// h.Both(i) two, and h.Tail(i, n) the first n elements followed by zeros. Four
// sums hide the latency of the multiply-add. The order of additions depends on
// n alone.
template <class H>
HWY_INLINE float SumOfSquares(const H& h, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const Two h0 = h.Both(i);
    const Two h1 = h.Both(i + 2 * lanes);
    s0 = hn::MulAdd(h0.a, h0.a, s0);
    s1 = hn::MulAdd(h0.b, h0.b, s1);
    s2 = hn::MulAdd(h1.a, h1.a, s2);
    s3 = hn::MulAdd(h1.b, h1.b, s3);
  }
  for (; i + lanes <= n; i += lanes) {
    const auto h0 = h.Full(i);
    s0 = hn::MulAdd(h0, h0, s0);
  }
  if (i < n) {
    const auto h0 = h.Tail(i, n - i);
    s1 = hn::MulAdd(h0, h0, s1);
  }
  return hn::ReduceSum(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

template <typename X>
struct Plain {
  HWY_INLINE Two Both(size_t i) const {
    if constexpr (AllBF16<X>()) {
      return EvenOdd(hn::LoadU(DC(), Codes(x + i)));
    } else {
      return {Full(i), Full(i + hn::Lanes(DF()))};
    }
  }
  HWY_INLINE VF Full(size_t i) const { return LoadF32(DF(), x + i); }
  HWY_INLINE VF Tail(size_t i, size_t n) const {
    return LoadNF32(DF(), x + i, n);
  }
  const X* x;
};

// Stores the first n lanes of v as T, and returns v as rounded by the store.
template <typename T>
HWY_INLINE VF StoreRounded(VF v, T* to, size_t n) {
  const DF d;
  if constexpr (hwy::IsSame<T, float>()) {
    n < hn::Lanes(d) ? hn::StoreN(v, d, to, n) : hn::StoreU(v, d, to);
    return v;
  } else {
    const hn::Rebind<CodeOf<T>, DF> dc;
    CodeOf<T>* const codes_to = reinterpret_cast<CodeOf<T>*>(to);
    const auto codes = EncodeCodes<T>(d, v);
    n < hn::Lanes(d) ? hn::StoreN(codes, dc, codes_to, n)
                     : hn::StoreU(codes, dc, codes_to);
    return DecodeCodes<T>(d, codes);
  }
}

// Loads x + residual, and stores the sum in residual_out on the way.
template <typename X, typename R>
struct Added {
  HWY_INLINE Two Both(size_t i) const {
    // The elements come in the order of Plain<R>, so that ExecuteAdd gives the
    // bits of Execute.
    if constexpr (AllBF16<R>()) {
      const DC dc;
      const auto codes = Codes2(i);
      hn::StoreU(codes, dc, Codes(residual_out + i));
      return EvenOdd(codes);
    } else {
      return {Full(i), Full(i + hn::Lanes(DF()))};
    }
  }
  HWY_INLINE hn::Vec<DC> Codes2(size_t i) const {
    const DF d;
    const DC dc;
    if constexpr (AllBF16<X>()) {
      const Two v = EvenOdd(hn::LoadU(dc, Codes(x + i)));
      const Two r = EvenOdd(hn::LoadU(dc, Codes(residual + i)));
      return EncodeBF16Pairs(d, hn::Add(v.a, r.a), hn::Add(v.b, r.b));
    } else {
      const size_t j = i + hn::Lanes(d);
      return EncodeCodes2<R>(
          d, hn::Add(LoadF32(d, x + i), LoadF32(d, residual + i)),
          hn::Add(LoadF32(d, x + j), LoadF32(d, residual + j)));
    }
  }
  HWY_INLINE VF Full(size_t i) const {
    const DF d;
    return StoreRounded(hn::Add(LoadF32(d, x + i), LoadF32(d, residual + i)),
                        residual_out + i, hn::Lanes(d));
  }
  HWY_INLINE VF Tail(size_t i, size_t n) const {
    const DF d;
    return StoreRounded(
        hn::Add(LoadNF32(d, x + i, n), LoadNF32(d, residual + i, n)),
        residual_out + i, n);
  }
  const X* x;
  const R* residual;
  R* residual_out;
};

// x + residual in f32, which is stored nowhere.
template <typename X>
struct Sum {
  HWY_INLINE Two Both(size_t i) const {
    const DF d;
    Two v, r;
    LoadF32x2(d, x + i, v.a, v.b);
    LoadF32x2(d, residual + i, r.a, r.b);
    return {hn::Add(v.a, r.a), hn::Add(v.b, r.b)};
  }
  HWY_INLINE VF Full(size_t i) const {
    const DF d;
    return hn::Add(LoadF32(d, x + i), LoadF32(d, residual + i));
  }
  HWY_INLINE VF Tail(size_t i, size_t n) const {
    const DF d;
    return hn::Add(LoadNF32(d, x + i, n), LoadNF32(d, residual + i, n));
  }
  const X* x;
  const X* residual;
};

template <typename X>
float SumSquaresOfSum(const void* x, const void* residual, size_t n) {
  return SumOfSquares(
      Sum<X>{static_cast<const X*>(x), static_cast<const X*>(residual)}, n);
}

template <typename X>
float SumSquares(const void* x, size_t n) {
  return SumOfSquares(Plain<X>{static_cast<const X*>(x)}, n);
}

template <typename X, typename R>
float AddSumSquares(const void* x, const void* residual, void* residual_out,
                    size_t n) {
  return SumOfSquares(
      Added<X, R>{static_cast<const X*>(x), static_cast<const R*>(residual),
                  static_cast<R*>(residual_out)},
      n);
}

// The scaled row. A struct, because GCC 12 does not inline a lambda that is
// called twice.
template <typename H, typename W, typename O>
struct Scaled {
  HWY_INLINE VF Product(VF v) const { return hn::Mul(v, hn::Set(DF(), scale)); }
  HWY_INLINE VF Product(VF v, VF w) const {
    return hn::Mul(Product(v), hn::Add(w, hn::Set(DF(), offset)));
  }
  HWY_INLINE VF Full(size_t i) const {
    const DF d;
    const auto v = LoadF32(d, h + i);
    if (weight == nullptr) return Product(v);
    return Product(v, LoadF32(d, weight + i));
  }
  // Two vectors from i on, in order.
  HWY_INLINE Two Full2(size_t i) const {
    const DF d;
    Two v, w;
    LoadF32x2(d, h + i, v.a, v.b);
    if (weight == nullptr) return {Product(v.a), Product(v.b)};
    LoadF32x2(d, weight + i, w.a, w.b);
    return {Product(v.a, w.a), Product(v.b, w.b)};
  }
  HWY_INLINE VF Tail(size_t i, size_t n) const {
    const DF d;
    const auto v = LoadNF32(d, h + i, n);
    if (weight == nullptr) return Product(v);
    return Product(v, LoadNF32(d, weight + i, n));
  }
  // Stores two vectors, because their 16-bit codes fill one vector and half a
  // vector cannot be streamed.
  template <bool kStream>
  HWY_INLINE void Store2(size_t i, O* out) const {
    const DF d;
    if constexpr (hwy::IsSame<O, float>()) {
      const Two v = Full2(i);
      const VF a = v.a, b = v.b;
      kStream ? hn::Stream(a, d, out + i) : hn::StoreU(a, d, out + i);
      float* const to_b = out + i + hn::Lanes(d);
      kStream ? hn::Stream(b, d, to_b) : hn::StoreU(b, d, to_b);
    } else {
      const hn::Repartition<CodeOf<O>, DF> dc;
      const auto codes = Codes2(i);
      CodeOf<O>* const to = reinterpret_cast<CodeOf<O>*>(out + i);
      kStream ? hn::Stream(codes, dc, to) : hn::StoreU(codes, dc, to);
    }
  }
  HWY_INLINE auto Codes2(size_t i) const {
    const DF d;
    if constexpr (AllBF16<H, W, O>()) {
      Two v = EvenOdd(hn::LoadU(DC(), Codes(h + i)));
      if (weight == nullptr) {
        v = {Product(v.a), Product(v.b)};
      } else {
        const Two w = EvenOdd(hn::LoadU(DC(), Codes(weight + i)));
        v = {Product(v.a, w.a), Product(v.b, w.b)};
      }
      return EncodeBF16Pairs(d, v.a, v.b);
    } else {
      const Two v = Full2(i);
      return EncodeCodes2<O>(d, v.a, v.b);
    }
  }
  const H* h;
  const W* weight;
  float scale;
  float offset;
};

HWY_INLINE void Fetch(const char* next, const char* next2, size_t at,
                      size_t bytes) {
  for (size_t b = at; b < at + bytes; b += 64) {
    if (next != nullptr) PrefetchL2(next + b);
    if (next2 != nullptr) PrefetchL2(next2 + b);
  }
}

template <typename H, typename W, typename O>
void ScaleRow(const void* h, const RmsNormScale& scale, void* out, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const Scaled<H, W, O> row = {static_cast<const H*>(h),
                               static_cast<const W*>(scale.weight), scale.scale,
                               scale.offset};
  O* op = static_cast<O*>(out);
  const char* const next = static_cast<const char*>(scale.next);
  const char* const next2 = static_cast<const char*>(scale.next2);
  size_t i = 0;
  if (scale.stream) {
    // Streaming stores start at a cache line, because a line that is written in
    // parts is read first.
    const size_t head = HWY_MIN(
        n, (64 - reinterpret_cast<uintptr_t>(op) % 64) % 64 / sizeof(O));
    for (; i < head; i += HWY_MIN(lanes, head - i)) {
      const size_t part = HWY_MIN(lanes, head - i);
      StoreNF32(row.Tail(i, part), d, op + i, part);
    }
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      Fetch(next, next2, i * sizeof(H), 2 * lanes * sizeof(H));
      row.template Store2<true>(i, op);
    }
  }
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    Fetch(next, next2, i * sizeof(H), 2 * lanes * sizeof(H));
    row.template Store2<false>(i, op);
  }
  for (; i + lanes <= n; i += lanes) StoreF32(row.Full(i), d, op + i);
  if (i < n) StoreNF32(row.Tail(i, n - i), d, op + i, n - i);
}

template <typename X, typename W>
void AddScaleRow(const void* x, const void* residual, const RmsNormScale& scale,
                 void* residual_out, void* out, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const Sum<X> sum = {static_cast<const X*>(x),
                      static_cast<const X*>(residual)};
  // Scaled<> has the product; its h is not read.
  const Scaled<X, W, X> row = {nullptr, static_cast<const W*>(scale.weight),
                               scale.scale, scale.offset};
  X* const rp = static_cast<X*>(residual_out);
  X* const op = static_cast<X*>(out);
  const W* const weight = row.weight;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const Two h = sum.Both(i);
    Two y;
    if (weight == nullptr) {
      y = {row.Product(h.a), row.Product(h.b)};
    } else {
      Two w;
      LoadF32x2(d, weight + i, w.a, w.b);
      y = {row.Product(h.a, w.a), row.Product(h.b, w.b)};
    }
    StoreF32x2(h.a, h.b, d, rp + i);
    StoreF32x2(y.a, y.b, d, op + i);
  }
  for (; i < n; i += lanes) {
    const size_t part = HWY_MIN(lanes, n - i);
    const VF h = sum.Tail(i, part);
    const VF y = weight == nullptr
                     ? row.Product(h)
                     : row.Product(h, LoadNF32(d, weight + i, part));
    StoreNF32(h, d, rp + i, part);
    StoreNF32(y, d, op + i, part);
  }
}

void Flush() { hwy::FlushStream(); }

using ScaleFunction = void (*)(const void*, const RmsNormScale&, void*, size_t);

template <typename H>
ScaleFunction ChooseScale(DType weight, DType out) {
  if (weight == DType::kF32) {
    return out == DType::kF32 ? &ScaleRow<H, float, float>
                              : &ScaleRow<H, float, BFloat16>;
  }
  return out == DType::kF32 ? &ScaleRow<H, BFloat16, float>
                            : &ScaleRow<H, BFloat16, BFloat16>;
}

RmsNormKernels GetKernels(DType x, DType weight, DType out, DType residual) {
  RmsNormKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.flush = &Flush;
  if (x == DType::kF16) {
    kernels.sum_squares = &SumSquares<Float16>;
    kernels.add_sum_squares = &AddSumSquares<Float16, Float16>;
    const bool weight_f32 = weight == DType::kF32;
    kernels.sum_squares_of_sum = &SumSquaresOfSum<Float16>;
    kernels.add_scale = weight_f32 ? &AddScaleRow<Float16, float>
                                   : &AddScaleRow<Float16, Float16>;
    kernels.scale_x = kernels.scale_residual =
        out == DType::kF32
            ? (weight_f32 ? &ScaleRow<Float16, float, float>
                          : &ScaleRow<Float16, Float16, float>)
            : (weight_f32 ? &ScaleRow<Float16, float, Float16>
                          : &ScaleRow<Float16, Float16, Float16>);
    return kernels;
  }
  const bool x_f32 = x == DType::kF32;
  const bool residual_f32 = residual == DType::kF32;
  kernels.sum_squares = x_f32 ? &SumSquares<float> : &SumSquares<BFloat16>;
  kernels.add_sum_squares =
      x_f32 ? (residual_f32 ? &AddSumSquares<float, float>
                            : &AddSumSquares<float, BFloat16>)
            : (residual_f32 ? &AddSumSquares<BFloat16, float>
                            : &AddSumSquares<BFloat16, BFloat16>);
  kernels.sum_squares_of_sum = &SumSquaresOfSum<BFloat16>;
  kernels.add_scale = weight == DType::kF32 ? &AddScaleRow<BFloat16, float>
                                            : &AddScaleRow<BFloat16, BFloat16>;
  kernels.scale_x = x_f32 ? ChooseScale<float>(weight, out)
                          : ChooseScale<BFloat16>(weight, out);
  kernels.scale_residual = residual_f32 ? ChooseScale<float>(weight, out)
                                        : ChooseScale<BFloat16>(weight, out);
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
bool HasRmsNormKernels(DType x, DType weight, DType out, DType residual) {
  const auto wide = [](DType t) {
    return t == DType::kF32 || t == DType::kBF16;
  };
  if (x == DType::kF16) {
    return (out == x || out == DType::kF32) && residual == x &&
           (weight == x || weight == DType::kF32);
  }
  return wide(x) && wide(weight) && wide(out) && wide(residual);
}
RmsNormKernels GetRmsNormKernels(DType x, DType weight, DType out,
                                 DType residual) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(x, weight, out, residual);
}
}  // namespace quern
#endif  // HWY_ONCE
