#ifndef QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_H_
#define QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_H_

#include <limits>

namespace quern {

// The softmax of some logits: their maximum, and the sum of exp2(logit - max).
// The initial values are those of no logits, the identity of merging.
struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_H_
