// Tiles of logits and of outputs: a few rows of queries by a few vectors of
// tokens or dims. Templates of the arithmetic: see line_arithmetic-inl.h.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_ATTEND_TILES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_ATTEND_TILES_INL_H_
#undef QUERN_ATTENTION_KERNELS_ATTEND_TILES_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_ATTEND_TILES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/fetcher-inl.h"
#include "quern/attention/kernels/line_arithmetic-inl.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/registers-inl.h"
#include "quern/gemm/kernels/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A tile of sums in registers: rows x vectors. With AVX-512 24 of 32 registers
// leave room for the lines and a word; with AVX2 12 of 16, because 8 sums only
// just hide the latency of two multiply-adds a cycle; before it 8 of 16.
constexpr size_t kTileRows = HWY_TARGET <= HWY_AVX2 ? 6 : 4;
constexpr size_t kTileVecs = kManyRegisters ? 4 : 2;

// AVX2: sums fill most registers.
constexpr bool kFewRegisters = kTileRows == 6 && kTileVecs == 2;

// Vectors of a tile of kRows rows. With AVX2, tiles of fewer rows have more
// vectors, so that they have 12 sums or nearly as many.
template <size_t kRows>
constexpr size_t TileVecs() {
  return !kFewRegisters ? kTileVecs
         : kRows == 4   ? 3
         : kRows <= 2   ? 4
                        : kTileVecs;
}

// Steps of a tile between two looks for lines to fetch, which take as many
// instructions as a few multiply-adds.
template <class A>
constexpr size_t StepsOfFetch() {
  return (kFewRegisters ? 8 : 2) / A::kSub;
}

// Where the vectors of one line are read from. It holds the pointers: with a
// reference to them GCC 12 keeps the fetcher in memory, and a prefill of 512
// takes 1.15 times as long (AVX2, Zen 3, 2026).
template <size_t kVecs>
struct Lines {
  HWY_INLINE const uint8_t* operator()(size_t v) const {
    return at[v] + offset;
  }
  const uint8_t* HWY_RESTRICT at[kVecs];
  size_t offset = 0;
};

// A step. With AVX2 its halves stay apart: else GCC 12 loads the lines of
// several halves first, and then lacks registers for the sums.
template <class A, bool kTail, class Line, size_t kRows, size_t kVecs>
HWY_INLINE void TileStep(const uint32_t* HWY_RESTRICT words, size_t stride,
                         const Line& line, size_t valid,
                         VF32 (&sums)[kRows][kVecs]) {
  HalfStep<A, 0, kTail>(words, stride, line, valid, sums);
  if constexpr (kFewRegisters) HWY_FENCE;
  if constexpr (A::kSub == 2) {
    HalfStep<A, 1, kTail>(words + 1, stride, line, valid, sums);
    if constexpr (kFewRegisters) HWY_FENCE;
  }
}

// logits[row + r][vec * kVecLanes ...] for kRows rows and kVecs vectors.
template <class A, size_t kRows, size_t kVecs>
void QkTile(const ChunkArgs& c, Fetcher& fetcher, size_t row, size_t vec) {
  const LineF32 df;
  constexpr size_t kVecBytes = kVecLanes * A::kWordBytes;
  constexpr size_t kLineBytes = kLineVecs * kVecBytes;
  const size_t steps = (c.head_dim + A::kWordElements - 1) / A::kWordElements;
  constexpr size_t kSteps = StepsOfFetch<A>();
  const uint32_t* HWY_RESTRICT q = c.q + row * c.q_stride;
  Lines<kVecs> lines;
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    lines.at[v] =
        c.k[(vec + v) / kLineVecs] + (vec + v) % kLineVecs * kVecBytes;
  }
  VF32 sums[kRows][kVecs];
  ClearSums<LineF32>(sums);
  size_t s = 0;
  for (; s + kSteps <= steps; s += kSteps) {
    fetcher.Step();
    HWY_UNROLL(8)
    for (size_t i = 0; i < kSteps; ++i) {
      lines.offset = (s + i) * kLineBytes;
      TileStep<A, /*kTail=*/false>(q + (s + i) * A::kSub, c.q_stride, lines, 0,
                                   sums);
    }
  }
  for (; s < steps; ++s) {
    lines.offset = s * kLineBytes;
    TileStep<A, /*kTail=*/false>(q + s * A::kSub, c.q_stride, lines, 0, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to = c.logits + (row + r) * kRowWords + vec * kVecLanes;
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(A::Logit(sums[r][v]), df, to + v * kVecLanes);
    }
  }
}

// Dims of a tile of sums.
constexpr size_t kTileDims = kTileVecs * kVecLanes;
// Dims of the tile that holds dim d: all, or what is left in the last tile.
HWY_INLINE size_t LatentDims(const ChunkArgs& c, size_t d) {
  return HWY_MIN(kTileDims, c.v_head_dim - d / kTileDims * kTileDims);
}

// out[row + r][d ...] for kRows rows and kVecs vectors of dims, from groups
// [begin, end). kTail: `valid` of the dims of the only vector are there.
template <class A, size_t kRows, size_t kVecs, bool kTail>
void PvTile(const ChunkArgs& c, Fetcher& fetcher, size_t row, size_t d,
            size_t begin, size_t end, size_t valid) {
  const bool latent = c.latent_tile != nullptr;
  const LineF32 df;
  constexpr size_t kVecBytes = kVecLanes * A::kWordBytes;
  constexpr size_t kLines = kGroupTokens / A::kWordElements;
  constexpr size_t kSteps = StepsOfFetch<A>();
  const size_t pitch =
      (latent ? LatentDims(c, d) : c.v_head_dim) * A::kWordBytes;
  const auto* HWY_RESTRICT p =
      reinterpret_cast<const uint32_t*>(c.logits) + row * kRowWords;
  VF32 sums[kRows][kVecs];
  ClearSums<LineF32>(sums);
  for (size_t g = begin; g < end; ++g) {
    Lines<kVecs> lines;
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      lines.at[v] = (latent ? c.latent_tile + g * kLines * pitch +
                                  d % kTileDims * A::kWordBytes
                            : c.v[g] + d * A::kWordBytes) +
                    v * kVecBytes;
    }
    const uint32_t* HWY_RESTRICT words = p + g * kLines * A::kSub;
    for (size_t t = 0; t < kLines; t += kSteps) {
      fetcher.Step();
      HWY_UNROLL(8)
      for (size_t i = 0; i < kSteps; ++i) {
        lines.offset = (t + i) * pitch;
        TileStep<A, kTail>(words + (t + i) * A::kSub, kRowWords, lines, valid,
                           sums);
      }
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to = c.out + (row + r) * c.out_stride + d;
    const VF32 ours = hn::Set(df, c.weights[2 * (row + r) + 1]);
    const VF32 old = hn::Set(df, c.weights[2 * (row + r)]);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      float* HWY_RESTRICT at = to + v * kVecLanes;
      const VF32 sum = hn::Mul(ours, sums[r][v]);
      hn::StoreU(c.first ? sum : hn::MulAdd(old, hn::LoadU(df, at), sum), df,
                 at);
    }
  }
}

template <size_t kRows>
struct RowsTag {
  static constexpr size_t kValue = kRows;
};

// tile(RowsTag<count>(), row) for all rows, in tiles of the largest sizes.
template <class F>
HWY_INLINE void ForTiles(size_t rows, const F& tile) {
  size_t row = 0;
  // Eight rows are 4 + 4 rather than 6 + 2.
  for (; row + kTileRows <= rows && (kTileRows == 4 || row + 8 != rows);
       row += kTileRows) {
    tile(RowsTag<kTileRows>(), row);
  }
  for (; kTileRows > 4 && row + 4 <= rows; row += 4) tile(RowsTag<4>(), row);
  if (row + 2 <= rows) {
    tile(RowsTag<2>(), row);
    row += 2;
  }
  if (row < rows) tile(RowsTag<1>(), row);
}

// Whether `rows` rows are one tile.
HWY_INLINE bool IsOneTile(size_t rows) {
  return rows == kTileRows || rows == 4 || rows == 2 || rows == 1;
}

// The groups that any of `rows` rows sees, [begin, end); begin == end: none.
HWY_INLINE TokenRange GroupsOf(const TokenRange* seen, size_t rows) {
  TokenRange all = {kChunkGroups, 0};
  for (size_t r = 0; r < rows; ++r) {
    if (seen[r].begin >= seen[r].end) continue;
    const uint32_t begin = seen[r].begin / kGroupTokens;
    const uint32_t end = (seen[r].end + kGroupTokens - 1) / kGroupTokens;
    all.begin = HWY_MIN(all.begin, begin);
    all.end = HWY_MAX(all.end, end);
  }
  if (all.begin > all.end) all.begin = all.end;
  return all;
}

template <size_t kVecs>
struct VecsTag {
  static constexpr size_t kValue = kVecs;
};

// tile(VecsTag<count>(), vec) for the vectors [vec, end), in tiles of kVecs or
// fewer.
template <size_t kVecs, class F>
HWY_INLINE void ForVecs(size_t vec, size_t end, const F& tile) {
  // Four vectors are 2 + 2 rather than 3 + 1.
  for (; vec + kVecs <= end && (kVecs != 3 || vec + 4 != end); vec += kVecs) {
    tile(VecsTag<kVecs>(), vec);
  }
  for (; kVecs > 2 && vec + 2 <= end; vec += 2) tile(VecsTag<2>(), vec);
  if (vec < end) tile(VecsTag<1>(), vec);
}

template <class A, size_t kRows>
HWY_INLINE void QkRows(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       size_t vec, size_t end) {
  ForVecs<TileVecs<kRows>()>(vec, end, [&](auto tag, size_t v) HWY_ATTR {
    QkTile<A, kRows, decltype(tag)::kValue>(c, fetcher, row, v);
  });
}

// The dims [begin, end).
template <class A, size_t kRows>
HWY_INLINE void PvDims(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       TokenRange groups, size_t begin, size_t end) {
  const size_t vecs = (end - begin) / kVecLanes;
  ForVecs<TileVecs<kRows>()>(0, vecs, [&](auto tag, size_t v) HWY_ATTR {
    PvTile<A, kRows, decltype(tag)::kValue, false>(
        c, fetcher, row, begin + v * kVecLanes, groups.begin, groups.end, 0);
  });
  begin += vecs * kVecLanes;
  if (begin < end) {
    PvTile<A, kRows, 1, true>(c, fetcher, row, begin, groups.begin, groups.end,
                              end - begin);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
