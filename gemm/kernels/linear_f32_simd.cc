#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
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
  kernels.sums = TileSums::kAlike;
  kernels.arithmetic = "f32 fma";
  kernels.elements_per_line = Dot::kSub;
  kernels.table = MakeTileTable<Dot>();
  return kernels;
}
LinearKernels GetKernelsF32(DType /*a*/) { return GetKernels<DotF32>(); }
LinearKernels GetKernelsF16(DType /*a*/) { return GetKernels<DotF16>(); }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
absl::Span<const LinearKernelSet> LinearKernelSetsF32() {
  static constexpr LinearKernelSet kSets[] = {QUERN_HWY_SETS(GetKernelsF32)};
  return kSets;
}
absl::Span<const LinearKernelSet> LinearKernelSetsF16() {
  static constexpr LinearKernelSet kSets[] = {QUERN_HWY_SETS(GetKernelsF16)};
  return kSets;
}
LinearKernels GetLinearKernelsF32(DType a) {
  LinearKernels kernels = FirstThatRuns(LinearKernelSetsF32()).get(a);
  kernels.pack_row = GetPackF32(a);
  return kernels;
}
LinearKernels GetLinearKernelsF16(DType a) {
  LinearKernels kernels = FirstThatRuns(LinearKernelSetsF16()).get(a);
  kernels.pack_row = GetPackF32(a);
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
