#ifndef QUERN_OPS_SAMPLING_DRAW_H_
#define QUERN_OPS_SAMPLING_DRAW_H_

// Private: how the sampler chooses the token of one row (sampler.h has the
// equation). The row is read once for its largest logits, by blocks. Blocks
// whose largest logit shows that they have no candidate are not read again.

#include <cstdint>

#include "quern/ops/sampling/sampler.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {

// Scratch memory of one worker.
struct DrawScratch {
  float* weights;     // of every token, padded to whole blocks
  int32_t* ids;       // candidates, or the bucket of every token; padded
  float* largest;     // of each block
  float* order;       // the same, to be sorted
  double* sums;       // of each block's weights
  int32_t* gathered;  // blocks that have candidates
};

// The lowest id of the largest logit, or SamplerPlan::kNoToken.
int32_t GreedyToken(const float* logits, int64_t vocab,
                    const SamplerKernels& kernels);

// The token that a row's params draw; params.temperature > 0.
int32_t DrawToken(const float* logits, int64_t vocab,
                  const SamplingParams& params, const SamplerKernels& kernels,
                  const DrawScratch& scratch);

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_DRAW_H_
