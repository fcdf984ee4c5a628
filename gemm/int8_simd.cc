#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/gemm/int8_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/int8_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/gemm/register_tile-inl.h"
#include "quern/gemm/tile-inl.h"
#include "quern/quant/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Quads of u8 by s8, as vpdpbusd takes them. Highway widens them to 16 bits
// where that does not exist: vpmaddubsw saturates.
struct DotU8S8 {
  using D = LineTag<int32_t>;
  using DB = hn::Repartition<int8_t, D>;
  static constexpr size_t kSub = 1;
  template <size_t kI>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(DB(), reinterpret_cast<const int8_t*>(line));
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<DB> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToUnsigned<DB> du8;
    return hn::SumOfMulQuadAccumulate(D(), hn::BitCast(du8, hn::Set(du, a)), b,
                                      sum);
  }
};

template <typename T>
void Finish(const Int8FinishArgs& args) {
  const LineTag<int32_t> di;
  const LineTag<float> df;
  constexpr size_t kLanes = HWY_MAX_LANES_D(LineTag<float>);
  for (size_t r = 0; r < args.rows; ++r) {
    const int32_t* HWY_RESTRICT sums = args.sums + r * args.sums_stride;
    T* HWY_RESTRICT c =
        reinterpret_cast<T*>(static_cast<uint8_t*>(args.c) +
                             static_cast<ptrdiff_t>(r) * args.c_row_bytes);
    const auto offset = hn::Set(di, args.a_offset[r]);
    const auto a_scale = hn::Set(df, args.a_scale[r]);
    for (size_t i = 0; i < args.cols; i += kLanes) {
      const size_t left = HWY_MIN(args.cols - i, kLanes);
      const auto dot =
          hn::Sub(hn::LoadU(di, sums + i),
                  hn::Mul(offset, hn::LoadN(di, args.col_sums + i, left)));
      const auto scaled = hn::Mul(hn::ConvertTo(df, dot),
                                  hn::LoadN(df, args.b_scale + i, left));
      const auto bias = args.bias == nullptr
                            ? hn::Zero(df)
                            : hn::LoadN(df, args.bias + i, left);
      const auto v = hn::MulAdd(a_scale, scaled, bias);
      if (HWY_LIKELY(left == kLanes)) {
        StoreF32(v, df, c + i);
      } else {
        StoreNF32(v, df, c + i, left);
      }
    }
  }
}

Int8Kernels GetKernels(DType c) {
  Int8Kernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.table = MakeTileTable<DotU8S8>();
  kernels.finish_f32 = &Finish<float>;
  kernels.finish =
      WithFloatType(c, [](auto t) { return &Finish<decltype(t)>; });
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
Int8Kernels GetInt8Kernels(DType c) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(c);
}
}  // namespace quern
#endif  // HWY_ONCE
