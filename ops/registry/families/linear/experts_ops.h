#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Mixtures of experts, x[n, hidden] -> [n, hidden], in f32, bf16 or f16;
// out_dtype is x's where it is "". ExpertWeights is that of ops/moe/experts.h,
// whose equation and rounding these have; it may be dropped once the operator
// is made.
//
//   modular_fused_moe, transformers_fused_moe, fused_experts_cpu
//       with routes that the caller has: topk_weights f32[n, k], topk_ids
//       i32[n, k]. An id of -1, or one that expert_map i32[all experts] maps to
//       -1, adds nothing.
//   fused_moe, unquantized_fused_moe
//       route themselves, as grouped_topk does with router_logits[n, experts];
//       unquantized_fused_moe refuses weights that are not f32, bf16 or f16.
//
// activation is "silu", "gelu", "gelu_tanh" or "swigluoai" with gate and up
// packed together (gated = true), or one of the first three with "_no_mul".
// apply_router_weight_on_input needs k = 1. shared_output[n, hidden], what
// shared experts give, or a residual stream, is added before the one rounding;
// it may be where the result is. `ranks` sums the results of all ranks, each
// rounded, with what each rank's shared_output has added: give it on one rank,
// or give each its part. `activations` is that of `linear`, for weights
// that allow it.
//
// Providers: simd; reference, which never rounds rows, whatever `activations`.
absl::Status RegisterExpertsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_H_
