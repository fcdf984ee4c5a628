#include "cache/write_kv_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cache/write_kv_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <typename From, typename To>
void Convert(const void* from_bytes, size_t count, void* to_bytes) {
  const From* HWY_RESTRICT from = static_cast<const From*>(from_bytes);
  To* HWY_RESTRICT to = static_cast<To*>(to_bytes);
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  for (size_t i = 0; i < count; i += lanes) {
    const size_t valid = HWY_MIN(lanes, count - i);
    StoreNF32(LoadNF32(df, from + i, valid), df, to + i, valid);
  }
}

template <typename From, typename To>
void Scatter(const void* from_bytes, size_t count, size_t pair, size_t stride,
             void* to_bytes) {
  constexpr size_t kBlock = 64;
  To block[kBlock];
  To* HWY_RESTRICT to = static_cast<To*>(to_bytes);
  const From* HWY_RESTRICT from = static_cast<const From*>(from_bytes);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t valid = HWY_MIN(kBlock, count - begin);
    Convert<From, To>(from + begin, valid, block);
    for (size_t i = 0; i < valid; ++i) {
      const size_t d = begin + i;
      hwy::CopyBytes<sizeof(To)>(block + i, to + d / pair * stride + d % pair);
    }
  }
  if (count % pair != 0) {
    hwy::ZeroBytes<sizeof(To)>(to + count / pair * stride + count % pair);
  }
}

template <typename T>
void Copy(const void* from, size_t count, void* to) {
  hwy::CopyBytes(from, to, count * sizeof(T));
}

WriteKvKernels GetKernels(DType input, DType cache) {
  WriteKvKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  if (input == DType::kF32) {
    kernels.scatter = cache == DType::kBF16  ? &Scatter<float, BFloat16>
                      : cache == DType::kF16 ? &Scatter<float, Float16>
                                             : &Scatter<float, float>;
    kernels.convert = cache == DType::kBF16  ? &Convert<float, BFloat16>
                      : cache == DType::kF16 ? &Convert<float, Float16>
                                             : &Copy<float>;
  } else {
    kernels.scatter = cache == DType::kF32   ? &Scatter<BFloat16, float>
                      : cache == DType::kF16 ? &Scatter<BFloat16, Float16>
                                             : &Scatter<BFloat16, BFloat16>;
    kernels.convert = cache == DType::kF32   ? &Convert<BFloat16, float>
                      : cache == DType::kF16 ? &Convert<BFloat16, Float16>
                                             : &Copy<BFloat16>;
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
WriteKvKernels GetWriteKvKernels(DType input, DType cache) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(input, cache);
}
}  // namespace quern
#endif  // HWY_ONCE
