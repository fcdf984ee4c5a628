#ifndef QUERN_OPS_SPECULATION_REJECTION_H_
#define QUERN_OPS_SPECULATION_REJECTION_H_

// Verifies the tokens that a draft model proposed. Request r has the drafts
// cu_num_draft_tokens[r - 1] .. cu_num_draft_tokens[r] of all vectors of
// tokens; cu_num_draft_tokens[-1] is 0.
//
//   greedy   draft t is accepted if it is target_argmax[t]
//   random   draft t is accepted if p / q >= uniform_probs[t], with
//            p = target_probs[t, draft] and q = draft_probs[t, draft], or q = 1
//            without draft_probs
//
// output_token_ids[r] gets the accepted drafts, then one more token: where a
// draft was rejected, target_argmax (greedy) or recovered_token_ids (random) of
// that draft, and bonus_token_ids[r] where all were accepted. What follows in
// the row is left as it is; callers fill it with -1 before. Recovered tokens
// that RecoveredTokensPlan draws (recovered_tokens.h) leave the distribution of
// the target model (Leviathan, Kalman, Matias 2023).
//
// Each request has parameters of its own: is_greedy[r], u8, says which of the
// two verifies it, and each leaves the requests of the other alone. Left out,
// all are verified.
//
// The quotient is 0 unless q > 0: where q is 0, negative or NaN, the draft is
// accepted if uniform_probs[t] <= 0, whatever p is. With q > 0, a quotient that
// is NaN rejects the draft. A uniform_probs[t] that is NaN always does. A
// request may have no drafts; its one token is the bonus.
//
//   output_token_ids     [requests, cols], written
//   cu_num_draft_tokens  [requests]
//   draft_token_ids, target_argmax, recovered_token_ids, uniform_probs f32
//                        [tokens]
//   bonus_token_ids      [requests] or [requests, 1]
//   draft_probs, target_probs  f32 [tokens, vocab]
//
// Numbers are i32 or i64; all token ids have one type. Refused: more drafts of
// a request than max_drafts or cols - 1, ends that decrease or exceed tokens,
// and, where probabilities are looked up by it, a draft outside [0, vocab).

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/loop_plan.h"

namespace quern {

struct GreedyRejectionSpec {
  int64_t max_drafts = -1;  // of a request; -1: what output_token_ids holds
};
struct RandomRejectionSpec {
  int64_t vocab = 0;
  int64_t max_drafts = -1;
  bool draft_probs = true;  // whether there are any
  bool wider = false;       // probabilities may have more columns than vocab
};

struct RejectionArgs {
  AnyTensorView output_token_ids;
  AnyTensorView cu_num_draft_tokens, draft_token_ids, bonus_token_ids;
  AnyTensorView is_greedy;                                 // or no view
  AnyTensorView target_argmax;                             // greedy
  AnyTensorView draft_probs, target_probs, uniform_probs;  // random
  AnyTensorView recovered_token_ids;                       // random
};
struct GreedyRejectionArgs : RejectionArgs {};
struct RandomRejectionArgs : RejectionArgs {};

using GreedyRejectionPlan = LoopPlan<GreedyRejectionSpec, GreedyRejectionArgs>;
using RandomRejectionPlan = LoopPlan<RandomRejectionSpec, RandomRejectionArgs>;

absl::Status Check(const GreedyRejectionSpec& spec);
absl::Status Check(const GreedyRejectionSpec& spec,
                   const GreedyRejectionArgs& args);
void Run(const GreedyRejectionSpec& spec, const GreedyRejectionArgs& args);

absl::Status Check(const RandomRejectionSpec& spec);
absl::Status Check(const RandomRejectionSpec& spec,
                   const RandomRejectionArgs& args);
void Run(const RandomRejectionSpec& spec, const RandomRejectionArgs& args);

// Gives each token the value of its request: output[t] = input[r] for
// cu_num_tokens[r - 1] <= t < cu_num_tokens[r], with replace_to in place of
// replace_from. input[requests] and output[tokens] are f32, i32 or i64, both
// the same; a NaN equals nothing, and no i32 equals a replace_from that i32
// does not hold. Elements of output from the last end on are left as they are.
// Refused: replace_to that an integer type does not hold.
struct ExpandSpec {
  int64_t replace_from = 0, replace_to = 0;
};
struct ExpandArgs {
  AnyTensorView output, input, cu_num_tokens;
};
using ExpandPlan = LoopPlan<ExpandSpec, ExpandArgs>;

absl::Status Check(const ExpandSpec& spec);
absl::Status Check(const ExpandSpec& spec, const ExpandArgs& args);
void Run(const ExpandSpec& spec, const ExpandArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_REJECTION_H_
