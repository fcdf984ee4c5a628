// Lines of pairs of f16 by rows of f32, once per instruction set: DotF16.
//
// With AVX2 both halves of a line are widened together. vcvtph2ps takes 128
// bits, four pairs that lie side by side, and a shuffle of two results
// separates lower from upper halves, where widening one half of each pair takes
// three instructions more. The shuffle stays within 128 bits, so sums are those
// of columns 0 1 4 5 2 3 6 7 until a tile is done. Cycles a line, with 1 row of
// four panels, 4, 5 and 6 rows: 8.5, 13.6, 15.2 and 18.2 -> 3.9, 9.1, 10.4
// and 12.2, where multiplication alone takes 2, 8, 10 and 12 (one core of Zen
// 4, 2026).

// clang-format off
#if defined(QUERN_GEMM_KERNELS_F16_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_GEMM_KERNELS_F16_PAIRS_INL_H_
#undef QUERN_GEMM_KERNELS_F16_PAIRS_INL_H_
#else
#define QUERN_GEMM_KERNELS_F16_PAIRS_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/dtype.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX2 && QUERN_NATIVE_F16

struct DotF16 : SumsInPlace<FmaSums> {
  static constexpr size_t kSub = 2;
  static HWY_INLINE void LoadHalves(const uint8_t* HWY_RESTRICT line,
                                    hn::Vec<D>& lower, hn::Vec<D>& upper) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto* pairs = reinterpret_cast<const hwy::float16_t*>(line);
    const auto a = hn::PromoteTo(D(), hn::LoadU(dh, pairs));
    const auto b = hn::PromoteTo(D(), hn::LoadU(dh, pairs + 8));
    lower.raw = _mm256_shuffle_ps(a.raw, b.raw, _MM_SHUFFLE(2, 0, 2, 0));
    upper.raw = _mm256_shuffle_ps(a.raw, b.raw, _MM_SHUFFLE(3, 1, 3, 1));
  }
};

HWY_INLINE hn::Vec<DotF16::D> InColumns(DotF16 /*dot*/,
                                        hn::Vec<DotF16::D> sums) {
  return SwapMiddleQuarters(DotF16::D(), sums);
}

// Keeps v in memory until it is needed.
HWY_INLINE void Spill(hn::Vec<DotF16::D>& v) {
#if HWY_COMPILER_GCC_ACTUAL
  asm("" : "+m"(v.raw));
#else
  (void)v;
#endif
}

template <class V, size_t kRows, size_t kTileVecs>
HWY_INLINE void AddHalf(const uint32_t* HWY_RESTRICT words, size_t stride, V b,
                        size_t v, V (&sums)[kRows][kTileVecs]) {
  HWY_UNROLL(16)
  for (size_t r = 0; r < kRows; ++r) {
    sums[r][v] = DotF16::MulAdd(b, words[r * stride], sums[r][v]);
  }
}

template <class Line, size_t kRows, size_t kTileVecs>
HWY_INLINE void TileStep(DotF16 /*dot*/, const uint32_t* HWY_RESTRICT words,
                         size_t stride, const Line& line,
                         hn::Vec<DotF16::D> (&sums)[kRows][kTileVecs]) {
  hn::Vec<DotF16::D> lower[kTileVecs], upper[kTileVecs];
  HWY_UNROLL(8)
  for (size_t v = 0; v < kTileVecs; ++v) {
    DotF16::LoadHalves(line(v), lower[v], upper[v]);
    if constexpr (kTileVecs > kVecs) {
      // Too many halves for the registers, but few rows.
      AddHalf(words, stride, lower[v], v, sums);
      AddHalf(words + 1, stride, upper[v], v, sums);
    }
  }
  if constexpr (kTileVecs == kVecs) {
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVecs; ++v) {
      if constexpr (kRows * kTileVecs == kSumVecs) Spill(upper[v]);
    }
    HWY_UNROLL(16)
    for (size_t r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVecs; ++v) {
        sums[r][v] = DotF16::MulAdd(lower[v], words[r * stride], sums[r][v]);
      }
    }
    HWY_UNROLL(16)
    for (size_t r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVecs; ++v) {
        sums[r][v] =
            DotF16::MulAdd(upper[v], words[r * stride + 1], sums[r][v]);
      }
    }
  }
}

#else
using DotF16 = DotPairsF32<Float16>;
#endif

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
