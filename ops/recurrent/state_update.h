#ifndef QUERN_OPS_RECURRENT_STATE_UPDATE_H_
#define QUERN_OPS_RECURRENT_STATE_UPDATE_H_

// The selective state update of Mamba-1 and Mamba-2, token by token. For each
// head and row p of its state s[head_dim, d_state], with group
// h / (heads / groups):
//
//   delta = act(dt[p] + dt_bias[p])         act(x) = x, or ln(1 + e^x)
//   s[p, n] <- exp(min(a[p, n] delta, 0)) s[p, n] + b[n] (delta x[p])
//   y = sum over n of s[p, n] c[n] + d[p] x[p]
//   out[p] = round(y)    or    round(y z[p] / (1 + e^-z[p]))
//
//   kPerRow    a[heads, head_dim, d_state]; dt, d and dt_bias have a number for
//              each row of a head. Mamba-1: heads = 1, head_dim = channels.
//   kPerHead   a, dt, d and dt_bias have a number for each head: Mamba-2
//
// d, z and dt_bias may be left out: 0, no gate, 0.
//
// All arithmetic is in f32. The state is rounded to state_dtype after every
// token, to nearest even, so a sequence that is cut into several calls has the
// bits of one call. out comes from the state before it is rounded, and is
// rounded once. Sums over n have an order that the instruction set determines.
//
// a delta > 0 counts as 0: a decay never makes a state grow. A NaN in dt, a, b,
// c, d, z or x makes the rows NaN that the formula takes it to, and no others.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/state_update_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

enum class SsmForm : uint8_t { kPerRow, kPerHead };
enum class SsmDelta : uint8_t { kPlain, kSoftplus };

struct StateUpdateSpec {
  int64_t heads = 0;     // >= 1
  int64_t groups = 1;    // divides heads
  int64_t head_dim = 0;  // >= 1
  int64_t d_state = 0;   // 1 <= d_state <= kMaxState
  SsmForm form = SsmForm::kPerHead;
  SsmDelta delta = SsmDelta::kSoftplus;
  DType dtype = DType::kF32;        // of x, dt, b, c, z and out
  DType state_dtype = DType::kF32;  // both f32, bf16 or f16
  int64_t null_slot = -1;           // state index of a sequence to skip
};

// [..] is [head_dim] of kPerRow, and nothing of kPerHead.
struct StateUpdateArgs {
  AnyTensorView state;  // [slots, heads, head_dim, d_state]
  AnyTensorView x;      // [tokens, heads, head_dim]
  AnyTensorView dt;     // [tokens, heads, ..]
  AnyTensorView a;      // f32 [heads, head_dim, d_state] or f32 [heads]
  AnyTensorView b;      // [tokens, groups, d_state]
  AnyTensorView c;      // [tokens, groups, d_state]
  // Each may be no view.
  AnyTensorView d;        // f32 [heads, ..]
  AnyTensorView z;        // [tokens, heads, head_dim]
  AnyTensorView dt_bias;  // f32 [heads, ..]
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, heads, head_dim]
};

class StateUpdatePlan {
 public:
  // Two vectors of d_state elements lie on the stack: 8 KiB.
  static constexpr int64_t kMaxState = 1024;

  // InvalidArgument if a number of the spec is out of range; Unimplemented for
  // other dtypes.
  static absl::StatusOr<StateUpdatePlan> Create(const StateUpdateSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const StateUpdateSpec& spec() const { return spec_; }

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; a state index that is out of range or given twice; starts that
  // decrease or leave the tokens; a state that touches another tensor; out on
  // anything but the elements of x or z.
  absl::Status CheckArgs(const StateUpdateArgs& args) const;

  // Writes the slots that are named, and out for the tokens of all sequences:
  // zeros for a sequence whose index is null_slot. Tokens of no sequence are
  // neither read nor written, nor is the state of a sequence without tokens.
  // out may be x or z. Views may have any strides, the last one 1. Allocates
  // nothing; safe to call concurrently on distinct slots. Workers divide the
  // sequences, the heads and, where these are few, the rows of a state. The
  // bits depend on none of that. Cost: in decode one read and one write of each
  // state, at the rate of memory.
  void Execute(const StateUpdateArgs& args, Executor& executor) const noexcept;

 private:
  explicit StateUpdatePlan(const StateUpdateSpec& spec);

  StateUpdateSpec spec_;
  StateUpdateKernels kernels_;
  RowBlockKernels blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_UPDATE_H_
