#include "absl/types/span.h"
#include "quern/core/kernel_set.h"
#include "quern/core/sets/avx3.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/exact_block32_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/gemm/kernels/exact_block-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {

ExactBlockKernels GetKernels(BlockFormat format) {
  return block_fields::WithBlockFormat<32>(
      format, [](auto f) { return MakeExactKernels<decltype(f)::value>(); });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
absl::Span<const ExactBlockKernelSet> ExactBlock32KernelSets() {
  static constexpr ExactBlockKernelSet kSets[] = {QUERN_HWY_SETS(GetKernels)};
  return kSets;
}
ExactBlockKernels GetExactBlock32Kernels(BlockFormat format) {
  return FirstThatRuns(ExactBlock32KernelSets()).get(format);
}
}  // namespace quern
#endif  // HWY_ONCE
