#ifndef QUERN_ATTENTION_ATTENTION_SCRATCH_H_
#define QUERN_ATTENTION_ATTENTION_SCRATCH_H_

// Private: the workspace of one PagedAttentionPlan::Execute.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_kernels.h"
#include "attention/schedule.h"
#include "attention/softmax_state.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "core/math_util.h"

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

struct AttentionScratch {
  // Of `max_block_rows` rows for each worker.
  uint32_t* q;
  const uint8_t** next_q;  // where the next block's queries lie
  float* logits;
  float* weights;
  TokenRange* seen;
  float* slopes;
  float* ahead;
  PartialRows piece;  // of chunks that are merged first
  PartialRows total;  // of all chunks so far
  // Of a chunk for each worker: groups that are not read where they are.
  uint8_t* k;
  uint8_t* v;
  uint8_t* masked_v;
  float* k_scales;  // of the tokens of a chunk
  float* v_scales;
  // Of the plain form: where the rows of two chunks lie, keys before values.
  const uint8_t** rows;
  // Of the work items that leave a partial result.
  PartialRows partials;
};

// `a` allocates from a Workspace or counts for a WorkspaceLayout.
template <typename Allocator>
AttentionScratch LayOutAttentionScratch(Allocator& a, const KvLayout& kv,
                                        const AttentionSchedule& schedule,
                                        int64_t num_workers) {
  // Or a negative number, which WorkspaceLayout counts as overflow.
  const auto product = [](int64_t x, int64_t y) {
    int64_t result = 0;
    return CheckedMul(x, y, &result) ? result : -1;
  };
  constexpr auto kChunk = AttentionSchedule::kChunkTokens;
  const AttentionStrides strides(kv);
  const int64_t rows = product(schedule.max_block_rows(), num_workers);
  const int64_t partials = schedule.partial_rows();
  const int64_t workers = rows == 0 ? 0 : num_workers;
  const int64_t groups = product(workers, static_cast<int64_t>(kChunkGroups));
  const int64_t tokens = product(workers, kChunk);
  AttentionScratch s;
  s.q = a.template Allocate<uint32_t>("q", product(rows, strides.q));
  s.next_q = a.template Allocate<const uint8_t*>("next queries", rows);
  s.logits = a.template Allocate<float>("logits", product(rows, kChunk));
  s.weights = a.template Allocate<float>("weights", product(rows, 2));
  s.seen = a.template Allocate<TokenRange>("seen", rows);
  s.slopes = a.template Allocate<float>("slopes", rows);
  s.ahead = a.template Allocate<float>("ahead", rows);
  s.piece.state = a.template Allocate<SoftmaxState>("piece state", rows);
  s.piece.out =
      a.template Allocate<float>("piece out", product(rows, strides.out));
  s.total.state = a.template Allocate<SoftmaxState>("state", rows);
  s.total.out = a.template Allocate<float>("out", product(rows, strides.out));
  s.k = a.template Allocate<uint8_t>("keys", product(groups, strides.k_group));
  s.v =
      a.template Allocate<uint8_t>("values", product(groups, strides.v_group));
  s.masked_v = a.template Allocate<uint8_t>("masked values",
                                            product(groups, strides.v_group));
  s.k_scales = a.template Allocate<float>("key scales", tokens);
  s.v_scales = a.template Allocate<float>("value scales", tokens);
  s.rows = a.template Allocate<const uint8_t*>(
      "rows", kv.in_groups() ? 0 : product(tokens, 4));
  s.partials.state = a.template Allocate<SoftmaxState>("partials", partials);
  s.partials.out =
      a.template Allocate<float>("partial out", product(partials, strides.out));
  return s;
}

}  // namespace quern

#endif  // QUERN_ATTENTION_ATTENTION_SCRATCH_H_
