#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/embedding/vocab_embedding_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/embedding/vocab_embedding_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/float_type.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <typename W, typename O>
void Convert(const void* row, float scale, void* out, size_t n) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, scale);
  const W* w = static_cast<const W*>(row);
  O* o = static_cast<O*>(out);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StoreF32(hn::Mul(LoadF32(d, w + i), factor), d, o + i);
  }
  if (i < n) {
    StoreNF32(hn::Mul(LoadNF32(d, w + i, n - i), factor), d, o + i, n - i);
  }
}

VocabEmbeddingKernels GetKernels(DType weight, DType out) {
  const auto convert = WithFloatType(weight, [out](auto w) {
    using W = decltype(w);
    return WithFloatType(out, [](auto o) { return &Convert<W, decltype(o)>; });
  });
  return {hwy::TargetName(HWY_TARGET), convert};
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
