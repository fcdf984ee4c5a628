#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/gemm/kernels/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/linear_bf16_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
LinearKernels GetKernels(DType a) {
  LinearKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.sums = TileSums::kAlike;
#if HWY_NATIVE_DOT_BF16
  if (a == DType::kBF16) {
    kernels.arithmetic = "bf16 dot";
    kernels.elements_per_line = DotPairsBF16::kSub;
    kernels.table = MakeTileTable<DotPairsBF16>();
    return kernels;
  }
#endif
  (void)a;
  kernels.arithmetic = "f32 fma";
  using Dot = SumsInPlace<DotPairsF32<BFloat16>>;
  kernels.elements_per_line = Dot::kSub;
  kernels.table = MakeTileTable<Dot>();
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
absl::Span<const LinearKernelSet> LinearKernelSetsBF16() {
  static constexpr LinearKernelSet kSets[] = {QUERN_HWY_SETS(GetKernels)};
  return kSets;
}
LinearKernels GetLinearKernelsBF16(DType a) {
  LinearKernels kernels = FirstThatRuns(LinearKernelSetsBF16()).get(a);
  kernels.pack_row =
      kernels.elements_per_line == 1 ? GetPackPairs() : GetPackF32(a);
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
