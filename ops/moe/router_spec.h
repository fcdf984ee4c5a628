#ifndef QUERN_OPS_MOE_ROUTER_SPEC_H_
#define QUERN_OPS_MOE_ROUTER_SPEC_H_

// Which experts a token goes to, and with which weights, from its logits
// l[experts]. Every form of router is a value of RouterSpec:
//
//   s[e] = score(l[e])
//     kSoftmax       e^l[e] / sum over all experts of e^l
//     kSigmoid       1 / (1 + e^-l[e])
//     kSqrtSoftplus  sqrt(ln(1 + e^l[e]))
//   c[e] = biased ? s[e] + bias[e] : l[e]          decides, weighs nothing
//   a group is experts / groups consecutive experts; its score is
//     biased ? the sum of its two largest c : its largest c
//   ids     = the top_k largest c within the top_groups best groups
//   w[j]    = s[ids[j]]                             never the bias
//   w[j]   /= sum over the top_k of w               if renormalize
//   weights = w * scale
//
//   model                     spec
//   Mixtral, Qwen3-MoE        kSoftmax, renormalize
//   OLMoE, Qwen2-MoE          kSoftmax
//   GPT-OSS                   kSoftmax, renormalize: that is the softmax over
//                             the chosen logits. Its bias is the linear
//                             layer's, and in the logits already.
//   Llama-4                   kSigmoid, top_k = 1
//   DeepSeek-V2               kSoftmax, groups, scale
//   DeepSeek-V3, Kimi, GLM    kSigmoid, biased, groups, renormalize, scale
//   DeepSeek-V4               kSqrtSoftplus, biased, renormalize, scale
//
// Scores grow with logits, so without a bias the logits decide, which no
// rounding of a score can make equal.
//
// "Largest" is a strict order: by number, and of equal numbers the lower expert
// or group first. The results are in that order. ids are distinct and in
// [0, experts) whatever the logits are. A logit of NaN or -infinity counts as
// the lowest finite f32, and +infinity as the highest; so do c and the score of
// a group. So all experts have the same score in a row without any number:
// without a bias it gives the first top_k of them, and weights are finite
// where scale times the largest score, 1 or for kSqrtSoftplus 2^64, is finite.
// Weights whose sum is 0 are left as they are, 0, by renormalize.
//
// Arithmetic is f32. A score is within so many units of 2^-24, relative, of its
// formula, before the division by the sum of a softmax:
//
//   kSoftmax 6 + 1.1 (max l - l[e])    kSigmoid 16    kSqrtSoftplus 16
//
// A sum of n scores and the quotient by it add 20 + n / 4, the scale adds 1;
// and there is an absolute error of 2^-120 (kSqrtSoftplus: 2^-60), below which
// bits are lost to denormals.

#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

struct RouterSpec {
  // A row of all experts lies on the stack of a worker.
  static constexpr int64_t kMaxExperts = 1024;
  static constexpr int64_t kMaxTopK = 64;

  int64_t experts = 0;  // 1 <= experts <= kMaxExperts
  int64_t top_k = 0;    // 1 <= top_k <= kMaxTopK, experts of top_groups
  RouterScore score = RouterScore::kSoftmax;
  bool biased = false;       // there is a bias[experts]
  bool renormalize = false;  // the weights of a token sum to `scale`
  float scale = 1.0f;        // "routed scaling factor": finite, > 0
  int64_t groups = 1;        // divides experts; with a bias, 2 experts or more
  int64_t top_groups = 1;    // 1 <= top_groups <= groups
  DType logits_dtype = DType::kF32;  // f32, bf16 or f16
  DType bias_dtype = DType::kF32;    // f32, bf16 or f16

  int64_t GroupExperts() const { return experts / groups; }
};

}  // namespace quern

#endif  // QUERN_OPS_MOE_ROUTER_SPEC_H_
