#include "quern/core/dtype.h"
#include "quern/core/sets/avx3.h"
#include "quern/gemm/kernels/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/linear_f32_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/gemm/kernels/f16_pairs-inl.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
template <class Dot>
LinearKernels GetKernels() {
  LinearKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.arithmetic = "f32 fma";
  kernels.elements_per_line = Dot::kSub;
  kernels.table = MakeTileTable<Dot>();
  return kernels;
}
LinearKernels GetKernelsF32() { return GetKernels<DotF32>(); }
LinearKernels GetKernelsF16() { return GetKernels<DotF16>(); }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernelsF32);
HWY_EXPORT(GetKernelsF16);
}  // namespace
LinearKernels GetLinearKernelsF32(DType a) {
  LinearKernels kernels = HWY_DYNAMIC_DISPATCH(GetKernelsF32)();
  kernels.pack_row = GetPackF32(a);
  return kernels;
}
LinearKernels GetLinearKernelsF16(DType a) {
  LinearKernels kernels = HWY_DYNAMIC_DISPATCH(GetKernelsF16)();
  kernels.pack_row = GetPackF32(a);
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
