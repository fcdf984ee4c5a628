// One chunk of keys and values against rows of queries: logits, softmax,
// weighted values. A template of the arithmetic: see line_arithmetic-inl.h.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_ATTEND_INL_H_
#undef QUERN_ATTENTION_KERNELS_ATTEND_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_ATTEND_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/attend_tiles-inl.h"
#include "quern/attention/kernels/chunk_softmax-inl.h"
#include "quern/attention/kernels/fetcher-inl.h"
#include "quern/attention/kernels/line_arithmetic-inl.h"
#include "quern/attention/kernels/paged_attention_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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

// Keys and values are multiplied as they lie in the chunk.
template <class A>
class AsStored {
 public:
  using Tiles = A;
  explicit AsStored(const ChunkArgs& c) : c_(c) {}
  const ChunkArgs& chunk() const { return c_; }
  // Four groups of keys stay in the L1 cache for all rows. What a single tile
  // of rows reads, it reads once.
  size_t key_groups() const { return IsOneTile(c_.rows) ? kChunkGroups : 4; }
  size_t value_dims() const {
    return IsOneTile(c_.rows) && c_.latent_tile == nullptr ? c_.v_head_dim
                                                           : kTileDims;
  }
  void TakeKeys(size_t) const {}
  void TakeValues(size_t d) const {
    if (c_.latent_tile != nullptr) StageLatentTile<A>(c_, d);
  }

 private:
  const ChunkArgs& c_;
};

// Keys and values become f32 once for all rows, to which widening is exact. A
// tile of rows then widens nothing, and its values lie together: in the chunk
// those of a few dims are v_head_dim words apart, which is a power of two as a
// rule, and share so few sets of the L1 cache that every tile misses it.
template <class A>
class Widened {
 public:
  using Tiles = FmaF32;
  static_assert(A::kWordElements == 2 && A::kSub == 2, "pairs to f32");

  static bool Serves(const ChunkArgs& c) {
    return c.rows >= kRows && c.latent_tile == nullptr && c.head_dim % 2 == 0 &&
           c.head_dim * kGroupTokens <= kKeys && c.v_head_dim % kVecLanes == 0;
  }

  explicit Widened(const ChunkArgs& c)
      : from_(c), groups_(GroupsOf(c.seen, c.rows)), c_(c) {
    c_.latent_tile = reinterpret_cast<uint8_t*>(values_);
  }
  const ChunkArgs& chunk() const { return c_; }
  size_t key_groups() const { return kKeys / (c_.head_dim * kGroupTokens); }
  size_t value_dims() const { return kTileDims; }

  // The key_groups() groups from g on.
  void TakeKeys(size_t g) {
    float* to = keys_;
    const size_t end = HWY_MIN(g + key_groups(), groups_.end);
    for (g = HWY_MAX(g, groups_.begin); g < end; ++g) {
      c_.k[g] = reinterpret_cast<const uint8_t*>(to);
      const uint8_t* HWY_RESTRICT from = from_.k[g];
      for (size_t step = 0; step < c_.head_dim / 2; ++step) {
        WidenLine<kLineVecs>(from, kGroupTokens, to);
        from += kGroupTokens * A::kWordBytes;
        to += 2 * kGroupTokens;
      }
    }
  }

  // The dims of the tile that begins at d.
  void TakeValues(size_t d) {
    const size_t dims = LatentDims(c_, d);
    for (size_t g = groups_.begin; g < groups_.end; ++g) {
      const uint8_t* HWY_RESTRICT from = from_.v[g] + d * A::kWordBytes;
      float* to = values_ + g * kGroupTokens * dims;
      for (size_t pair = 0; pair < kGroupTokens / 2; ++pair) {
        if (dims == kTileDims) {
          WidenLine<kTileVecs>(from, dims, to);
        } else {
          WidenLine<1>(from, dims, to);
        }
        from += c_.v_head_dim * A::kWordBytes;
        to += 2 * dims;
      }
    }
  }

 private:
  // Fewer rows are faster without (16 by 0.05. Zen 5, --isa=AVX2, 2026).
  static constexpr size_t kRows = 4 * kTileRows;
  // Half an L1 cache of 32 KB, in floats.
  static constexpr size_t kKeys = 4096;
  static constexpr size_t kValues = kChunkGroups * kGroupTokens * kTileDims;

  // Both halves of kVecs vectors of words, the second `pitch` floats on.
  template <size_t kVecs>
  static HWY_INLINE void WidenLine(const uint8_t* HWY_RESTRICT from,
                                   size_t pitch, float* HWY_RESTRICT to) {
    const LineF32 df;
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      const uint8_t* at = from + v * kVecLanes * A::kWordBytes;
      hn::StoreU(A::template LoadB<0>(at), df, to + v * kVecLanes);
      hn::StoreU(A::template LoadB<1>(at), df, to + pitch + v * kVecLanes);
    }
  }

  const ChunkArgs& from_;
  const TokenRange groups_;
  ChunkArgs c_;
  HWY_ALIGN float keys_[kKeys];
  HWY_ALIGN float values_[kValues];
};

// Calls of Fetcher::Step by the chunk, or somewhat fewer: a tile that sees some
// of the groups calls it in proportion.
template <class Source>
HWY_INLINE size_t FetchSteps(const Source& source) {
  using A = typename Source::Tiles;
  const ChunkArgs& c = source.chunk();
  constexpr size_t kSteps = StepsOfFetch<A>();
  constexpr size_t kLines = kGroupTokens / A::kWordElements / kSteps;
  const size_t k_steps =
      (c.head_dim + A::kWordElements - 1) / A::kWordElements / kSteps;
  size_t steps = 0;
  ForTiles(c.rows, [&](auto tag, size_t row) {
    constexpr size_t kRows = decltype(tag)::kValue;
    constexpr size_t kVecs = TileVecs<kRows>();
    size_t whole = kRows * kChunkGroups;
    const auto add = [&](size_t vecs, size_t times, size_t by) {
      ForVecs<kVecs>(0, vecs, [&](auto, size_t) { whole += times * by; });
    };
    const size_t groups = source.key_groups();
    add(groups * kLineVecs, kChunkGroups / groups, k_steps);
    const size_t dims =
        HWY_MAX(HWY_MIN(source.value_dims(), c.v_head_dim), size_t{1});
    add((dims + kVecLanes - 1) / kVecLanes, (c.v_head_dim + dims - 1) / dims,
        kChunkGroups * kLines);
    const TokenRange seen = GroupsOf(c.seen + row, kRows);
    steps += whole * (seen.end - seen.begin) / kChunkGroups;
  });
  return steps;
}

template <class Source>
void AttendFrom(Source& source) {
  using A = typename Source::Tiles;
  const ChunkArgs& c = source.chunk();
  Fetcher fetcher(c, FetchSteps(source));
  const size_t key_groups = source.key_groups();
  for (size_t g = 0; g < kChunkGroups; g += key_groups) {
    source.TakeKeys(g);
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      const size_t begin = HWY_MAX(g, groups.begin) * kLineVecs;
      const size_t end = HWY_MIN(g + key_groups, groups.end) * kLineVecs;
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
  const size_t value_dims = source.value_dims();
  for (size_t d = 0; d < c.v_head_dim; d += value_dims) {
    source.TakeValues(d);
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      PvDims<A, kRows>(c, fetcher, row, groups, d,
                       HWY_MIN(d + value_dims, c.v_head_dim));
    });
  }
}

template <class A>
void Attend(const ChunkArgs& c) {
  // With AVX-512 a tile's values fill whole lines, of which the L1 cache holds
  // more, and its keys in f32 would be all of that cache. With tiles of four
  // rows f32 is slower than pairs: they load twice the bytes.
  constexpr bool kWidens = kTileRows == 6 && HWY_TARGET > HWY_AVX3;
  if constexpr (kWidens && A::kSub == 2 && A::kWordBytes == 4) {
    if (Widened<A>::Serves(c)) {
      Widened<A> source(c);
      return AttendFrom(source);
    }
  }
  AsStored<A> source(c);
  AttendFrom(source);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
