#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

// How each row of a step is sampled. `sample` is made with the address of a
// SamplingStep, which the engine refills for each step.
struct SamplingStep {
  absl::Span<const SamplingParams> params;
};

// sample: logits f32[rows, vocab] -> the token of each row, i32[rows]. The
// equation is in ops/sampling/sampler.h. A token does not depend on the
// instruction set, so the provider reference is the same code as simd.
//
// adjust_logits: changes logits f32[rows, vocab] in place, by a grammar's mask,
// forbidden ids, biases and penalties (ops/sampling/adjust_logits.h). ids of
// row r are elements starts[r] to starts[r + 1] of a list. Ids, starts, counts
// and mask_rows are i32 or i64; bitmask is i32[masks, words].
//
// token_logprobs: logits f32[rows, vocab], ids i32[rows, given] -> ids and
// log-probabilities of the top_n likeliest tokens, and log-probabilities and
// ranks of the given ones (ops/sampling/token_logprobs.h).
absl::Status RegisterSamplingOps(OpRegistry& registry);

// Parts of RegisterSamplingOps, which calls them.
absl::Status RegisterAdjustLogits(OpRegistry& registry);
absl::Status RegisterTokenLogprobs(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_
