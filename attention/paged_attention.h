#ifndef QUERN_ATTENTION_PAGED_ATTENTION_H_
#define QUERN_ATTENTION_PAGED_ATTENTION_H_

// Attention with grouped query heads over a paged KV cache. For token i of a
// sequence's q_len queries, position p = kv_len - q_len + i, query head h and
// its key/value head g = h / (q_heads / kv_heads), over the keys t that p sees:
//
//   x[t]      = scale * sum over d of q[i, h, d] * k[t, g, d]
//   x[t]      = soft_cap * tanh(x[t] / soft_cap)           with a soft cap
//   logit[t]  = x[t] + alibi_slopes[h] * (t - p)           with ALiBi
//   lse[i, h] = log(sum over t of exp(logit[t]) + exp(sinks[h]))
//   out[i, h] = sum over t of exp(logit[t] - lse[i, h]) * v[t, g, :]
//
//   p sees t if  p - window_left <= t  and  t <= p + right,  0 <= t < kv_len
//   right = 0 where the sequence is causal, window_right where it is not
//
// Drafts of a tree (AttentionBatch::draft_masks) see what their masks say. A
// draft stands where it does on its path, and so do the drafts that it sees;
// see attention/schedule.h. The logits of those that it does not see are -inf.
//
// k and v are what the cache means: stored values times their scales. Without
// sinks there is no such term. Prefill, chunked prefill and decode are shapes
// (q_len = kv_len, less, 1), in one batch if so desired. So is cross-attention,
// where sequences are not causal and q_len may exceed kv_len: p < 0 then.
//
// Accumulates in f32. Products of bf16 queries with a cache of bf16 or bytes
// are bf16 dot products where the CPU has them, which take denormal inputs for
// zero; there weights are rounded to bf16 before they multiply values, but not
// for their sum. All other products are of f32, to which q, k and v are
// widened.
//
// No key (kv_len 0, or a window that shows none), or only keys of logit -inf:
// out is 0, lse is -inf, or the sink. A NaN in a key or value reaches the rows
// that see it and no others, but a scale of NaN no row to which its value adds
// nothing; what lies in slots beyond kv_len reaches no output. A logit of
// +infinity, before a soft cap, gives NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/page_table.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {

// Everything is borrowed for the time of one Execute; the storages behind
// `pages` and `schedule` too. The file examples/paged_attention/main.cc fills
// one.
struct PagedAttentionArgs {
  // tokens: the sum of the schedule's q_lens, sequence by sequence.
  AnyTensorView q;             // [tokens, q_heads, head_dim]
  KvCacheView kv;              // the new tokens' keys and values are in it
  PageTable pages;             // of the schedule's sequences, in its order
  AttentionSchedule schedule;  // built with the plan's spec
  AnyTensorView out;           // [tokens, q_heads, v_head_dim]
  MatrixView<float> lse;       // [tokens, q_heads], or without data: not wanted
  // [q_heads], or empty: 0, as they must be where the schedule has drafts.
  absl::Span<const float> alibi_slopes;
  absl::Span<const float> sinks;  // [q_heads], or empty: none
};

// What CheckArgs asks of pages and schedule, which is the same for all layers
// of a step. InvalidArgument names the sequence: tables of other sequences,
// sequences longer than their pages, a missing page (kNoPage) with a key that
// some query sees, sequences that share a prefix in the schedule but not the
// pages of it. So a schedule without a window is refused over a table that
// lacks pages. Cost: a few nanoseconds a sequence, and one pass over the pages
// of prefixes. Allocates nothing where it accepts.
absl::Status CheckPages(const AttentionSchedule& schedule,
                        const PageTable& pages);

class PagedAttentionPlan {
 public:
  // Refuses what CheckAttentionSpec refuses.
  static absl::StatusOr<PagedAttentionPlan> Create(const AttentionSpec& spec);

  const AttentionSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // "bf16 dot" or "f32 fma".
  const char* arithmetic() const { return kernels_.arithmetic; }

  // Bytes of scratch for one Execute with this schedule, by an executor of at
  // most that many workers. One workspace serves all layers, one after another;
  // the next step may need a larger one. ResourceExhausted if the size
  // overflows.
  absl::StatusOr<int64_t> WorkspaceBytes(const AttentionSchedule& schedule,
                                         int num_workers) const;
  // Enough for every schedule within `limits` of default tiles, run by at most
  // max_workers workers and built for as many, or for up to
  // limits.max_schedule_workers if these are more. Refuses what
  // AttentionBoundOf refuses.
  absl::StatusOr<int64_t> WorkspaceBytes(const AttentionLimits& limits,
                                         int max_workers) const;

  // For callers that cannot trust their arguments. InvalidArgument names the
  // argument, the sequence where there is one, the value and the bound: shapes
  // and types that are not the plan's, negative strides, null memory, out or
  // lse with rows that overlap or overlapping anything else, a schedule of
  // another spec, a cache of another layout, pages beyond the cache, and what
  // CheckPages refuses. Unimplemented: alibi_slopes and drafts.
  absl::Status CheckArgs(const PagedAttentionArgs& args) const;

  // args as CheckArgs accepts them, `workspace` of at least WorkspaceBytes.
  // Writes all of out and, if given, lse. q, out and lse may have any token and
  // head strides that are not negative; out and lse must overlap nothing.
  // Allocates nothing. Safe to call concurrently with other workspaces and
  // outputs. The bits do not depend on the executor, the batch, the page size,
  // the order of the pages or how a sequence was cut into steps. Cost: each
  // block of a schedule reads the keys and values that its queries see, once,
  // in groups of 16 tokens: of a sequence with a window no page before the
  // first key that is seen. Where pages are missing it stops the process
  // (QUERN_CHECK) if CheckPages refuses: nothing is read through kNoPage.
  void Execute(const PagedAttentionArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  PagedAttentionPlan(const AttentionSpec& spec,
                     const PagedAttentionKernels& kernels,
                     const PackKvKernels& pack_kernels)
      : spec_(spec), kernels_(kernels), pack_kernels_(pack_kernels) {}

  absl::StatusOr<int64_t> ScratchBytes(int64_t block_rows, int64_t partial_rows,
                                       int num_workers) const;

  AttentionSpec spec_;
  PagedAttentionKernels kernels_;
  PackKvKernels pack_kernels_;  // of the plain form
};

}  // namespace quern

#endif  // QUERN_ATTENTION_PAGED_ATTENTION_H_
