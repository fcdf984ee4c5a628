#ifndef QUERN_ATTENTION_KERNELS_PAGED_ATTENTION_KERNELS_H_
#define QUERN_ATTENTION_KERNELS_PAGED_ATTENTION_KERNELS_H_

// The private seam between the plan and its SIMD kernels.
//
// Kernels know neither pages nor sequences. They are given one chunk of at most
// kChunkGroups groups of 16 consecutive tokens, and of each group where its
// keys and values lie, in 32-bit words: pairs of bf16 or f16,
// or one f32: KvForm::kPaired of cache/kv_layout.h.
//
//   keys     k[step][16 tokens]   a word holds dims 2 * step, 2 * step + 1 of
//                                   a token, or dim `step`
//   values   v[row][v_head_dim]   a word holds tokens 2 * row, 2 * row + 1 of
//                                   a dim, or token `row`
//
// One line of 16 words is what a dot product instruction takes: a line of keys
// times a query's word gives 16 logits, a line of values times a word of
// weights 16 outputs. Each logit and output is one chain of sums in the order
// of the dims and tokens, whatever the tile: bits do not depend on the other
// rows.
//
// Logits are in units of log2: scale_log2e has the scale and log2(e).

#include <cstddef>
#include <cstdint>

#include "quern/attention/kernels/softmax_state.h"
#include "quern/core/dtype.h"

namespace quern {

constexpr size_t kGroupTokens = 16;
constexpr size_t kChunkGroups = 16;
// Dims of a latent that share a scale where a cache has KvScaling::kPerBlock.
constexpr size_t kLatentScaleDims = 128;

// The tokens [begin, end) of a chunk.
struct TokenRange {
  uint32_t begin;
  uint32_t end;
};

// A bit for each of the tokens [begin, end) of a group, end <= kGroupTokens.
constexpr uint32_t TokenBits(uint32_t begin, uint32_t end) {
  return begin < end ? (uint32_t{1} << end) - (uint32_t{1} << begin) : 0;
}

// `count` rows of `bytes`; those that are null are none.
struct FetchList {
  const uint8_t* const* rows;
  size_t count;
  size_t bytes;
};

constexpr size_t kFetchLists = 4;  // of ChunkArgs::next

// Rows of queries against one chunk.
struct ChunkArgs {
  const uint8_t* k[kChunkGroups];
  const uint8_t* v[kChunkGroups];
  // What is written and read next, in that order: the outputs of these rows,
  // the queries of the next ones, keys and values. Fetched into the L2 cache
  // meanwhile.
  FetchList next[kFetchLists];

  // Where values are the first dims of keys, and every row sees all of each
  // group that any sees: v is not read. This holds those of up to 64 dims
  // at a time. Null elsewhere, but for kernels that widen values.
  uint8_t* latent_tile;

  size_t rows;
  const uint32_t* q;       // [rows][q_stride], as load_query left them
  size_t q_stride;         // words
  const TokenRange* seen;  // [rows], by each row
  // [rows]: bit b is set where the token hidden_begin + b, though in `seen`, is
  // hidden from the row. Null: no token is. Bits beyond the chunk mean nothing.
  const uint64_t* hidden;
  size_t hidden_begin;
  size_t head_dim;
  size_t v_head_dim;
  float scale_log2e;  // > 0

  // What a logit goes through on its way, in this order; see AttentionSpec.
  const float* k_scales;  // [tokens of a chunk]: times that, or null
  float soft_cap_log2e;   // 0: none
  const float* slopes;    // [rows], times log2(e), or null: no ALiBi
  const float* ahead;  // [rows] the chunk's first token less the row's position
  const float* v_scales;  // [tokens of a chunk]: of the values, or null

  float* logits;   // [rows][kChunkGroups * kGroupTokens], scratch
  float* weights;  // [rows][2], scratch

  // The result of the chunks before, which this one is merged into. `first`:
  // there are none, both are only written.
  bool first;
  SoftmaxState* state;  // [rows]
  float* out;           // [rows][out_stride], not yet divided by the sum
  size_t out_stride;    // a multiple of every vector length
};

// Bit b: whether the token `token` + b is hidden from the row.
inline uint64_t HiddenFrom(const ChunkArgs& c, size_t row, size_t token) {
  if (c.hidden == nullptr) return 0;
  const bool before = token < c.hidden_begin;
  const size_t by = before ? c.hidden_begin - token : token - c.hidden_begin;
  if (by >= 64) return 0;
  return before ? c.hidden[row] << by : c.hidden[row] >> by;
}

struct PagedAttentionKernels {
  const char* target;
  // "bf16 dot", "f32 fma".
  const char* arithmetic;

  // The words of one query times `sign`, which is 1 or -1; zeros up to the next
  // multiple of two dims.
  void (*load_query)(const void* q, size_t head_dim, float sign, uint32_t* to);

  void (*attend)(const ChunkArgs& args);
  // Gives the bits of `attend`, over groups of bytes as they are in the cache.
  // Null for other types.
  void (*attend_bytes)(const ChunkArgs& args);
  // Whether attend_bytes may be called with `args`. Null: always.
  bool (*serves_bytes)(const ChunkArgs& args);

  // `count` elements of one byte to bf16, exactly; as many bytes of `next` are
  // fetched into the L2 cache meanwhile. `to` may begin `count` bytes before
  // `from`. Null for other types.
  void (*widen)(const uint8_t* from, const uint8_t* next, size_t count,
                uint8_t* to);

  // A group of keys of the latent form with a scale for each block of 128 dims
  // (KvScaling::kPerBlock) to bf16, exactly; `rest` words of a token lie behind
  // the codes. As many bytes of `next` are fetched into the L2 cache meanwhile.
  // Null for other types than f8e4m3.
  void (*widen_latent)(const uint8_t* from, const uint8_t* next,
                       size_t v_head_dim, size_t rest, uint8_t* to);

  // A group of values that are the first v_head_dim dims of a group of keys;
  // v_head_dim is a multiple of 4.
  void (*stage_latent_v)(const uint8_t* k, size_t v_head_dim, uint8_t* to);
  // Writes zeros to the tokens t of a group of values whose bit t in `keep` is
  // clear. mask_v and finite_v take values that have been widened.
  void (*mask_v)(uint32_t keep, size_t v_head_dim, uint8_t* group);
  // Whether no value of the group is infinite or NaN.
  bool (*finite_v)(const uint8_t* from, size_t v_head_dim);

  // (state, out) of some keys becomes that of them and of (other, other_out)'s.
  void (*merge)(const SoftmaxState& other, const float* other_out, size_t count,
                SoftmaxState* state, float* out);

  // to[d] = out[d] / sum * scale, d < count; 0 if the sum is 0.
  void (*store)(float sum, float scale, const float* out, size_t count,
                void* to);
};

// The kernels of the best instruction set this CPU supports. `q` and `out` are
// kF32, kBF16 or kF16; `kv` also kI8, kF8E4M3 or kF8E5M2.
PagedAttentionKernels GetPagedAttentionKernels(DType q, DType kv, DType out);

}  // namespace quern

#endif  // QUERN_ATTENTION_KERNELS_PAGED_ATTENTION_KERNELS_H_
