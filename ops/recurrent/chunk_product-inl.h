// Per-target include: products of the small matrices of a chunk of tokens.

// clang-format off
#if defined(QUERN_OPS_RECURRENT_CHUNK_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_OPS_RECURRENT_CHUNK_PRODUCT_INL_H_
#undef QUERN_OPS_RECURRENT_CHUNK_PRODUCT_INL_H_
#else
#define QUERN_OPS_RECURRENT_CHUNK_PRODUCT_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/registers-inl.h"
#include "quern/core/stores.h"
#include "quern/ops/recurrent/chunk_kernels.h"
#include "quern/packing/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// At most a cache line.
#if HWY_HAVE_SCALABLE
using ChunkTag = hn::FixedTag<float, 4>;
#else
using ChunkTag = hn::CappedTag<float, 16>;
#endif

// What a tile computes before it is stored.
enum class ChunkTile { kProduct, kSolve, kLower };

// Rows and vectors of a tile, whose sums stay in registers: 16 of 32 vectors,
// or 12 of 16. Small ones under sanitizers, which check every load.
constexpr size_t kTileVecs = 2;
#if HWY_IS_ASAN || HWY_IS_TSAN || HWY_IS_MSAN
constexpr size_t kTileRows = 4;
#else
constexpr size_t kTileRows = kManyRegisters ? 8 : 6;
#endif

// sums[r][v] += sum over k of a[r * a_row + k * a_k] b[k, v]
template <size_t kRows, size_t kVecs>
HWY_INLINE void AddProducts(const float* a, size_t a_row, size_t a_k,
                            const float* b, size_t b_stride, size_t depth,
                            hn::Vec<ChunkTag> (&sums)[kRows][kVecs]) {
  const ChunkTag d;
  for (size_t k = 0; k < depth; ++k) {
    hn::Vec<ChunkTag> line[kVecs];
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      line[v] = hn::Load(d, b + v * hn::Lanes(d));
    }
    HWY_UNROLL(8)
    for (size_t r = 0; r < kRows; ++r) {
      const auto word = hn::Set(d, a[r * a_row]);
      HWY_UNROLL(4)
      for (size_t v = 0; v < kVecs; ++v) {
        sums[r][v] = hn::MulAdd(word, line[v], sums[r][v]);
      }
    }
    a += a_k;
    b += b_stride;
  }
}

// The square on the diagonal. No row meets a later one, whose NaN it would
// otherwise take over from a product with zero.
template <ChunkTile kTile, size_t kRows, size_t kVecs>
HWY_INLINE void AddTriangle(const float* a, size_t a_stride, const float* b,
                            size_t b_stride,
                            hn::Vec<ChunkTag> (&sums)[kRows][kVecs]) {
  const ChunkTag d;
  HWY_UNROLL(8)
  for (size_t j = 0; j < kRows; ++j) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      const auto line = kTile == ChunkTile::kSolve
                            ? sums[j][v]
                            : hn::Load(d, b + j * b_stride + v * hn::Lanes(d));
      HWY_UNROLL(8)
      for (size_t r = 0; r < kRows; ++r) {
        if (r < j || (kTile == ChunkTile::kSolve && r == j)) continue;
        sums[r][v] =
            hn::MulAdd(hn::Set(d, a[r * a_stride + j]), line, sums[r][v]);
      }
    }
  }
}

// Rows i to i + kRows - 1 of p, and the vectors from column n on. The depth of
// a triangle is the number of rows above the tile.
template <ChunkTile kTile, size_t kRows, size_t kVecs>
HWY_INLINE void DoTile(const ChunkProduct& p, size_t i, size_t n) {
  const ChunkTag d;
  hn::Vec<ChunkTag> sums[kRows][kVecs];
  float* const c = p.c + i * p.c_stride + n;
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      float* const at = c + r * p.c_stride + v * hn::Lanes(d);
      if (kTile != ChunkTile::kProduct) {
        sums[r][v] = hn::Load(d, at);
      } else if (p.scale != nullptr) {
        sums[r][v] = hn::Mul(hn::Set(d, p.scale[i + r]), hn::Load(d, at));
      } else {
        sums[r][v] = hn::Zero(d);
      }
    }
  }
  const float* const a = p.a + i * p.a_row;
  AddProducts(a, p.a_row, p.a_k, p.b + n, p.b_stride,
              kTile == ChunkTile::kProduct ? p.depth : i, sums);
  if constexpr (kTile != ChunkTile::kProduct) {
    AddTriangle<kTile>(a + i, p.a_row, p.b + i * p.b_stride + n, p.b_stride,
                       sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::Store(sums[r][v], d, c + r * p.c_stride + v * hn::Lanes(d));
    }
  }
}

template <ChunkTile kTile, size_t kVecs>
HWY_NOINLINE void DoRows(const ChunkProduct& p, size_t n) {
  size_t i = 0;
  for (; i + kTileRows <= p.rows; i += kTileRows) {
    DoTile<kTile, kTileRows, kVecs>(p, i, n);
  }
  if (kTileRows > 4 && i + 4 <= p.rows) {
    DoTile<kTile, 4, kVecs>(p, i, n);
    i += 4;
  }
  if (i + 2 <= p.rows) {
    DoTile<kTile, 2, kVecs>(p, i, n);
    i += 2;
  }
  if (i < p.rows) DoTile<kTile, 1, kVecs>(p, i, n);
}

// A block of columns of b stays in L1 for all rows.
template <ChunkTile kTile>
HWY_INLINE void DoColumns(const ChunkProduct& p) {
  const size_t lanes = hn::Lanes(ChunkTag());
  size_t n = 0;
  for (; n + lanes < p.columns; n += kTileVecs * lanes) {
    DoRows<kTile, kTileVecs>(p, n);
  }
  if (n < p.columns) DoRows<kTile, 1>(p, n);
}

// t[j, i] = x[i, j], for rows and columns rounded up to kChunkLine.
HWY_INLINE void TransposeChunk(const float* x, size_t x_stride, size_t rows,
                               size_t columns, float* t, size_t t_stride) {
  const auto line = static_cast<size_t>(kChunkLine);
  for (size_t i = 0; i < rows; i += line) {
    for (size_t j = 0; j < columns; j += line) {
      Transpose16x16<Stores::kCached>(
          reinterpret_cast<const uint8_t*>(x + i * x_stride + j),
          static_cast<ptrdiff_t>(x_stride * sizeof(float)),
          reinterpret_cast<uint8_t*>(t + j * t_stride + i),
          static_cast<ptrdiff_t>(t_stride * sizeof(float)));
    }
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
