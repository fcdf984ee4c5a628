#ifndef QUERN_ATTENTION_ATTENTION_SCRATCH_H_
#define QUERN_ATTENTION_ATTENTION_SCRATCH_H_

// Private: the workspace of one PagedAttentionPlan::Execute.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/kernels/softmax_state.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/workspace.h"

namespace quern {

// Results for some rows: not yet divided by the sum.
struct PartialRows {
  SoftmaxState* state;
  float* out;
};

// Distances in the workspace.
struct AttentionStrides {
  explicit AttentionStrides(const KvLayout& kv)
      : q(RoundUp(kv.head_dim(), kRowAlignment)),
        out(RoundUp(kv.v_head_dim(), kRowAlignment)),
        k_group(GroupBytes(kv, kv.head_dim())),
        v_group(GroupBytes(kv, kv.v_head_dim())) {}
  int64_t q;        // words, from row to row
  int64_t out;      // elements, from row to row
  int64_t k_group;  // bytes
  int64_t v_group;

 private:
  // Rows are a multiple of this apart, in elements: the longest vector of any
  // instruction set.
  static constexpr int64_t kRowAlignment = 64;

  static int64_t GroupBytes(const KvLayout& kv, int64_t dim) {
    // One byte is widened to two.
    const auto element = static_cast<int64_t>(SizeOf(kv.dtype()));
    return static_cast<int64_t>(kGroupTokens) * RoundUp(dim, 2) *
           std::max(int64_t{2}, element);
  }
};

// A part for each worker. All parts of one worker lie together: a core also
// fetches lines behind those that it reads, which must not be lines that
// another core writes. Where the same part of all workers lay together, two
// threads decoded 8 sequences of 4096 tokens in 1.2 times the time (Zen 4,
// 2026).
template <typename T>
struct PerWorker {
  T* data = nullptr;
  int64_t stride = 0;  // elements from part to part

  T* Of(int worker) const { return data + worker * stride; }
};

// Rows of results for each worker.
struct WorkerRows {
  PerWorker<SoftmaxState> state;
  PerWorker<float> out;

  PartialRows Of(int worker) const {
    return {state.Of(worker), out.Of(worker)};
  }
};

struct AttentionScratch {
  // The rows of a block, which is `max_block_rows` at most.
  PerWorker<uint32_t> q;
  PerWorker<const uint8_t*> stored;  // where the block's outputs lie
  PerWorker<const uint8_t*> loaded;  // where the next block's queries lie
  PerWorker<float> logits;
  PerWorker<float> weights;
  PerWorker<TokenRange> seen;
  PerWorker<uint64_t> hidden;
  PerWorker<float> slopes;
  PerWorker<float> ahead;
  WorkerRows piece;  // of chunks that are merged first
  WorkerRows total;  // of all chunks so far
  // The groups of a chunk that are not read where they are.
  PerWorker<uint8_t> k;
  PerWorker<uint8_t> v;
  PerWorker<uint8_t> masked_v;
  PerWorker<float> k_scales;  // of the tokens of a chunk
  PerWorker<float> v_scales;
  // Addresses of the rows of two chunks, keys before values, for the plain form
  // alone.
  PerWorker<const uint8_t*> rows;
  // Results of the work items that leave a partial one.
  PartialRows partials;
};

// Lists the parts of one worker, which are `stride` bytes from the next one's.
template <typename Allocator>
void LayOutWorker(Allocator& a, const KvLayout& kv, int64_t rows,
                  int64_t stride, AttentionScratch* s) {
  // x * y, or a negative number for WorkspaceLayout to count as overflow.
  const auto product = [](int64_t x, int64_t y) {
    int64_t result = 0;
    return CheckedMul(x, y, &result) ? result : -1;
  };
  constexpr auto kChunk = AttentionSchedule::kChunkTokens;
  constexpr auto kGroups = static_cast<int64_t>(kChunkGroups);
  const AttentionStrides strides(kv);
  const auto take = [&](auto* part, const char* name, int64_t count) {
    using T = std::remove_pointer_t<decltype(part->data)>;
    static_assert(64 % sizeof(T) == 0, "elements do not straddle lines");
    part->stride = stride / static_cast<int64_t>(sizeof(T));
    part->data = a.template Allocate<T>(name, count);
  };
  take(&s->q, "q", product(rows, strides.q));
  take(&s->stored, "places of outputs", rows);
  take(&s->loaded, "places of queries", rows);
  take(&s->logits, "logits", product(rows, kChunk));
  take(&s->weights, "weights", product(rows, 2));
  take(&s->seen, "seen", rows);
  take(&s->hidden, "hidden", rows);
  take(&s->slopes, "slopes", rows);
  take(&s->ahead, "ahead", rows);
  take(&s->piece.state, "piece state", rows);
  take(&s->piece.out, "piece out", product(rows, strides.out));
  take(&s->total.state, "state", rows);
  take(&s->total.out, "out", product(rows, strides.out));
  take(&s->k, "keys", product(kGroups, strides.k_group));
  take(&s->v, "values", product(kGroups, strides.v_group));
  take(&s->masked_v, "masked values", product(kGroups, strides.v_group));
  take(&s->k_scales, "key scales", kChunk);
  take(&s->v_scales, "value scales", kChunk);
  take(&s->rows, "rows", kv.in_groups() ? 0 : 4 * kChunk);
}

// `rows` are those of the largest block, `partials` the rows of partial
// results. `a` allocates from a Workspace or counts for a WorkspaceLayout.
template <typename Allocator>
AttentionScratch LayOutAttentionScratch(Allocator& a, const KvLayout& kv,
                                        int64_t rows, int64_t partials,
                                        int64_t num_workers) {
  AttentionScratch s;
  if (rows != 0 && num_workers != 0) {
    WorkspaceLayout one;
    LayOutWorker(one, kv, rows, 0, &s);
    int64_t others = 0;
    if (!CheckedMul(one.bytes(), num_workers - 1, &others)) others = -1;
    LayOutWorker(a, kv, rows, one.bytes(), &s);
    a.template Allocate<uint8_t>("other workers", others);
  }
  const AttentionStrides strides(kv);
  int64_t partial_out = 0;
  if (!CheckedMul(partials, strides.out, &partial_out)) partial_out = -1;
  s.partials.state = a.template Allocate<SoftmaxState>("partials", partials);
  s.partials.out = a.template Allocate<float>("partial out", partial_out);
  return s;
}

}  // namespace quern

#endif  // QUERN_ATTENTION_ATTENTION_SCRATCH_H_
