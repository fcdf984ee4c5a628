#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "gemm/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/linear_f32_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "gemm/tile-inl.h"
#include "quant/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

struct Fma {
  using D = LineTag<float>;
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<D> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    return hn::MulAdd(hn::BitCast(D(), hn::Set(du, a)), b, sum);
  }
};

struct DotF32 : Fma {
  static constexpr size_t kSub = 1;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(D(), reinterpret_cast<const float*>(line));
  }
};

// Pairs of f16 weights, widened exactly.
struct DotF16 : Fma {
  static constexpr size_t kSub = 2;
  template <size_t kI>
  static HWY_INLINE hn::Vec<D> LoadB(const uint8_t* HWY_RESTRICT line) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> du16;
    const auto pairs = hn::LoadU(du, reinterpret_cast<const uint32_t*>(line));
    return DecodeCodes<Float16>(
        D(), hn::TruncateTo(du16, kI == 0 ? pairs : hn::ShiftRight<16>(pairs)));
  }
};

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
