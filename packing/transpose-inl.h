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
#include "quern/core/stores.h"

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

template <Stores kStores>
HWY_INLINE void Put(V32 v, uint8_t* HWY_RESTRICT to) {
  const D32 d;
  if constexpr (kStores == Stores::kStream) {
    hn::Stream(v, d, reinterpret_cast<uint32_t*>(to));
  } else {
    hn::StoreU(hn::BitCast(D8(), v), D8(), to);
  }
}

HWY_INLINE V32 Get(const uint8_t* HWY_RESTRICT from) {
  return hn::BitCast(D32(), hn::LoadU(D8(), from));
}

// Four vectors by name: in an array they would live on the stack wherever the
// compiler does not unroll (gcc 12 -O2: 2.5 times slower in L1; Zen 4, 2026).
struct Quad {
  V32 l0, l1, l2, l3;
};

// Transposes the 4x4 lanes in each 128-bit block of four rows.
HWY_INLINE Quad TransposeLanes(V32 a, V32 b, V32 c, V32 d) {
  const D32 d32;
  const hn::Repartition<uint64_t, D32> d64;
  const auto ab_lo = hn::BitCast(d64, hn::InterleaveLower(d32, a, b));
  const auto ab_hi = hn::BitCast(d64, hn::InterleaveUpper(d32, a, b));
  const auto cd_lo = hn::BitCast(d64, hn::InterleaveLower(d32, c, d));
  const auto cd_hi = hn::BitCast(d64, hn::InterleaveUpper(d32, c, d));
  return {hn::BitCast(d32, hn::InterleaveLower(d64, ab_lo, cd_lo)),
          hn::BitCast(d32, hn::InterleaveUpper(d64, ab_lo, cd_lo)),
          hn::BitCast(d32, hn::InterleaveLower(d64, ab_hi, cd_hi)),
          hn::BitCast(d32, hn::InterleaveUpper(d64, ab_hi, cd_hi))};
}

HWY_INLINE Quad LoadTransposed(const uint8_t* HWY_RESTRICT from,
                               ptrdiff_t stride) {
  return TransposeLanes(Get(from), Get(from + stride), Get(from + 2 * stride),
                        Get(from + 3 * stride));
}

// What remains then is to transpose blocks: block b of the quads' l{t} belongs
// to row 4 * b + t of the result.
#if !HWY_HAVE_SCALABLE && HWY_MAX_BYTES >= 64
template <Stores kStores>
HWY_INLINE void PutBlocks(V32 a, V32 b, V32 c, V32 e, uint8_t* HWY_RESTRICT to,
                          ptrdiff_t stride) {
  const D32 d;
  const V32 ab_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
  const V32 ab_odd = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
  const V32 ce_even = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(e), c);
  const V32 ce_odd = hn::OddEvenBlocks(e, hn::SwapAdjacentBlocks(c));
  Put<kStores>(hn::ConcatLowerLower(d, ce_even, ab_even), to);
  Put<kStores>(hn::ConcatLowerLower(d, ce_odd, ab_odd), to + 4 * stride);
  Put<kStores>(hn::ConcatUpperUpper(d, ce_even, ab_even), to + 8 * stride);
  Put<kStores>(hn::ConcatUpperUpper(d, ce_odd, ab_odd), to + 12 * stride);
}
#elif !HWY_HAVE_SCALABLE && HWY_MAX_BYTES == 32
template <Stores kStores>
HWY_INLINE void PutBlocks(V32 a, V32 b, uint8_t* HWY_RESTRICT to,
                          ptrdiff_t stride) {
  const D32 d;
  Put<kStores>(hn::ConcatLowerLower(d, b, a), to);
  Put<kStores>(hn::ConcatUpperUpper(d, b, a), to + 4 * stride);
}
#endif

// Transposes a square of kLanes x kLanes lanes, in registers.
template <Stores kStores>
HWY_INLINE void TransposeSquare(const uint8_t* HWY_RESTRICT from,
                                ptrdiff_t from_stride, uint8_t* HWY_RESTRICT to,
                                ptrdiff_t to_stride) {
  const Quad a = LoadTransposed(from, from_stride);
#if !HWY_HAVE_SCALABLE && HWY_MAX_BYTES >= 64
  const Quad b = LoadTransposed(from + 4 * from_stride, from_stride);
  const Quad c = LoadTransposed(from + 8 * from_stride, from_stride);
  const Quad d = LoadTransposed(from + 12 * from_stride, from_stride);
  PutBlocks<kStores>(a.l0, b.l0, c.l0, d.l0, to, to_stride);
  PutBlocks<kStores>(a.l1, b.l1, c.l1, d.l1, to + to_stride, to_stride);
  PutBlocks<kStores>(a.l2, b.l2, c.l2, d.l2, to + 2 * to_stride, to_stride);
  PutBlocks<kStores>(a.l3, b.l3, c.l3, d.l3, to + 3 * to_stride, to_stride);
#elif !HWY_HAVE_SCALABLE && HWY_MAX_BYTES == 32
  const Quad b = LoadTransposed(from + 4 * from_stride, from_stride);
  PutBlocks<kStores>(a.l0, b.l0, to, to_stride);
  PutBlocks<kStores>(a.l1, b.l1, to + to_stride, to_stride);
  PutBlocks<kStores>(a.l2, b.l2, to + 2 * to_stride, to_stride);
  PutBlocks<kStores>(a.l3, b.l3, to + 3 * to_stride, to_stride);
#else
  Put<kStores>(a.l0, to);
  Put<kStores>(a.l1, to + to_stride);
  Put<kStores>(a.l2, to + 2 * to_stride);
  Put<kStores>(a.l3, to + 3 * to_stride);
#endif
}

// 16 bytes of every fourth row from rows[0] on, one row to a 128-bit block.
HWY_INLINE V32 LoadRows(const uint8_t* const* HWY_RESTRICT rows, size_t at) {
#if HWY_HAVE_SCALABLE || HWY_MAX_BYTES == 16
  return Get(rows[0] + at);
#else
  const hn::Half<D8> half;
#if HWY_MAX_BYTES == 32
  return hn::BitCast(D32(), hn::Combine(D8(), hn::LoadU(half, rows[4] + at),
                                        hn::LoadU(half, rows[0] + at)));
#else
  const hn::Half<decltype(half)> quarter;
  const auto lower = hn::Combine(half, hn::LoadU(quarter, rows[4] + at),
                                 hn::LoadU(quarter, rows[0] + at));
  const auto upper = hn::Combine(half, hn::LoadU(quarter, rows[12] + at),
                                 hn::LoadU(quarter, rows[8] + at));
  return hn::BitCast(D32(), hn::Combine(D8(), upper, lower));
#endif
#endif
}

// Transposes a strip, the 16 bytes from `at` on of each row: l{t} has dword t
// of kLanes rows.
HWY_INLINE Quad LoadStrip(const uint8_t* const* HWY_RESTRICT rows, size_t at) {
  return TransposeLanes(LoadRows(rows, at), LoadRows(rows + 1, at),
                        LoadRows(rows + 2, at), LoadRows(rows + 3, at));
}

// to[i][j] = from[j][i] for 16x16 dwords. One dword is one pair or quad of k.
template <Stores kStores>
HWY_INLINE void Transpose16x16(const uint8_t* HWY_RESTRICT from,
                               ptrdiff_t from_stride, uint8_t* HWY_RESTRICT to,
                               ptrdiff_t to_stride) {
  for (size_t i = 0; i < kCols; i += kLanes) {
    for (size_t j = 0; j < kCols; j += kLanes) {
      TransposeSquare<kStores>(
          from + static_cast<ptrdiff_t>(j) * from_stride + i * 4, from_stride,
          to + static_cast<ptrdiff_t>(i) * to_stride + j * 4, to_stride);
    }
  }
}

// Transposes the end of a matrix: `rows` <= 16 rows of `bytes` <= kLine bytes
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
  Transpose16x16<Stores::kCached>(square, kLine, to, to_stride);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
