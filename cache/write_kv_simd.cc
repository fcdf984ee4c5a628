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

template <typename T>
void Copy(const void* from, size_t count, void* to) {
  hwy::CopyBytes(from, to, count * sizeof(T));
}

WriteKvKernels GetKernels(DType input, DType cache) {
  WriteKvKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  if (input == DType::kF32) {
    kernels.convert = cache == DType::kBF16  ? &Convert<float, BFloat16>
                      : cache == DType::kF16 ? &Convert<float, Float16>
                                             : &Copy<float>;
  } else {
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
