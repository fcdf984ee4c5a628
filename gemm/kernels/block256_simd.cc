#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/isa.h"
#include "quern/core/kernel_set.h"
#include "quern/core/sets/avx3_dl.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/block256_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/gemm/kernels/block_record-inl.h"
#include "quern/gemm/kernels/block_rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {

BlockKernels GetKernels(BlockFormat format, DType a) {
  return block_fields::WithBlockFormat<256>(format, [a](auto f) {
    constexpr BlockFormat kFormat = decltype(f)::value;
    BlockKernels kernels = MakeBlockKernels<kFormat>();
    kernels.pack_row = WithFloatType(
        a, [](auto t) { return &PackBlockRow<decltype(t), RowOf<kFormat>>; });
    return kernels;
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
#if QUERN_AVX_VNNI_PASS
BlockKernels GetBlock256AvxVnniKernels(BlockFormat format, DType a) {
  return HWY_STATIC_DISPATCH(GetKernels)(format, a);
}
#else
absl::Span<const BlockKernelSet> Block256KernelSets() {
  static constexpr BlockKernelSet kSets[] = {
    QUERN_HWY_SETS_ABOVE_AVX2(GetKernels),
#if QUERN_AVX_VNNI
    {kAvx2Vnni, &GetBlock256AvxVnniKernels},
#endif
    QUERN_HWY_SETS_FROM_AVX2(GetKernels),
  };
  return kSets;
}
BlockKernels GetBlock256Kernels(BlockFormat format, DType a) {
  return FirstThatRuns(Block256KernelSets()).get(format, a);
}
#endif
}  // namespace quern
#endif  // HWY_ONCE
