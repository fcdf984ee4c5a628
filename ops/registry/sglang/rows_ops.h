#ifndef QUERN_OPS_REGISTRY_SGLANG_ROWS_OPS_H_
#define QUERN_OPS_REGISTRY_SGLANG_ROWS_OPS_H_

// SGLang's operators on rows, by its names and with its arguments, over the
// plans of ops/. Rows are f32, bf16 or f16, which SGLang takes in 16 bits
// alone. They have the providers simd and reference, but for copies.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// silu_and_mul_cpu, gelu_and_mul_cpu (the exact GELU) and
// gelu_tanh_and_mul_cpu: input[.., 2 d], a gate before what it is multiplied
// with, into [.., d] (ops/activation/act_and_mul.h).
//
// fused_sigmoid_mul_cpu: input[tokens, n] * sigmoid(gate), in f32 with one
// rounding (ops/activation/sigmoid_mul.h). gate is [tokens, n], or [tokens,
// heads, n / heads] with any token and head strides, and has the dtype of
// input. out may be input. With inplace it must be, because whoever asks for it
// reads input afterwards.
absl::Status RegisterSglangActivationOps(OpRegistry& registry);

// Norms of input[.., hidden]. All that is read and written has one dtype;
// weight and bias may also be f32. Each computes in f32 and rounds its result
// once, and a sum with a residual once for the residual: the norm is that of
// the f32 sum, as in SGLang.
//
// rmsnorm_cpu; gemma_rmsnorm_cpu and gemma3_rmsnorm_cpu, whose weight is 1 +
// weight; gemma4_rmsnorm_cpu, whose weight is scale_shift + weight, or 1
// without with_scale, where weight is not read; l2norm_cpu, which is an RMS
// norm without a weight and divides by the root of a mean, unlike l2_norm
// (ops/norm/rms_norm.h). input may be [tokens, heads, hidden] with any strides.
//
// fused_rmsnorm_gated_cpu: rmsnorm_cpu * silu(gate)
// (ops/norm/rms_norm_gated.h).
//
// fused_add_rmsnorm_cpu and gemma_fused_add_rmsnorm_cpu: residual += input, and
// input becomes the norm of the sum.
//
// layernorm_cpu, and fused_add_layernorm_cpu, which writes the sum to residual
// and returns its norm (ops/norm/layer_norm.h).
//
// fused_qk_gemma_rmsnorm_cpu: the heads of q[tokens, heads * head_dim] and of
// k[tokens, key heads * head_dim], each normalised as by gemma_rmsnorm_cpu,
// into tensors of their shapes. fused_qk_gemma_rmsnorm_with_gate_cpu: the same
// where q_gate[tokens, num_head * 2 * head_dim] has behind each head a gate,
// which is copied; returns q[tokens * num_head, head_dim], k[tokens * key
// heads, head_dim] and the gates, like q.
absl::Status RegisterSglangNormOps(OpRegistry& registry);

// topk_softmax_cpu, topk_sigmoid_cpu, grouped_topk_cpu (softmax) and
// biased_grouped_topk_cpu (sigmoid, and correction_bias[experts] of f32, bf16
// or f16, which decides and weighs nothing): gating_output[n, experts] ->
// weights f32[n, topk] and ids i32[n, topk] (ops/moe/router_spec.h). topk and
// the number of experts are free, which SGLang's kernels have as constants;
// equal numbers go to the lower expert. hidden_states[n, any], in any dtype, is
// not read.
//
// num_fused_shared_experts must be 0, and num_token_non_padded left out, as
// SGLang's kernels demand. routed_scaling_factor of grouped_topk_cpu must be 1;
// that of biased_grouped_topk_cpu multiplies the weights, renormalized or not.
absl::Status RegisterSglangRouterOps(OpRegistry& registry);

// rotary_embedding_cpu and multimodal_rotary_embedding_cpu: query and key,
// [tokens, heads * head_size], turned by the rows of
// cos_sin_cache[max_position, rot_dim] (f32, bf16 or f16) that the positions
// name, in f32 with one rounding (ops/rope/table_rotary.h). The results may be
// query and key, and in SGLang are. positions[tokens] are i32 or i64.
//
// rotary_embedding_cpu also takes [tokens, heads, n] and [batch, tokens, heads,
// n], whose batches follow one another; head_size is not read there. SGLang
// rounds each product of the form [tokens, heads, n] to the dtype of query.
// positions of multimodal_rotary_embedding_cpu may be [3, tokens], with rows of
// any stride: section_t, section_h and section_w, the elements of SGLang's list
// mrope_section, then say which pairs take which row, and add up to rot_dim
// / 2.
//
// apply_rotary_pos_emb_cpu: query and key[tokens, heads, n] by cos and
// sin[tokens, n], which have an angle for each element; the halves of a row are
// usually equal (ops/rope/apply_rotary.h).
absl::Status RegisterSglangRopeOps(OpRegistry& registry);

// fused_qkvzba_split_reshape_cat_cpu: the projections of a gated delta net,
// mixed_qkvz[tokens, ..] with query, key, values and gates of one key head
// behind one another and mixed_ba[tokens, 2 num_heads_v] alike, into
// qkv[tokens, ..] (all queries, all keys, all values), z[tokens, num_heads_v,
// head_v], b and a[tokens, num_heads_v].
// fused_qkvzba_split_reshape_cat_contiguous_cpu: the same where mixed_qkvz has
// all queries, keys, values and gates behind one another, and mixed_ba all b
// and all a. f32, bf16 or f16. SGLang's kernel takes head_v for head_qk where
// it copies values, so it is right for equal ones alone.
//
// store_cache_cpu: k and v[tokens, heads, n] into the rows indices[tokens] of
// k_cache and v_cache[slots, heads, n]; f32, bf16, f16 or u8, with any strides
// of tokens, slots and heads. Of several tokens with one index the last is
// kept. row_dim is heads * n, or 0.
//
// The three operators above have one provider, reference, which copies bytes.
absl::Status RegisterSglangCopyOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_ROWS_OPS_H_
