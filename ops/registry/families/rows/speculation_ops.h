#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_SPECULATION_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_SPECULATION_OPS_H_

// Rejection sampling of the tokens that a draft model proposed, over the plans
// of ops/speculation, whose headers have the equations, shapes and refusals.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rejection_sample_greedy, rejection_sample: the accepted drafts of each
// request and one more token, into output_token_ids
// (ops/speculation/rejection.h). The requests that is_greedy marks belong to
// the first, the others to the second; without is_greedy, all belong to either.
//
// sample_recovered_tokens: for each draft token the one that replaces it if it
// is rejected (ops/speculation/recovered_tokens.h). It has the providers simd
// and reference. The other three operators have reference alone, plain loops.
//
// expand_to_tokens: a number of each request, given to each of its tokens.
//
// draft_probs may be left out: each draft was certain.
absl::Status RegisterSpeculationOps(OpRegistry& registry);

// Registers rejection sampling under our names or vLLM's. vLLM's take three
// arguments more: max_spec_len, vocab_size and no_draft_probs, which says that
// draft_probs is not read.
enum class RejectionNames : uint8_t { kOurs, kVllm };
absl::Status AddRejectionOps(RejectionNames names, OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_SPECULATION_OPS_H_
