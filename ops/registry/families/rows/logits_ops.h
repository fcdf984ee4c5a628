#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_LOGITS_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_LOGITS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What an engine does with logits before and beside the sampler.
//
// adjust_logits: changes logits f32[rows, vocab] in place, by a grammar's mask,
// forbidden ids, biases and penalties (ops/sampling/adjust_logits.h). ids of
// row r are elements starts[r] to starts[r + 1] of a list. Ids, starts, counts
// and mask_rows are i32 or i64; bitmask is i32[masks, words].
//
// token_logprobs: logits f32[rows, vocab], ids i32[rows, given] -> ids and
// log-probabilities of the top_n likeliest tokens, and log-probabilities and
// ranks of the given ones (ops/sampling/token_logprobs.h).
absl::Status RegisterLogitsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_LOGITS_OPS_H_
