#ifndef QUERN_OPS_SPECULATION_RECOVERED_TOKENS_H_
#define QUERN_OPS_SPECULATION_RECOVERED_TOKENS_H_

// Draws the token that replaces each draft token if that is rejected:
//
//   w[v]   = max(target_probs[t, v] - draft_probs[t, v], 0)
//            without draft_probs: target_probs[t, v], and 0 for v = draft t
//   out[t] = the v < vocab with the largest w[v] * inv_q[r, v], the lowest of
//            equal ones
//
// inv_q[r, v] = 1 / e for draws e from the exponential distribution makes out a
// draw with probability w[v] / sum of w. Request r has the drafts t as in
// rejection.h. Difference and product are rounded to f32, once each.
//
// A difference that is NaN counts as 0, and a product that is NaN or at most -1
// never wins. 0 is the result where nothing wins.
//
//   output_token_ids     [tokens], written; i32 or i64
//   cu_num_draft_tokens  [requests]; i32 or i64
//   draft_token_ids      [tokens], read without draft_probs alone; i32 or i64
//   target_probs, draft_probs  f32 [tokens, vocab]
//   inv_q                f32 [requests, vocab]
//
// Tokens from the last end on are left as they are. Refused: ends that decrease
// or exceed tokens, and without draft_probs a draft outside [0, vocab).
//
// Reads target_probs and draft_probs once. Tokens are divided among workers;
// the result is the same on every instruction set.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/recovered_tokens_kernels.h"

namespace quern {

struct RecoveredTokensSpec {
  int64_t vocab = 0;        // 1 <= vocab < 2^31
  bool draft_probs = true;  // whether there are any
  bool wider = false;       // rows may have more columns than vocab
};

struct RecoveredTokensArgs {
  AnyTensorView output_token_ids;
  AnyTensorView cu_num_draft_tokens, draft_token_ids;
  AnyTensorView draft_probs, target_probs, inv_q;
};

class RecoveredTokensPlan {
 public:
  static absl::StatusOr<RecoveredTokensPlan> Create(
      const RecoveredTokensSpec& spec);

  const RecoveredTokensSpec& spec() const { return spec_; }
  const char* target() const { return kernels_.target; }

  absl::Status CheckArgs(const RecoveredTokensArgs& args) const;
  void Execute(const RecoveredTokensArgs& args,
               Executor& executor) const noexcept;

 private:
  RecoveredTokensPlan(const RecoveredTokensSpec& spec,
                      const RecoveredTokensKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  // The recovered token of draft t, which is one of request r.
  int64_t TokenOf(const RecoveredTokensArgs& args, int64_t t, int64_t r) const;

  RecoveredTokensSpec spec_;
  RecoveredTokensKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_RECOVERED_TOKENS_H_
