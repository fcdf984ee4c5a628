#include "quern/core/sets/avx3.h"
#include "quern/ops/recurrent/chunk_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent/chunk_channels_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/ops/recurrent/chunk_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = ChunkTag;
using VF = hn::Vec<DF>;

constexpr auto kBlock = static_cast<size_t>(kChannelBlock);

// A sub-block of a chunk: the tokens [begin, end).
struct Block {
  const ChannelChunk& c;
  size_t begin, end;
  // Row i: the product of a[begin] to a[begin + i], and k and q times it.
  float* HWY_RESTRICT left;
  float* keys;
  float* queries;
};

void LeftFactors(const Block& b) {
  const DF d;
  const ChannelChunk& c = b.c;
  for (size_t x = 0; x < c.dk; x += hn::Lanes(d)) {
    auto product = hn::Set(d, 1.0f);
    for (size_t i = b.begin; i < b.end; ++i) {
      const size_t from = i * c.stride + x, to = (i - b.begin) * c.stride + x;
      product = hn::Mul(product, hn::Load(d, c.a + from));
      hn::Store(product, d, b.left + to);
      hn::Store(hn::Mul(product, hn::Load(d, c.k + from)), d, b.keys + to);
      hn::Store(hn::Mul(product, hn::Load(d, c.q + from)), d, b.queries + to);
    }
  }
}

// Scores of the block's tokens with all tokens before it, whose keys have
// decayed up to the token before the block.
void EarlierScores(const Block& b) {
  const ChannelChunk& c = b.c;
  if (b.begin == 0) return;
  TransposeChunk(c.k, c.stride, b.begin, c.dk, c.transposed,
                 c.transposed_stride);
  ChunkProduct p = {};
  p.a = b.keys;
  p.a_row = c.stride;
  p.a_k = 1;
  p.b = c.transposed;
  p.b_stride = c.transposed_stride;
  p.c = c.key_scores + b.begin * c.score_stride;
  p.c_stride = c.score_stride;
  p.rows = b.end - b.begin;
  p.depth = c.dk;
  p.columns = b.begin;
  DoColumns<ChunkTile::kProduct>(p);
  p.a = b.queries;
  p.c = c.query_scores + b.begin * c.score_stride;
  DoColumns<ChunkTile::kProduct>(p);
}

// Scores of token i with the keys of the kKeys tokens from j on, which have
// decayed up to token i - 1 and decay by a[i].
template <size_t kKeys>
HWY_INLINE void PairScores(const ChannelChunk& c, size_t i, size_t j) {
  const DF d;
  VF keys[kKeys], queries[kKeys];
  HWY_UNROLL(4)
  for (size_t m = 0; m < kKeys; ++m) keys[m] = queries[m] = hn::Zero(d);
  for (size_t x = 0; x < c.dk; x += hn::Lanes(d)) {
    const auto a = hn::Load(d, c.a + i * c.stride + x);
    const auto k = hn::Load(d, c.k + i * c.stride + x);
    const auto q = hn::Load(d, c.q + i * c.stride + x);
    HWY_UNROLL(4)
    for (size_t m = 0; m < kKeys; ++m) {
      float* const at = c.k + (j + m) * c.stride + x;
      const auto key = hn::Mul(a, hn::Load(d, at));
      hn::Store(key, d, at);
      keys[m] = hn::MulAdd(k, key, keys[m]);
      queries[m] = hn::MulAdd(q, key, queries[m]);
    }
  }
  HWY_UNROLL(4)
  for (size_t m = 0; m < kKeys; ++m) {
    c.key_scores[i * c.score_stride + j + m] = hn::ReduceSum(d, keys[m]);
    c.query_scores[i * c.score_stride + j + m] = hn::ReduceSum(d, queries[m]);
  }
}

HWY_INLINE float Dot(const float* x, const float* y, size_t n) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    sum = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), sum);
  }
  return hn::ReduceSum(d, sum);
}

// Afterwards the keys of the block have decayed up to its last token.
void BlockScores(const Block& b) {
  const ChannelChunk& c = b.c;
  for (size_t i = b.begin; i < b.end; ++i) {
    size_t j = b.begin;
    for (; j + 4 <= i; j += 4) PairScores<4>(c, i, j);
    for (; j < i; ++j) PairScores<1>(c, i, j);
    c.query_scores[i * c.score_stride + i] =
        Dot(c.q + i * c.stride, c.k + i * c.stride, c.dk);
  }
}

// q, from_start and kept of the block, and the decay of all earlier keys.
void Advance(const Block& b) {
  const DF d;
  const ChannelChunk& c = b.c;
  const float* const last = b.left + (b.end - 1 - b.begin) * c.stride;
  for (size_t x = 0; x < c.dk; x += hn::Lanes(d)) {
    const auto before =
        b.begin == 0 ? hn::Set(d, 1.0f) : hn::Load(d, c.kept + x);
    for (size_t i = b.begin; i < b.end; ++i) {
      const size_t to = i * c.stride + x, from = (i - b.begin) * c.stride + x;
      const auto key = hn::Mul(before, hn::Load(d, b.keys + from));
      hn::Store(hn::Mul(hn::Set(d, -c.beta[i]), key), d, c.from_start + to);
      hn::Store(hn::Mul(before, hn::Load(d, b.queries + from)), d, c.q + to);
    }
    const auto decay = hn::Load(d, last + x);
    hn::Store(hn::Mul(before, decay), d, c.kept + x);
    for (size_t j = 0; j < b.begin; ++j) {
      float* const at = c.k + j * c.stride + x;
      hn::Store(hn::Mul(decay, hn::Load(d, at)), d, at);
    }
  }
}

void ChannelScores(const ChannelChunk& c) {
  const DF d;
  for (size_t begin = 0; begin < c.n; begin += kBlock) {
    const size_t end = HWY_MIN(begin + kBlock, c.n);
    const Block block = {c,
                         begin,
                         end,
                         c.block,
                         c.block + kBlock * c.stride,
                         c.block + 2 * kBlock * c.stride};
    LeftFactors(block);
    EarlierScores(block);
    BlockScores(block);
    Advance(block);
    for (size_t i = begin; i < end; ++i) {
      float* const row = c.key_scores + i * c.score_stride;
      for (size_t j = 0; j < i; j += hn::Lanes(d)) {
        hn::Store(hn::Mul(hn::Set(d, -c.beta[i]), hn::Load(d, row + j)), d,
                  row + j);
      }
    }
  }
}

using Kernel = void (*)(const ChannelChunk&);
Kernel GetKernel() { return &ChannelScores; }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernel);
}  // namespace
void (*GetChannelChunkKernel())(const ChannelChunk& chunk) {
  return HWY_DYNAMIC_DISPATCH(GetKernel)();
}
}  // namespace quern
#endif  // HWY_ONCE
