#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_MOE_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_MOE_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// topk_softmax, topk_sigmoid, grouped_topk: gating_output[n, experts] in f32,
// bf16 or f16 -> weights f32[n, topk] and ids i32[n, topk]. Equations, order of
// the results and of ties, and what NaN is: ops/moe/router_spec.h.
//
// A bias f32, bf16 or f16[experts] takes part in the choice alone. Without one,
// the groups of grouped_topk count by their largest expert, with one by the sum
// of their two largest. scoring_func is "softmax", "sigmoid" or "sqrtsoftplus".
// hidden_states[n, any], in any dtype, says how many rows there must be, and
// its elements are not read. Experts that num_expert_group does not divide are
// refused: there is no fallback to another rule.
//
// Logits of 16 bits become f32 before anything else, by both providers: scores
// rounded to 16 bits would be equal too often. Providers: simd, reference.
absl::Status RegisterMoeOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_MOE_OPS_H_
