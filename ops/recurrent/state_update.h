#ifndef QUERN_OPS_RECURRENT_STATE_UPDATE_H_
#define QUERN_OPS_RECURRENT_STATE_UPDATE_H_

// The selective state update of Mamba-1 and Mamba-2, token by token in decode
// and, for Mamba-2, by chunks of tokens in a prompt (SSD). For each head and
// row p of its state s[head_dim, d_state], with group h / (heads / groups):
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
// A sequence of kPerHead that has kChunkedFrom tokens or more in a call goes by
// chunks, which begin at its first token of the call: everything is a product
// of matrices then. See state_chunks.h.
//
// Drafts, whose states go to several slots (sequence_batch.h), go token by
// token, whatever their number, and have the bits of decode steps.
//
// All arithmetic is in f32. Token by token the state is rounded to state_dtype
// after every token, to nearest even, so a sequence that is cut into several
// calls has the bits of one call, as long as every call has fewer than
// kChunkedFrom of its tokens. By chunks the state is rounded once a call, and
// other cuts differ by roundings. out comes from the state before it is
// rounded, and is rounded once. Sums over n have an order that the instruction
// set determines.
//
// a delta > 0 counts as 0: a decay never makes a state grow. Decays of several
// tokens are products of numbers in [0, 1], so none overflows. A NaN in dt, a,
// b, c, d, z or x makes the rows NaN that the formula takes it to, and no
// others, from its token on. An infinity in x, b or c may become NaN by chunks
// where it stays infinite token by token.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/chunk_kernels.h"
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
  DType dtype = DType::kF32;        // of x, dt, z and out
  DType state_dtype = DType::kF32;  // all f32, bf16 or f16
  std::optional<DType> bc_dtype;    // of b and c; none: dtype
  int64_t null_slot = -1;           // state index of a sequence to skip
  // Tokens of a chunk, of kPerHead: 8 to kMaxChunk; 1: every sequence goes
  // token by token; 0: the plan chooses.
  int64_t chunk = 0;

  DType BcDType() const { return bc_dtype.value_or(dtype); }
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
  static constexpr int64_t kMaxChunk = 128;
  // A sequence with this many tokens in a call, or more, goes by chunks.
  static constexpr int64_t kChunkedFrom = 16;
  // The chunk that the plan chooses where the spec has 0, as measured in
  // docs/performance_notes.md.
  static constexpr int64_t kChunk = 32;

  // InvalidArgument if a number of the spec is out of range; Unimplemented for
  // other dtypes.
  static absl::StatusOr<StateUpdatePlan> Create(const StateUpdateSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // chunk is what the plan chose, 1 for kPerRow.
  const StateUpdateSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for up to max_tokens tokens on up to
  // max_workers workers: copies of a few heads' states and of one chunk's
  // inputs for each worker (460 KiB at head_dim = 64, d_state = 128), and
  // nothing below kChunkedFrom tokens or for kPerRow. InvalidArgument if
  // max_tokens < 0 or max_workers < 1.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; a state index that is out of range or given twice; starts that
  // decrease or leave the tokens; drafts that CheckSequences refuses; a state
  // that touches another tensor; out on anything but the elements of x or z.
  absl::Status CheckArgs(const StateUpdateArgs& args) const;

  // Writes the slots that are named, and out for the tokens of all sequences:
  // zeros for a sequence whose index is null_slot. Tokens that no
  // sequence has, such as padding, are neither read nor written: out keeps what
  // it held there. The state of a sequence without tokens is not touched
  // either. out may be x or z. Views may have any strides, the last one 1.
  // Allocates nothing; safe to call concurrently on distinct slots, each call
  // with its own workspace. Workers divide the sequences, the heads and, where
  // these are few, the rows of a state. The bits of a sequence depend on none
  // of that, nor on the other sequences of the call. Cost: in decode one read
  // and one write of each state, at the rate of memory; by chunks of C tokens 2
  // head_dim d_state + C head_dim / 2 multiply-adds for each token and head,
  // and C d_state / 2 for each token and group, or for every few heads. Drafts,
  // and other sequences of several tokens, take three multiplications for each
  // token and element of the state, which stays in registers, and 80 KiB of the
  // stack. Where memory is the limit, those that keep n states cost (1 + n) / 2
  // to (1 + 2 n) / 2 decode steps, as in delta_rule.h.
  void Execute(const StateUpdateArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  explicit StateUpdatePlan(const StateUpdateSpec& spec);

  // Whether the sequence goes by chunks.
  bool Chunked(const SequenceBatch& batch, int64_t sequence) const;
  void ExecuteChunks(const StateUpdateArgs& args, int64_t* chunked,
                     int64_t count, uint8_t* memory, Executor& executor) const;
  void ExecuteTokens(const StateUpdateArgs& args, int64_t sequences,
                     int64_t tokens, Executor& executor) const;

  StateUpdateSpec spec_;
  StateUpdateKernels kernels_;
  ChunkKernels chunks_;
  RowBlockKernels blocks_;
  RowBlockKernels bc_blocks_;
  RowBlockKernels states_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_UPDATE_H_
