#include "quant/fp8_quantize_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/fp8_quantize_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quant/convert-inl.h"
#include "quant/float_format.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D8 = hn::ScalableTag<uint8_t>;
using D16 = hn::Repartition<uint16_t, D8>;
using D32 = hn::Repartition<uint32_t, D8>;
using DF = hn::Repartition<float, D8>;

template <typename T>
struct Quantizer {
  // As many codes as f32 has lanes, from element i on; v are the elements.
  HWY_INLINE hn::Vec<D32> Codes(hn::Vec<DF> v) const {
    const DF df;
    const hn::RebindToSigned<DF> di;
    const auto clamp =
        hn::Set(di, static_cast<int>(quant_internal::ClampF32Bits<Float8E4M3>(
                        OverflowMode::kSaturate)));
    return hn::BitCast(D32(), EncodeLanes<Float8E4M3>(
                                  df, hn::Mul(v, hn::Set(df, inverse)), clamp));
  }
  HWY_INLINE hn::Vec<D16> Pair(size_t i) const {
    const DF df;
    return hn::OrderedTruncate2To(D16(), Codes(LoadF32(df, x + i)),
                                  Codes(LoadF32(df, x + i + hn::Lanes(df))));
  }
  HWY_INLINE hn::Vec<D8> Step(size_t i) const {
    const D8 d8;
    return hn::OrderedTruncate2To(d8, Pair(i), Pair(i + hn::Lanes(d8) / 2));
  }
  // At most as many as f32 has lanes.
  HWY_INLINE void Part(size_t i, size_t part, uint8_t* q) const {
    const hn::Rebind<uint8_t, DF> d8;
    hn::StoreN(hn::TruncateTo(d8, Codes(LoadNF32(DF(), x + i, part))), d8,
               q + i, part);
  }
  const T* x;
  float inverse;
};

template <typename T>
void Quantize(const void* x, size_t n, float inverse, bool stream, void* q) {
  const D8 d8;
  const size_t lanes = hn::Lanes(DF());
  const size_t step = hn::Lanes(d8);
  const Quantizer<T> quantizer = {static_cast<const T*>(x), inverse};
  uint8_t* to = static_cast<uint8_t*>(q);
  size_t i = 0;
  if (stream) {
    // Whole cache lines only: a line written in parts would be read first.
    const size_t head =
        HWY_MIN(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    for (; i < head; i += HWY_MIN(lanes, head - i)) {
      quantizer.Part(i, HWY_MIN(lanes, head - i), to);
    }
    for (; i + step <= n; i += step) {
      hn::Stream(quantizer.Step(i), d8, to + i);
    }
  }
  for (; i + step <= n; i += step) {
    hn::StoreU(quantizer.Step(i), d8, to + i);
  }
  for (; i < n; i += lanes) quantizer.Part(i, HWY_MIN(lanes, n - i), to);
}

void Flush() { hwy::FlushStream(); }

Fp8QuantizeKernels GetKernels(DType dtype) {
  Fp8QuantizeKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.flush = &Flush;
  switch (dtype) {
    case DType::kBF16:
      kernels.quantize = &Quantize<BFloat16>;
      break;
    case DType::kF16:
      kernels.quantize = &Quantize<Float16>;
      break;
    default:
      kernels.quantize = &Quantize<float>;
  }
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
Fp8QuantizeKernels GetFp8QuantizeKernels(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
