#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/linear_f32_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/gemm/register_tile-inl.h"
#include "quern/gemm/tile-inl.h"
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
LinearKernels GetKernelsF16() { return GetKernels<DotPairsF32<Float16>>(); }

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

LinearKernels WithRows(LinearKernels kernels, DType a, DType c) {
  kernels.pack_row = GetPackF32(a);
  kernels.finish = GetFinish(c);
  return kernels;
}
}  // namespace
LinearKernels GetLinearKernelsF32(DType a, DType c) {
  return WithRows(HWY_DYNAMIC_DISPATCH(GetKernelsF32)(), a, c);
}
LinearKernels GetLinearKernelsF16(DType a, DType c) {
  return WithRows(HWY_DYNAMIC_DISPATCH(GetKernelsF16)(), a, c);
}
}  // namespace quern
#endif  // HWY_ONCE
