// One chunk of keys and values against rows of queries: logits, softmax,
// weighted values. A template of the arithmetic: see line_arithmetic-inl.h.

// Per-target include guard.
#if defined(QUERN_ATTENTION_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_ATTEND_INL_H_
#undef QUERN_ATTENTION_ATTEND_INL_H_
#else
#define QUERN_ATTENTION_ATTEND_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/chunk_softmax-inl.h"
#include "quern/attention/fetcher-inl.h"
#include "quern/attention/line_arithmetic-inl.h"
#include "quern/attention/paged_attention_kernels.h"
#include "quern/gemm/register_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A tile of sums in registers: rows x vectors. With AVX-512 24 of 32 registers
// leave room for the lines and a word; before it 8 of 16.
constexpr size_t kTileRows = HWY_TARGET <= HWY_AVX3 ? 6 : 4;
constexpr size_t kTileVecs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

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

// logits[row + r][vec * kVecLanes ...] for kRows rows and kVecs vectors.
template <class A, size_t kRows, size_t kVecs>
void QkTile(const ChunkArgs& c, Fetcher& fetcher, size_t row, size_t vec) {
  const LineF32 df;
  constexpr size_t kVecBytes = kVecLanes * A::kWordBytes;
  constexpr size_t kLineBytes = kLineVecs * kVecBytes;
  const size_t steps = (c.head_dim + A::kWordElements - 1) / A::kWordElements;
  const uint32_t* HWY_RESTRICT q = c.q + row * c.q_stride;
  Lines<kVecs> lines;
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    lines.at[v] =
        c.k[(vec + v) / kLineVecs] + (vec + v) % kLineVecs * kVecBytes;
  }
  VF32 sums[kRows][kVecs];
  ClearSums<LineF32>(sums);
  for (size_t s = 0; s < steps; ++s) {
    fetcher.Step();
    lines.offset = s * kLineBytes;
    Step<A, /*kTail=*/false>(q + s * A::kSub, c.q_stride, lines, 0, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to = c.logits + (row + r) * kRowWords + vec * kVecLanes;
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(sums[r][v], df, to + v * kVecLanes);
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
    for (size_t t = 0; t < kLines; ++t) {
      fetcher.Step();
      lines.offset = t * pitch;
      Step<A, kTail>(words + t * A::kSub, kRowWords, lines, valid, sums);
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

template <class A, size_t kRows>
HWY_INLINE void QkRows(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       size_t vec, size_t end) {
  while (vec + kTileVecs <= end) {
    QkTile<A, kRows, kTileVecs>(c, fetcher, row, vec);
    vec += kTileVecs;
  }
  if (kTileVecs > 2 && vec + 2 <= end) {
    QkTile<A, kRows, 2>(c, fetcher, row, vec);
    vec += 2;
  }
  if (vec < end) QkTile<A, kRows, 1>(c, fetcher, row, vec);
}

// The dims [d, d + kTileDims), or as many of them as there are.
template <class A, size_t kRows>
HWY_INLINE void PvDims(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       TokenRange groups, size_t d) {
  const size_t end = HWY_MIN(d + kTileDims, c.v_head_dim);
  if (d + kTileDims <= end) {
    PvTile<A, kRows, kTileVecs, false>(c, fetcher, row, d, groups.begin,
                                       groups.end, 0);
    return;
  }
  if (kTileVecs > 2 && d + 2 * kVecLanes <= end) {
    PvTile<A, kRows, 2, false>(c, fetcher, row, d, groups.begin, groups.end, 0);
    d += 2 * kVecLanes;
  }
  if (d + kVecLanes <= end) {
    PvTile<A, kRows, 1, false>(c, fetcher, row, d, groups.begin, groups.end, 0);
    d += kVecLanes;
  }
  if (d < end) {
    PvTile<A, kRows, 1, true>(c, fetcher, row, d, groups.begin, groups.end,
                              end - d);
  }
}

// Words of 16 tokens by dims to words of dims by tokens, in blocks of 128 bits
// on every target: with 512 it takes as many instructions, for the blocks have
// to change places.
template <size_t kPairs>
void StageLatentV(const uint8_t* k, size_t v_head_dim, uint8_t* to) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::Repartition<uint64_t, decltype(d)> dq;
  const auto load = [&](size_t step, size_t token) HWY_ATTR {
    return hn::LoadU(
        d, reinterpret_cast<const uint32_t*>(k) + step * kGroupTokens + token);
  };
  const auto store = [&](hn::Vec<decltype(dq)> v, size_t row,
                         size_t dim) HWY_ATTR {
    hn::StoreU(hn::BitCast(d, v), d,
               reinterpret_cast<uint32_t*>(to) + row * v_head_dim + dim);
  };
  if constexpr (kPairs == 1) {
    for (size_t dim = 0; dim < v_head_dim; dim += 4) {
      for (size_t t = 0; t < kGroupTokens; t += 4) {
        const auto v0 = load(dim, t), v1 = load(dim + 1, t);
        const auto v2 = load(dim + 2, t), v3 = load(dim + 3, t);
        const auto lower01 = hn::BitCast(dq, hn::InterleaveLower(d, v0, v1));
        const auto upper01 = hn::BitCast(dq, hn::InterleaveUpper(d, v0, v1));
        const auto lower23 = hn::BitCast(dq, hn::InterleaveLower(d, v2, v3));
        const auto upper23 = hn::BitCast(dq, hn::InterleaveUpper(d, v2, v3));
        store(hn::InterleaveLower(dq, lower01, lower23), t, dim);
        store(hn::InterleaveUpper(dq, lower01, lower23), t + 1, dim);
        store(hn::InterleaveLower(dq, upper01, upper23), t + 2, dim);
        store(hn::InterleaveUpper(dq, upper01, upper23), t + 3, dim);
      }
    }
  } else {
    // Two tokens by two dims: (t d)(t d+1) (t+1 d)(t+1 d+1) becomes
    // (t d)(t+1 d) (t d+1)(t+1 d+1).
    const hn::Repartition<uint8_t, decltype(d)> d8;
    const auto order = hn::Dup128VecFromValues(d8, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9,
                                               12, 13, 10, 11, 14, 15);
    const auto turn = [&](size_t step, size_t token) HWY_ATTR {
      const auto words = hn::BitCast(d8, load(step, token));
      return hn::BitCast(dq, hn::TableLookupBytes(words, order));
    };
    for (size_t dim = 0; dim < v_head_dim; dim += 4) {
      for (size_t t = 0; t < kGroupTokens; t += 4) {
        const auto a = turn(dim / 2, t), b = turn(dim / 2 + 1, t);
        store(hn::InterleaveLower(dq, a, b), t / 2, dim);
        store(hn::InterleaveUpper(dq, a, b), t / 2 + 1, dim);
      }
    }
  }
}

// latent_tile of the dims from d on: of all dims at once, a chunk of values
// would not fit into the L2 cache beside its keys and those of the next.
template <class A>
void StageLatentTile(const ChunkArgs& c, size_t d) {
  if constexpr (A::kWordBytes == 4) {
    const TokenRange groups = GroupsOf(c.seen, c.rows);
    const size_t dims = LatentDims(c, d);
    for (size_t g = groups.begin; g < groups.end; ++g) {
      StageLatentV<A::kWordElements>(
          c.k[g] + d / A::kWordElements * kGroupTokens * 4, dims,
          c.latent_tile + g * kGroupTokens / A::kWordElements * dims * 4);
    }
  }
}

template <class A>
void Attend(const ChunkArgs& c) {
  constexpr size_t kLines = kGroupTokens / A::kWordElements;
  // Four groups of keys stay in the L1 cache for all rows.
  constexpr size_t kGroups = 4;
  const size_t k_steps = (c.head_dim + A::kWordElements - 1) / A::kWordElements;
  const size_t d_tiles = (c.v_head_dim + kTileDims - 1) / kTileDims;
  size_t tiles = 0;
  ForTiles(c.rows, [&](auto, size_t) { ++tiles; });
  const size_t vecs = kChunkGroups * kLineVecs;
  Fetcher fetcher(c, tiles * (vecs / kTileVecs * k_steps +
                              d_tiles * kChunkGroups * kLines) +
                         c.rows * vecs);
  for (size_t g = 0; g < kChunkGroups; g += kGroups) {
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      const size_t begin = HWY_MAX(g, groups.begin) * kLineVecs;
      const size_t end = HWY_MIN(g + kGroups, groups.end) * kLineVecs;
      QkRows<A, kRows>(c, fetcher, row, begin, end);
    });
  }
  ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
    constexpr size_t kRows = decltype(tag)::kValue;
    const TokenRange groups = GroupsOf(c.seen + row, kRows);
    for (size_t r = row; r < row + kRows; ++r) MaxOfRow(c, r, groups);
  });
  ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
    constexpr size_t kRows = decltype(tag)::kValue;
    const TokenRange groups = GroupsOf(c.seen + row, kRows);
    for (size_t r = row; r < row + kRows; ++r)
      ExpOfRow<A>(c, fetcher, r, groups);
  });
  UpdateStates(c);
  for (size_t d = 0; d < c.v_head_dim; d += kTileDims) {
    if (c.latent_tile != nullptr) StageLatentTile<A>(c, d);
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      PvDims<A, kRows>(c, fetcher, row, groups, d);
    });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
