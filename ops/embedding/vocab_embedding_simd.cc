#include "ops/embedding/vocab_embedding_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/embedding/vocab_embedding_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <typename W, typename O>
void Convert(const void* row, void* out, size_t n) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const W* w = static_cast<const W*>(row);
  O* o = static_cast<O*>(out);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StoreF32(LoadF32(d, w + i), d, o + i);
  }
  if (i < n) StoreNF32(LoadNF32(d, w + i, n - i), d, o + i, n - i);
}

VocabEmbeddingKernels GetKernels(DType weight, DType out) {
  VocabEmbeddingKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  const bool out_f32 = out == DType::kF32;
  // Equal dtypes are copied by the plan.
  if (weight == DType::kF16) {
    kernels.convert =
        out_f32 ? &Convert<Float16, float> : &Convert<Float16, BFloat16>;
  } else if (weight != out) {
    kernels.convert =
        out_f32 ? &Convert<BFloat16, float> : &Convert<float, BFloat16>;
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
VocabEmbeddingKernels GetVocabEmbeddingKernels(DType weight, DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(weight, out);
}
}  // namespace quern
#endif  // HWY_ONCE
