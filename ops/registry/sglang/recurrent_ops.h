#ifndef QUERN_OPS_REGISTRY_SGLANG_RECURRENT_OPS_H_
#define QUERN_OPS_REGISTRY_SGLANG_RECURRENT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Gated delta rules by the names of SGLang's and vLLM's operators of a CPU,
// over the plans of ops/recurrent, whose equations and roundings they have. A
// tensor lacks the dimension of 1 that theirs have in front of the tokens;
// Python's doors take it away. Indices and starts are i32 or i64, slots may be
// padded, and states are written in their pool and not returned.
//
// fused_gdn_gating_cpu: ops/recurrent/delta_gates.h, out0 = g in f32 and out1 =
// beta in b's dtype, for a and b [tokens, heads].
//
// fused_sigmoid_gating_delta_rule_update_cpu: ops/recurrent/gated_delta_rule.h,
// token by token. softplus_beta must be 1. softplus_threshold, above which
// theirs take x for ln(1 + e^x), must be 17 or more and has no effect, because
// the two differ by less than a rounding to f32 there.
//
// fused_sigmoid_gating_delta_rule_update_spec_cpu: the same for drafts, as vLLM
// has it, by spec_state_indices[sequences, columns] and num_accepted_tokens.
// SGLang's operator of this name leaves states in a second pool, which is not
// taken.
//
// chunk_gated_delta_rule_cpu: ops/recurrent/delta_rule.h. output_final_state
// has no effect, head_first must be false, and eps is norm_eps.
absl::Status RegisterSglangDeltaRuleOps(OpRegistry& registry);

// causal_conv1d_weight_pack: weight[channels, 4], of a multiple of 32 channels,
// into the pairs of ConvWeightLayout::kPairs.
//
// causal_conv1d_fwd_cpu, causal_conv1d_update_cpu:
// ops/recurrent/causal_conv1d.h on x[tokens, channels], which is the memory of
// SGLang's x. conv_states are [slots, width - 1, channels] or, dense, [slots,
// channels, width - 1], and are not re-laid as SGLang does. States of as many
// rows as channels, [slots, c, c], are read as [slots, width - 1, channels].
// They and the slots must be given. is_vnni says that causal_conv1d_weight_pack
// made the weight. cache_seqlens must be left out. pad_slot_id is null_slot.
absl::Status RegisterSglangConvOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_RECURRENT_OPS_H_
