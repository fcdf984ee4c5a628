#include "ops/activation/silu_and_mul_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/silu_and_mul_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "core/activation-inl.h"
#include "hwy/highway.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;

template <typename X, typename O>
void Row(const void* gate, const void* up, void* out, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const X* g = static_cast<const X*>(gate);
  const X* u = static_cast<const X*>(up);
  O* o = static_cast<O*>(out);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto silu = Silu(d, LoadF32(d, g + i));
    StoreF32(hn::Mul(silu, LoadF32(d, u + i)), d, o + i);
  }
  if (i < n) {
    const auto silu = Silu(d, LoadNF32(d, g + i, n - i));
    StoreNF32(hn::Mul(silu, LoadNF32(d, u + i, n - i)), d, o + i, n - i);
  }
}

SiluAndMulKernels GetKernels(DType x, DType out) {
  SiluAndMulKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  const bool out_f32 = out == DType::kF32;
  if (x == DType::kF32) {
    kernels.row = out_f32 ? &Row<float, float> : &Row<float, BFloat16>;
  } else {
    kernels.row = out_f32 ? &Row<BFloat16, float> : &Row<BFloat16, BFloat16>;
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
SiluAndMulKernels GetSiluAndMulKernels(DType x, DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(x, out);
}
}  // namespace quern
#endif  // HWY_ONCE
