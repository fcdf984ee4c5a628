#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/gemm/kernels/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/linear_rows_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_HAVE_SCALABLE
using DF = hn::FixedTag<float, 4>;
#else
using DF = hn::CappedTag<float, 16>;
#endif
constexpr size_t kFloats = HWY_MAX_LANES_D(DF);

void PackPairs(const void* a, size_t k, uint32_t* to) {
  to[(k - 1) / 2] = 0;
  hwy::CopyBytes(a, to, k * sizeof(BFloat16));
}

// The bits of f32, which tiles read as 32-bit elements. An even number is
// written: lines of f16 and bf16 weights hold pairs.
template <typename T>
void PackF32(const void* a, size_t k, uint32_t* HWY_RESTRICT to) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  const T* HWY_RESTRICT from = static_cast<const T*>(a);
  size_t i = 0;
  for (; i + kFloats <= k; i += kFloats) {
    hn::StoreU(hn::BitCast(du, LoadF32(df, from + i)), du, to + i);
  }
  if (i < k) {
    if (k % 2 != 0) to[k] = 0;
    const auto last = LoadNF32(df, from + i, k - i);
    hn::StoreN(hn::BitCast(du, last), du, to + i, k - i);
  }
}

template <typename T>
void FinishTo(const FinishArgs& args) {
  const DF df;
  for (size_t r = 0; r < args.rows; ++r) {
    const float* HWY_RESTRICT sums = args.sums + r * args.sums_stride;
    T* HWY_RESTRICT c =
        reinterpret_cast<T*>(static_cast<uint8_t*>(args.c) +
                             static_cast<ptrdiff_t>(r) * args.c_row_bytes);
    size_t i = 0;
    for (; i + kFloats <= args.cols; i += kFloats) {
      auto v = hn::LoadU(df, sums + i);
      if (args.bias != nullptr) v = hn::Add(v, hn::LoadU(df, args.bias + i));
      StoreF32(v, df, c + i);
    }
    if (i < args.cols) {
      const size_t left = args.cols - i;
      auto v = hn::LoadU(df, sums + i);
      if (args.bias != nullptr) {
        v = hn::Add(v, hn::LoadN(df, args.bias + i, left));
      }
      StoreNF32(v, df, c + i, left);
    }
  }
}

PackRow PairsPacker() { return &PackPairs; }
PackRow F32Packer(DType a) {
  return WithFloatType(a, [](auto t) { return &PackF32<decltype(t)>; });
}
Finish FinishOf(DType c) {
  return WithFloatType(c, [](auto t) { return &FinishTo<decltype(t)>; });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(PairsPacker);
HWY_EXPORT(F32Packer);
HWY_EXPORT(FinishOf);
}  // namespace
PackRow GetPackPairs() { return HWY_DYNAMIC_DISPATCH(PairsPacker)(); }
PackRow GetPackF32(DType a) { return HWY_DYNAMIC_DISPATCH(F32Packer)(a); }
Finish GetFinish(DType c) { return HWY_DYNAMIC_DISPATCH(FinishOf)(c); }
}  // namespace quern
#endif  // HWY_ONCE
