#ifndef QUERN_ATTENTION_MERGE_STATES_H_
#define QUERN_ATTENTION_MERGE_STATES_H_

// Attention over all keys from attention over two parts of them: of a shared
// prefix and of what follows it, of the cache and of the new tokens, of two
// machines. For token t and head h, with the outputs and log-sum-exps of both:
//
//   lse[t, h]    = log(exp(a.lse[t, h]) + exp(b.lse[t, h]))
//   out[t, h, :] = exp(a.lse[t, h] - lse[t, h]) * a.out[t, h, :] +
//                  exp(b.lse[t, h] - lse[t, h]) * b.out[t, h, :]
//
// In f32, rounded once to the output's type. lse is what PagedAttentionPlan
// returns: natural logarithms. Of sinks, one of the parts may have them.
//
// A part whose lse is -inf, or more than 87.3 below the other's, has weight 0:
// its out is not read, and may hold anything; the result is the other part's,
// exactly. An lse of +inf is taken for -inf, because FlashAttention 2 returns
// +inf for a part without keys. Two parts of either infinity give zeros and
// -inf. A NaN in a part makes NaN what it takes part in: in lse the whole row.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/attention/kernels/merge_states_kernels.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"

namespace quern {

struct MergeStatesSpec {
  int64_t heads = 0;
  int64_t head_dim = 0;           // of the values
  DType dtype = DType::kF32;      // of both parts: kF32, kBF16 or kF16
  DType out_dtype = DType::kF32;  // the same choice
  // Every lse is [heads, tokens] in place of [tokens, heads].
  bool lse_by_head = false;
  // Tokens that have a part a, the first ones; -1: all. The others have the
  // out and the lse of b, whatever that lse is, and their a is not read.
  int64_t a_tokens = -1;
};

struct AttentionState {
  AnyTensorView out;  // [tokens, heads, head_dim]
  AnyTensorView lse;  // f32[tokens, heads]
};

struct MergeStatesArgs {
  AttentionState a;
  AttentionState b;
  AnyTensorView out;  // [tokens, heads, head_dim]
  AnyTensorView lse;  // f32[tokens, heads], or no view: not wanted
};

class MergeStatesPlan {
 public:
  // InvalidArgument if heads or head_dim is not in [1, 2^31) or a_tokens is
  // below -1, Unimplemented for other types.
  static absl::StatusOr<MergeStatesPlan> Create(const MergeStatesSpec& spec);

  const MergeStatesSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // InvalidArgument names the argument: shapes and types that are not the
  // spec's, fewer tokens than a_tokens, negative strides, null memory, and
  // outputs that overlap anything, but for what Execute allows.
  absl::Status CheckArgs(const MergeStatesArgs& args) const;

  // Writes all of out and, if given, lse. Strides are any that are not
  // negative, but for the last one, which is 1. out may be a.out or b.out (the
  // same address and strides, types of one size) and lse may be a.lse or b.lse;
  // else they overlap nothing. Allocates nothing; safe to call concurrently; a
  // row is computed by one worker, and its bits depend on the row alone. Cost:
  // each part is read and out is written, once.
  void Execute(const MergeStatesArgs& args, Executor& executor) const noexcept;

 private:
  explicit MergeStatesPlan(const MergeStatesSpec& spec)
      : spec_(spec),
        kernels_(GetMergeStatesKernels(spec.dtype, spec.out_dtype)) {}

  MergeStatesSpec spec_;
  MergeStatesKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_MERGE_STATES_H_
