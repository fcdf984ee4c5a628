#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/norm/layer_norm_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/layer_norm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;
using DC = hn::Repartition<uint16_t, DF>;

void Add(const float* r, size_t n, float* v) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Add(hn::Load(d, v + i), hn::Load(d, r + i)), d, v + i);
  }
}

// Four sums hide the latency of an addition. The order is that of any T.
template <typename T>
LayerNormMoments Moments(const void* elements, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const T* const v = static_cast<const T*>(elements);
  LayerNormMoments moments;
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::Add(s0, LoadF32(d, v + i));
    s1 = hn::Add(s1, LoadF32(d, v + i + lanes));
    s2 = hn::Add(s2, LoadF32(d, v + i + 2 * lanes));
    s3 = hn::Add(s3, LoadF32(d, v + i + 3 * lanes));
  }
  for (; i < n; i += lanes) {
    s0 = hn::Add(s0, LoadNF32(d, v + i, HWY_MIN(lanes, n - i)));
  }
  const auto sum = hn::Add(hn::Add(s0, s1), hn::Add(s2, s3));
  moments.mean = hn::ReduceSum(d, sum) / static_cast<float>(n);
  const auto m = hn::Set(d, moments.mean);
  s0 = s1 = s2 = s3 = hn::Zero(d);
  auto q0 = s0, q1 = s0, q2 = s0, q3 = s0;
  for (i = 0; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto x0 = hn::Sub(LoadF32(d, v + i), m);
    const auto x1 = hn::Sub(LoadF32(d, v + i + lanes), m);
    const auto x2 = hn::Sub(LoadF32(d, v + i + 2 * lanes), m);
    const auto x3 = hn::Sub(LoadF32(d, v + i + 3 * lanes), m);
    s0 = hn::Add(s0, x0);
    s1 = hn::Add(s1, x1);
    s2 = hn::Add(s2, x2);
    s3 = hn::Add(s3, x3);
    q0 = hn::MulAdd(x0, x0, q0);
    q1 = hn::MulAdd(x1, x1, q1);
    q2 = hn::MulAdd(x2, x2, q2);
    q3 = hn::MulAdd(x3, x3, q3);
  }
  for (; i < n; i += lanes) {
    // The lanes after the last number are zero and not the mean.
    const size_t part = HWY_MIN(lanes, n - i);
    const auto x = hn::IfThenElseZero(hn::FirstN(d, part),
                                      hn::Sub(LoadNF32(d, v + i, part), m));
    s0 = hn::Add(s0, x);
    q0 = hn::MulAdd(x, x, q0);
  }
  moments.rest = hn::ReduceSum(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
  moments.squares = hn::ReduceSum(d, hn::Add(hn::Add(q0, q1), hn::Add(q2, q3)));
  return moments;
}

// A row's numbers where they go: (x - mean - rest) * scale * w + b.
template <bool kWeight, bool kBias>
struct Scaled {
  HWY_INLINE VF operator()(VF x, VF w, VF b) const {
    x = hn::Mul(hn::Sub(hn::Sub(x, mean), rest), scale);
    if constexpr (kWeight && kBias) return hn::MulAdd(x, w, b);
    if constexpr (kWeight) return hn::Mul(x, w);
    if constexpr (kBias) return hn::Add(x, b);
    return x;
  }
  VF mean, rest, scale;
};

// Two vectors: of bf16 the even and the odd elements, because that takes fewer
// instructions than the order of memory, which does not matter here.
struct Two {
  VF a, b;
};
template <typename T>
HWY_INLINE Two Load2(const T* p) {
  const DF d;
  if constexpr (hwy::IsSame<T, BFloat16>()) {
    const auto codes = hn::LoadU(DC(), reinterpret_cast<const uint16_t*>(p));
    return {EvenF32(d, codes), OddF32(d, codes)};
  } else {
    Two v;
    LoadF32x2(d, p, v.a, v.b);
    return v;
  }
}
template <typename T>
HWY_INLINE void Store2(const Two& v, bool stream, T* p) {
  const DF d;
  if constexpr (hwy::IsSame<T, float>()) {
    if (stream) {
      hn::Stream(v.a, d, p);
      hn::Stream(v.b, d, p + hn::Lanes(d));
    } else {
      StoreF32x2(v.a, v.b, d, p);
    }
  } else {
    const DC dc;
    hn::Vec<DC> codes;
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      codes = EncodeBF16Pairs(d, v.a, v.b);
    } else {
      codes = EncodeCodes2<T>(d, v.a, v.b);
    }
    auto* const to = reinterpret_cast<uint16_t*>(p);
    stream ? hn::Stream(codes, dc, to) : hn::StoreU(codes, dc, to);
  }
}

template <typename T, bool kWeight, bool kBias>
HWY_INLINE void ScaleBy(const LayerNormScale& by, const T* x, const T* w,
                        const T* b, size_t n, bool stream, T* out) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const Scaled<kWeight, kBias> scaled = {
      hn::Set(d, by.mean), hn::Set(d, by.rest), hn::Set(d, by.scale)};
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const Two v = Load2(x + i);
    Two weight = v, bias = v;
    if constexpr (kWeight) weight = Load2(w + i);
    if constexpr (kBias) bias = Load2(b + i);
    Store2<T>({scaled(v.a, weight.a, bias.a), scaled(v.b, weight.b, bias.b)},
              stream, out + i);
  }
  for (; i < n; i += lanes) {
    const size_t part = HWY_MIN(lanes, n - i);
    const auto v = LoadNF32(d, x + i, part);
    const auto weight = kWeight ? LoadNF32(d, w + i, part) : v;
    const auto bias = kBias ? LoadNF32(d, b + i, part) : v;
    StoreNF32(scaled(v, weight, bias), d, out + i, part);
  }
}

template <typename T>
void Scale(const LayerNormScale& by, const void* x, const void* w,
           const void* b, size_t n, bool stream, void* out) {
  const T* const xs = static_cast<const T*>(x);
  const T* const ws = static_cast<const T*>(w);
  const T* const bs = static_cast<const T*>(b);
  T* const to = static_cast<T*>(out);
  if (w != nullptr) {
    b != nullptr ? ScaleBy<T, true, true>(by, xs, ws, bs, n, stream, to)
                 : ScaleBy<T, true, false>(by, xs, ws, bs, n, stream, to);
  } else {
    b != nullptr ? ScaleBy<T, false, true>(by, xs, ws, bs, n, stream, to)
                 : ScaleBy<T, false, false>(by, xs, ws, bs, n, stream, to);
  }
}

template <typename T>
LayerNormKernels KernelsOf() {
  return {hwy::TargetName(HWY_TARGET), &Add, &Moments<T>, &Scale<T>};
}
LayerNormKernels GetKernels(DType dtype) {
  if (dtype == DType::kBF16) return KernelsOf<BFloat16>();
  if (dtype == DType::kF16) return KernelsOf<Float16>();
  return KernelsOf<float>();
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
LayerNormKernels GetLayerNormKernels(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
