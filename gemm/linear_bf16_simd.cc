#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "gemm/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/linear_bf16_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "gemm/tile-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Pairs of bf16 weights by f32: the lower of a pair moves up, the upper loses
// the lower bits. Both are exact.
struct DotF32 {
  using D = LineTag<float>;
  static constexpr size_t kSub = 2;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    const D d;
    const hn::RebindToUnsigned<D> du;
    const auto pairs = hn::LoadU(du, reinterpret_cast<const uint32_t*>(line));
    return hn::BitCast(d, kI == 0 ? hn::ShiftLeft<16>(pairs)
                                  : hn::And(pairs, hn::Set(du, 0xFFFF0000u)));
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<D> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const D d;
    const hn::RebindToUnsigned<D> du;
    return hn::MulAdd(hn::BitCast(d, hn::Set(du, a)), b, sum);
  }
};

#if HWY_NATIVE_DOT_BF16
struct DotBF16 {
  using D = LineTag<float>;
  using DB = hn::Repartition<hwy::bfloat16_t, D>;
  static constexpr size_t kSub = 1;
  template <size_t kI>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(DB(), reinterpret_cast<const hwy::bfloat16_t*>(line));
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<DB> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    auto unused = hn::Zero(D());  // native: all goes to the first sum
    return hn::ReorderWidenMulAccumulate(D(), hn::BitCast(DB(), hn::Set(du, a)),
                                         b, sum, unused);
  }
};
#endif

LinearKernels GetKernels(DType a) {
  LinearKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
#if HWY_NATIVE_DOT_BF16
  if (a == DType::kBF16) {
    kernels.arithmetic = "bf16 dot";
    kernels.elements_per_line = DotBF16::kSub;
    kernels.table = MakeTileTable<DotBF16>();
    return kernels;
  }
#endif
  (void)a;
  kernels.arithmetic = "f32 fma";
  kernels.elements_per_line = DotF32::kSub;
  kernels.table = MakeTileTable<DotF32>();
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
LinearKernels GetLinearKernelsBF16(DType a, DType c) {
  LinearKernels kernels = HWY_DYNAMIC_DISPATCH(GetKernels)(a);
  kernels.pack_row =
      kernels.elements_per_line == 1 ? GetPackPairs() : GetPackF32(a);
  kernels.finish = GetFinish(c);
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
