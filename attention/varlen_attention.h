#ifndef QUERN_ATTENTION_VARLEN_ATTENTION_H_
#define QUERN_ATTENTION_VARLEN_ATTENTION_H_

// Attention over keys and values that are in no cache: encoders, and prompts of
// which nothing is cached yet. Sequences lie one after another in q, k and v:
//
//   queries of sequence s   q[cu_q[s] .. cu_q[s + 1])
//   its keys and values     k, v[cu_kv[s] .. cu_kv[s + 1])
//
// and out and lse are those of attention/paged_attention.h, whose equations and
// numbers these are, bit by bit: with a soft cap, windows, ALiBi and sinks if
// so desired. The last query stands where the last key does. A causal sequence
// has no more queries than keys, unless it has no keys: then its output is 0.
// With kBidirectional, queries and keys may be of different sequences
// (cross-attention), as many of either as there are.
//
//   VarlenAttentionStorage storage;
//   QUERN_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
//       plan.BuildSchedule(cu, cu, VarlenMask::kBidirectional, workers,
//                          storage));
//   ... plan.WorkspaceBytes(schedule, workers) ...
//   plan.Execute({q, k, v, schedule, out}, workspace, executor);

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {

struct VarlenAttentionSpec {
  int64_t q_heads = 0;            // a multiple of kv_heads
  int64_t kv_heads = 0;           // >= 1
  int64_t head_dim = 0;           // >= 1
  int64_t v_head_dim = 0;         // 0: head_dim
  DType dtype = DType::kF32;      // of q, k and v: kF32, kBF16 or kF16
  DType out_dtype = DType::kF32;  // the same choice
  // These four mean what they mean in AttentionSpec.
  float scale = 0;
  int64_t window_left = kNoWindow;
  int64_t window_right = kNoWindow;
  float soft_cap = 0;
};

// Whether a query sees what comes after it.
enum class VarlenMask : uint8_t { kCausal, kBidirectional };

// The arrays of a schedule, kept from call to call: only growth allocates.
struct VarlenAttentionStorage {
  std::vector<int64_t> q_lens;
  std::vector<int64_t> kv_lens;
  std::vector<uint8_t> causal;
  AttentionScheduleStorage schedule;
};

struct VarlenAttentionArgs {
  AnyTensorView q;             // [tokens, q_heads, head_dim]
  AnyTensorView k;             // [kv_tokens, kv_heads, head_dim]
  AnyTensorView v;             // [kv_tokens, kv_heads, v_head_dim]
  AttentionSchedule schedule;  // of this plan's BuildSchedule
  AnyTensorView out;           // [tokens, q_heads, v_head_dim]
  MatrixView<float> lse = {};  // [tokens, q_heads], or without data: not wanted
  absl::Span<const float> alibi_slopes = {};  // [q_heads], or empty: 0
  absl::Span<const float> sinks = {};         // [q_heads], or empty: none
};

class VarlenAttentionPlan {
 public:
  // InvalidArgument names the field and what it must be; Unimplemented for
  // other dtypes.
  static absl::StatusOr<VarlenAttentionPlan> Create(
      const VarlenAttentionSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return attend_.target(); }
  // "bf16 dot" or "f32 fma".
  const char* arithmetic() const { return attend_.arithmetic(); }

  // cu_q[sequences + 1] and cu_kv of the same size: from 0, ascending. Refuses
  // what is not so, naming the entry, and what AttentionSchedule::Build
  // refuses.
  absl::StatusOr<AttentionSchedule> BuildSchedule(
      absl::Span<const int32_t> cu_q, absl::Span<const int32_t> cu_kv,
      VarlenMask mask, int num_workers, VarlenAttentionStorage& storage) const;

  // Scratch of one Execute by an executor of that many workers: a copy of k and
  // v, each sequence rounded up to 16 tokens, and what PagedAttentionPlan
  // wants. ResourceExhausted if the size overflows.
  absl::StatusOr<int64_t> WorkspaceBytes(const AttentionSchedule& schedule,
                                         int num_workers) const;
  // Enough for every schedule within `limits`, in which max_kv_len bounds the
  // keys of a sequence and max_tokens those of all sequences together, beside
  // their queries. Run by at most max_workers workers and built for as many,
  // or for up to limits.max_schedule_workers if these are more. Refuses what
  // AttentionBoundOf refuses.
  absl::StatusOr<int64_t> WorkspaceBytes(const AttentionLimits& limits,
                                         int max_workers) const;

  // For callers that cannot trust their arguments. InvalidArgument names the
  // argument, the value and the bound: a schedule of another plan, shapes and
  // types that are not the plan's, negative strides, null memory, out or lse
  // with rows that overlap or overlapping anything else.
  absl::Status CheckArgs(const VarlenAttentionArgs& args) const;

  // args as CheckArgs accepts them, `workspace` of at least WorkspaceBytes.
  // Writes all of out and, if given, lse. Views may have any token and head
  // strides that are not negative, so that q, k and v may be parts of one
  // matrix; out and lse must overlap nothing. Allocates nothing. Safe to call
  // concurrently with other workspaces and outputs. The bits depend neither on
  // the executor nor on the other sequences. Cost: k and v are brought into the
  // form of the kernels once, in the workspace, for all queries and heads that
  // read them; then that of PagedAttentionPlan.
  void Execute(const VarlenAttentionArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  VarlenAttentionPlan(const PagedAttentionPlan& attend,
                      const WriteKvPlan& write)
      : attend_(attend), write_(write) {}

  PagedAttentionPlan attend_;
  WriteKvPlan write_;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_VARLEN_ATTENTION_H_
