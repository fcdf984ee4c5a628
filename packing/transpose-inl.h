// Transposes squares of 32-bit elements in registers. One element is what one
// lane of a dot-product instruction takes: a pair or quad of k of one column.
// Included by _simd.cc files, once per instruction set.

#include <cstddef>
#include <cstdint>

#if defined(QUERN_PACKING_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_PACKING_TRANSPOSE_INL_H_
#undef QUERN_PACKING_TRANSPOSE_INL_H_
#else
#define QUERN_PACKING_TRANSPOSE_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kCols = 16;  // columns of a panel
constexpr size_t kLine = 64;  // bytes of a line, and of a cache line
constexpr size_t kSquare = kCols * kLine;  // bytes of 16x16 elements

// 32-bit lanes, at most one line of them. Where the vector length is not known
// to the compiler, 128 bits serve.
#if HWY_HAVE_SCALABLE
using D32 = hn::FixedTag<uint32_t, 4>;
#else
using D32 = hn::CappedTag<uint32_t, kCols>;
#endif
using D8 = hn::Repartition<uint8_t, D32>;
using V32 = hn::Vec<D32>;
constexpr size_t kLanes = HWY_MAX_LANES_D(D32);

enum class Store { kCached, kStream };

template <Store kStore>
HWY_INLINE void Put(V32 v, uint8_t* HWY_RESTRICT to) {
  const D32 d;
  if constexpr (kStore == Store::kStream) {
    hn::Stream(v, d, reinterpret_cast<uint32_t*>(to));
  } else {
    hn::StoreU(hn::BitCast(D8(), v), D8(), to);
  }
}

HWY_INLINE V32 Get(const uint8_t* HWY_RESTRICT from) {
  return hn::BitCast(D32(), hn::LoadU(D8(), from));
}

// Transposes the 4x4 lanes in each 128-bit block of a, b, c, d.
HWY_INLINE void Transpose4x4(V32& a, V32& b, V32& c, V32& d) {
  const D32 d32;
  const hn::Repartition<uint64_t, D32> d64;
  const auto ab_lo = hn::BitCast(d64, hn::InterleaveLower(d32, a, b));
  const auto ab_hi = hn::BitCast(d64, hn::InterleaveUpper(d32, a, b));
  const auto cd_lo = hn::BitCast(d64, hn::InterleaveLower(d32, c, d));
  const auto cd_hi = hn::BitCast(d64, hn::InterleaveUpper(d32, c, d));
  a = hn::BitCast(d32, hn::InterleaveLower(d64, ab_lo, cd_lo));
  b = hn::BitCast(d32, hn::InterleaveUpper(d64, ab_lo, cd_lo));
  c = hn::BitCast(d32, hn::InterleaveLower(d64, ab_hi, cd_hi));
  d = hn::BitCast(d32, hn::InterleaveUpper(d64, ab_hi, cd_hi));
}

// Transposes a square of kLanes x kLanes lanes, in registers.
template <Store kStore>
HWY_INLINE void TransposeSquare(const uint8_t* HWY_RESTRICT from,
                                ptrdiff_t from_stride, uint8_t* HWY_RESTRICT to,
                                ptrdiff_t to_stride) {
  V32 v[kLanes];
  for (size_t r = 0; r < kLanes; ++r) {
    v[r] = Get(from + static_cast<ptrdiff_t>(r) * from_stride);
  }
  for (size_t r = 0; r < kLanes; r += 4) {
    Transpose4x4(v[r], v[r + 1], v[r + 2], v[r + 3]);
  }
  const auto put = [&](size_t row, V32 out) HWY_ATTR {
    Put<kStore>(out, to + static_cast<ptrdiff_t>(row) * to_stride);
  };
  // v[4 * g + t] now holds, in block b, columns 4 * g .. + 4 of line 4 * b + t:
  // what remains is to transpose the blocks.
  if constexpr (kLanes == 4) {
    for (size_t t = 0; t < 4; ++t) put(t, v[t]);
  } else if constexpr (kLanes == 8) {
    const D32 d;
    for (size_t t = 0; t < 4; ++t) {
      put(t, hn::ConcatLowerLower(d, v[4 + t], v[t]));
    }
    for (size_t t = 0; t < 4; ++t) {
      put(4 + t, hn::ConcatUpperUpper(d, v[4 + t], v[t]));
    }
  } else {
    static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16, "no such vector");
    const D32 d;
    for (size_t t = 0; t < 4; ++t) {
      V32& a = v[t];
      V32& b = v[4 + t];
      V32& c = v[8 + t];
      V32& e = v[12 + t];
      const V32 ab_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
      const V32 ab_odd = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
      const V32 ce_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(e), c);
      const V32 ce_odd = hn::OddEvenBlocks(e, hn::SwapAdjacentBlocks(c));
      a = hn::ConcatLowerLower(d, ce_even, ab_even);
      b = hn::ConcatLowerLower(d, ce_odd, ab_odd);
      c = hn::ConcatUpperUpper(d, ce_even, ab_even);
      e = hn::ConcatUpperUpper(d, ce_odd, ab_odd);
    }
    for (size_t r = 0; r < kLanes; ++r) put(r, v[r]);
  }
}

// to[i][j] = from[j][i] for 16x16 dwords. One dword is one pair or quad of k.
template <Store kStore>
HWY_INLINE void Transpose16x16(const uint8_t* HWY_RESTRICT from,
                               ptrdiff_t from_stride, uint8_t* HWY_RESTRICT to,
                               ptrdiff_t to_stride) {
  for (size_t i = 0; i < kCols; i += kLanes) {
    for (size_t j = 0; j < kCols; j += kLanes) {
      TransposeSquare<kStore>(
          from + static_cast<ptrdiff_t>(j) * from_stride + i * 4, from_stride,
          to + static_cast<ptrdiff_t>(i) * to_stride + j * 4, to_stride);
    }
  }
}

// The same for the end of a matrix: `rows` <= 16 rows of `bytes` <= kLine bytes
// at `from`, zero beyond, to 16 whole rows of a square in `to`.
HWY_INLINE void TransposePartial(const uint8_t* HWY_RESTRICT from,
                                 ptrdiff_t from_stride, size_t rows,
                                 size_t bytes, uint8_t* HWY_RESTRICT to,
                                 ptrdiff_t to_stride) {
  alignas(kLine) uint8_t square[kSquare];
  hwy::ZeroBytes<kSquare>(square);
  for (size_t r = 0; r < rows; ++r) {
    hwy::CopyBytes(from + static_cast<ptrdiff_t>(r) * from_stride,
                   square + r * kLine, bytes);
  }
  Transpose16x16<Store::kCached>(square, kLine, to, to_stride);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
