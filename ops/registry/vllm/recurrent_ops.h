#ifndef QUERN_OPS_REGISTRY_VLLM_RECURRENT_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_RECURRENT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// vLLM's operators of Mamba on a CPU (torch_bindings.cpp of September 2026), by
// its names and with its arguments, whose capitals are small letters here;
// equations and roundings are those of ops/recurrent/state_update.h and
// ops/recurrent/causal_conv1d.h. Indices and starts are i32 or i64.
//
// selective_state_update_cpu: state[slots, heads, head_dim, d_state] is
// written, and so is out[tokens, heads, head_dim]. A, D and dt_bias are f32,
// and with dt[tokens, ..] a number for each head (Mamba-2), or A[heads,
// head_dim, d_state] and the others [.., heads, head_dim] (Mamba-1): tensors
// that are expanded come as what they were expanded from. state_batch_indices
// must be given; null_block_id is the slot of a sequence to skip, whose outputs
// are zeros. cu_seqlens[sequences + 1], dst_state_batch_indices and
// num_accepted_tokens are as in families/recurrent/recurrent_ops.h.
//
// mamba_chunk_scan_fwd_cpu: prompts of Mamba-2. final_states f32[sequences,
// heads, head_dim, d_state] has the states that sequences begin with, and then
// those that they end with. x, z and out[tokens, heads, head_dim] are f32, bf16
// or f16, and so are b and c[tokens, groups, d_state]; dt f32[tokens, heads]
// has its bias and its softplus, a and d are f32[heads]; cu_seqlens[sequences +
// 1]. Arithmetic is f32, and out is rounded once. Tokens outside of all
// sequences keep what out had.
//
// causal_conv1d_update_cpu_vec: causal_conv1d_update with pad_slot_id in place
// of null_slot, x[tokens, channels], conv_state[slots, width - 1 or more,
// channels] or [slots, channels, width - 1 or more], and conv_state_indices,
// which must be given. activation is "silu", "swish" or "". What is returned
// may be x.
//
// Providers: simd and reference.
absl::Status RegisterVllmRecurrentOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_RECURRENT_OPS_H_
