#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MLA_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MLA_OPS_H_

#include "absl/status/status.h"
#include "quern/attention/schedule_bound.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What one step knows of its sequences. multi_head_latent_attention is made
// with the address of an MlaStep, which the engine refills for each step,
// before CheckArgs, WorkspaceBytes and Execute. All layers of one shape share
// it.
struct MlaStep {
  // Built with MlaSpecOf(weights, layout) of any of the layers.
  MlaSchedule schedule;
  // Upper limits over all steps. With max_sequences > 0, WorkspaceBytes is
  // enough for every step of up to max_rows tokens within these limits;
  // otherwise it is enough for the schedule above only.
  AttentionLimits limits = {};
};

// multi_head_latent_attention: DeepSeek's layer of ops/mla/mla.h, whose
// equations, roundings and refusals it has, from hidden_states[tokens, hidden]
// to [tokens, hidden] in f32, bf16 or f16. positions[tokens] are i32 or i64;
// q_norm [q_lora] is given where the weights have q_a; kv_norm is [kv_lora].
// New latents go to u8 cache[pages, page_bytes], whose pages `step` names and
// whose layout, which is copied, is latent: of f32, bf16 or f16, or f8e4m3 with
// a scale for each block of 128 (KvScaling::kPerBlock). MlaWeights
// (ops/mla/mla_weights.h) are read while the operator is made and dropped
// afterwards as for `linear`. The RotaryEmbeddingPlan of q and k serves all
// layers and outlives them. scale 0 means 1 / sqrt(nope + rope); MlaScale gives
// DeepSeek's. The result has the dtype out_dtype, or that of hidden_states
// where it is "". residual[tokens, hidden], of the result's dtype, is added
// before the one rounding; it may be where the result is. `ranks` sums the
// results of all ranks, each of which has some of the heads: give the residual
// on one of them. `activations` is that of `linear`, for weights that allow
// it.
//
// Providers: simd, and reference, which runs plain loops with sums in double on
// the calling thread, the absorbed form for every token. It never rounds rows,
// whatever `activations`. Packs nothing. Brings gemm and attention along.
absl::Status RegisterMlaOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MLA_OPS_H_
