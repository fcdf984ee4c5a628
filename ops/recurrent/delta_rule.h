#ifndef QUERN_OPS_RECURRENT_DELTA_RULE_H_
#define QUERN_OPS_RECURRENT_DELTA_RULE_H_

// The gated delta rule (Qwen3-Next and after) and KDA (Kimi Linear), token by
// token in decode and by chunks of tokens in a prompt. For each value head,
// with its state S[dk, dv]:
//
//   S <- diag(a) S                        a = exp(min(g, 0))
//   d  = beta (v - S^T k)
//   S <- S + k d^T
//   out = S^T q                           the q of the formula is scale * q
//
//   kPerHead      g is one number for a head      gated delta rule
//   kPerChannel   g has dk numbers for a head     KDA
//
// Value head h has key head h / (value_heads / key_heads). With kL2, q and k
// are first divided by sqrt(sum of squares over dk + norm_eps).
//
// Token by token there are two sweeps over S, which is all that is large: one
// gathers A = S^T (a k) and B = S^T (a q), the other writes a S + k d^T, where
// d = beta (v - A) and out = B + (k . q) d.
//
// A sequence that has kChunkedFrom tokens or more in a call goes by chunks,
// which begin at its first token of the call: the d of a chunk are the solution
// of a triangular system, and everything else is a product of matrices. See
// delta_chunks.h.
//
// Drafts, whose states go to several slots (sequence_batch.h), go token by
// token, whatever their number, and have the bits of decode steps.
//
// All arithmetic is in f32. Token by token the state is rounded to state_dtype
// after every token, to nearest even, so a sequence that is cut into several
// calls has the bits of one call, as long as every call has fewer than
// kChunkedFrom of its tokens. By chunks the state is rounded once a call, and
// other cuts differ by roundings. out comes from the state before it is
// rounded, and is rounded once.
//
// g > 0 counts as 0: a decay never makes a state grow. g = -infinity forgets
// all that is finite. Decays of several tokens are products of numbers in
// [0, 1], so none overflows. A NaN in g, beta or k makes the state and the
// output of its value heads NaN from its token on, a NaN in q the output of its
// token, a NaN in v its column of both. It reaches no earlier token, no other
// head and no other sequence. An infinity in q, k or v may become NaN by chunks
// where it stays infinite token by token.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/chunk_kernels.h"
#include "quern/ops/recurrent/delta_rule_kernels.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

enum class DeltaDecay : uint8_t { kPerHead, kPerChannel };
enum class DeltaNorm : uint8_t { kNone, kL2 };

struct DeltaRuleSpec {
  int64_t key_heads = 0;            // >= 1
  int64_t value_heads = 0;          // a multiple of key_heads
  int64_t dk = 0;                   // 1 <= dk <= kMaxDk
  int64_t dv = 0;                   // >= 1
  DType dtype = DType::kF32;        // of q, k, v and out: f32, bf16 or f16
  DType state_dtype = DType::kF32;  // f32, bf16 or f16
  DType beta_dtype = DType::kF32;   // f32, bf16 or f16
  DType g_dtype = DType::kF32;      // f32, bf16 or f16
  DeltaDecay decay = DeltaDecay::kPerHead;
  DeltaNorm norm = DeltaNorm::kNone;  // of q and k
  float scale = 0.0f;                 // of q; 0: 1 / sqrt(dk)
  float norm_eps = 1e-6f;             // of kL2, >= 0
  int64_t null_slot = -1;             // state index of a sequence to skip
  // Tokens of a chunk: 8 to kMaxChunk; 1: every sequence goes token by token;
  // 0: the plan chooses.
  int64_t chunk = 0;
};

struct DeltaRuleArgs {
  AnyTensorView q;      // [tokens, key_heads, dk]
  AnyTensorView k;      // [tokens, key_heads, dk]
  AnyTensorView v;      // [tokens, value_heads, dv]
  AnyTensorView g;      // [tokens, value_heads], per channel with [.., dk]
  AnyTensorView beta;   // [tokens, value_heads]
  AnyTensorView state;  // [slots, value_heads, dk, dv]
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, value_heads, dv]
};

class DeltaRulePlan {
 public:
  // Vectors of dk elements lie on the stack: five of them are 20 KiB. A
  // sequence of several tokens that goes token by token takes 104 KiB of it.
  static constexpr int64_t kMaxDk = 1024;
  static constexpr int64_t kMaxChunk = 128;
  // A sequence with this many tokens in a call, or more, goes by chunks.
  static constexpr int64_t kChunkedFrom = 16;
  // The chunk that the plan chooses where the spec has 0, as measured in
  // docs/performance_notes.md.
  static constexpr int64_t kChunk = 16;

  // InvalidArgument if a number of the spec is out of range or scale is not
  // finite; Unimplemented for other dtypes.
  static absl::StatusOr<DeltaRulePlan> Create(const DeltaRuleSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // Scale and chunk are those that the plan chose.
  const DeltaRuleSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for up to max_tokens tokens on up to
  // max_workers workers: a copy of one head's state and of one chunk's inputs
  // for each worker (128 to 151 KiB at dk = dv = 128), and nothing below
  // kChunkedFrom tokens. InvalidArgument if max_tokens < 0 or max_workers < 1.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; a state index that is out of range or given twice; starts that
  // decrease or leave the tokens; drafts that CheckSequences refuses; a state
  // that touches another tensor; out on anything but the elements of v.
  absl::Status CheckArgs(const DeltaRuleArgs& args) const;
  // Like CheckArgs, but for g and beta, which the caller makes in memory of its
  // own: they are not compared with the other tensors.
  absl::Status CheckArgsButGates(const DeltaRuleArgs& args) const;

  // Writes the slots that are named, and out for the tokens of all sequences:
  // zeros for a sequence whose index is null_slot. Tokens that no
  // sequence has, such as padding, are neither read nor written: out keeps what
  // it held there. The state of a sequence without tokens is not touched
  // either. out may be v itself. Views may have any strides, the last one 1.
  // Allocates nothing; safe to call concurrently on distinct slots, each call
  // with its own workspace. Workers divide the sequences, the heads and, where
  // these are few, the columns of the state. The bits of a sequence depend
  // neither on this division nor on the other sequences of the call. Cost: in
  // decode one read and one write of each state, at the rate of memory; by
  // chunks of C tokens 3 dk dv + C (dk + dv) multiply-adds for each token and
  // value head. Drafts, and other sequences of several tokens, read the state
  // once and write those that are kept; what is between them stays in L1, and
  // each token takes four multiplications for each element of the state. So
  // where memory is the limit n kept states take (1 + n) / 2 of the time of a
  // decode step. States of f32 whose rows are aligned to 64 bytes go past the
  // caches, unless to the slot that was read; others take up to (1 + 2 n) / 2,
  // because a write first reads its lines.
  void Execute(const DeltaRuleArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  explicit DeltaRulePlan(const DeltaRuleSpec& spec);

  // Whether the sequence goes by chunks.
  bool Chunked(const SequenceBatch& batch, int64_t sequence) const;
  void ExecuteChunks(const DeltaRuleArgs& args, int64_t* chunked, int64_t count,
                     uint8_t* memory, Executor& executor) const;
  void ExecuteTokens(const DeltaRuleArgs& args, int64_t sequences,
                     int64_t tokens, Executor& executor) const;

  DeltaRuleSpec spec_;
  DeltaRuleKernels kernels_;
  ChunkKernels chunks_;
  RowBlockKernels blocks_;
  RowBlockKernels states_;
  RowBlockKernels gates_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_RULE_H_
