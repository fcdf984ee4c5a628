#ifndef QUERN_OPS_REGISTRY_VLLM_MERGE_STATES_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_MERGE_STATES_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// merge_attn_states, by vLLM's name and with its arguments: attention over a
// prefix and over what follows it become attention over both, by
// attention/merge_states.h, whose equations and roundings it has.
//
// output, prefix_output and suffix_output[tokens, heads, head_dim], with any
// strides of tokens and heads, are f32, bf16 or f16, the last two of one dtype;
// output_lse, which may be left out, prefix_lse and suffix_lse are f32[heads,
// tokens]. output and output_lse may be where a part of the same shape is.
// Tokens from prefill_tokens_with_context on have no prefix, and get output and
// lse of the suffix; -1: all tokens have one. An fp8 output does not exist
// here. Where neither part has a key (both lse are of -inf or +inf), output is
// 0 and output_lse is -inf; vLLM copies prefix_output, which it takes for 0.
//
// Providers: simd, and reference, which runs plain loops in double.
absl::Status RegisterVllmMergeStatesOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_MERGE_STATES_OPS_H_
