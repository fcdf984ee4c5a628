#ifndef QUERN_OPS_REGISTRY_SGLANG_SGLANG_OPS_H_
#define QUERN_OPS_REGISTRY_SGLANG_SGLANG_OPS_H_

// SGLang's operators of a CPU, by its names and with its arguments, over the
// plans of packing, quant, gemm and attention, whose equations and roundings
// they have.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// convert_weight_packed: weight[n, k] or [experts, n, k] of bf16, f16, i8,
// f8e4m3 or u8 (two 4-bit codes in a byte), rows dense in k, into SGLang's
// packed bytes (ops/registry/sglang/packing/layout.h): [.., n, k], for i8
// [.., n, k + 4] with the compensation behind each block. n % 16 = 0 (i8, u8:
// n % 32 = 0) and k % 32 = 0. A matrix of bf16 or f16 with n < 16 becomes
// f32[k, n], as in SGLang. Our own kernels do not need it: they have another
// form. pack_vnni is another name for it: the name of SGLang's function for one
// block of 32 columns, which a matrix of n = 32 is.
//
// s8s8_compensation: out i32[n] = 128 * sum over k of the i8 weights that
// convert_weight_packed packed, [n, k + 4]. What is stored behind the blocks is
// not read.
//
// Providers: simd and reference.
absl::Status RegisterSglangPackOps(OpRegistry& registry);

// copy_stub: input, f32, bf16 or f16, into out of another of these types and
// the same shape, to nearest even (quant/convert.h).
//
// per_token_quant_int8_cpu: mat1[.., k], f32, bf16 or f16, into u8[.., k] of
// code + 128, and scales f32[rows] (quant/int8_quantize.h: a scale is at least
// 2^-125, where SGLang has at least 1e-7 / 127, and 1 for a row of zeros).
//
// Providers: simd and reference.
absl::Status RegisterSglangQuantOps(OpRegistry& registry);

// Registers products with packed weights. mat1 is [.., k] and the result
// [.., n]. mat2 is plain, [n, k], or with is_vnni what convert_weight_packed
// returned for it. Either is packed once into our own form, by Prepare, which
// must be given the tensors before CheckArgs and Execute, and is not read
// later, nor are scales2 and bias (f32[n]): CheckArgs wants the same views
// again. To unpack SGLang's bytes costs Prepare a copy of the weights, so plain
// weights are the better choice.
//
// weight_packed_linear: mat1 and mat2 of f32, bf16 or f16, not necessarily the
// same; the result has mat1's dtype. With is_vnni, an f32 mat2 is [k, n], what
// convert_weight_packed makes of n < 16.
// int8_scaled_mm_cpu: mat1 u8 (code + 128), scales1 f32[rows], mat2 i8, scales2
// f32[n] or [1]. out_dtype is "f32", "bf16" or "f16".
// int8_scaled_mm_with_quant: mat1 f32, bf16 or f16, quantised per row. An
// out_dtype other than mat1's is allowed.
// fp8_scaled_mm_cpu: mat2 f8e4m3, scales2 f32[ceil(n / block_n), ceil(k /
// block_k)]; block_n and block_k are the elements of SGLang's list block_size.
//
// Equations and roundings are those of gemm/linear.h. Providers: simd and
// onednn as those of `linear` (families/linear/linear_weights_ops.h), and
// reference, with sums in double. Brings gemm along, and not oneDNN.
absl::Status RegisterSglangLinearOps(OpRegistry& registry);

// Registers attention over a cache of single tokens: k_buffer[slots, kv_heads,
// head_dim] and v_buffer[slots, kv_heads, v_head_dim], f32, bf16 or f16, with
// any slot and head strides. Request b has the slots req_to_token[
// req_pool_indices[b], 0 .. seq_lens[b]). Indices and lengths are i32 or i64.
//
// Prepare reads req_to_token, req_pool_indices and all lengths, and builds the
// schedule and the page table of the step for the workers of its executor: once
// a step, before the operator's CheckArgs and Execute of every layer, as k, v
// and query may be those of any layer. CheckArgs compares the lengths and loc.
// Prepare is not what Execute does, because it may allocate and may refuse.
// WorkspaceBytes is that of the step that was prepared last.
//
// decode_attention_cpu: query[requests, q_heads, head_dim], one new token for
// each request, into output[requests, q_heads, v_head_dim]. key and value, both
// or none, are written to the buffers first, to the slots loc, i64[requests],
// which Prepare reads. Of several tokens with one slot the last is written.
// Without key, loc is accepted and not read. attn_logits is accepted and not
// used, because scratch is the workspace.
//
// extend_attention_cpu: q_extend[tokens, q_heads, head_dim] into o_extend; the
// last extend_seq_lens[b] tokens of request b are new, and their queries begin
// at extend_start_loc[b], which must be the sum of the lengths before it.
// k_extend and v_extend, both or none, are written to the buffers first, unlike
// in SGLang: one loop then reads all keys. Where k_extend has another number of
// heads than k_buffer, as in a prefill of MLA, attention reads k_extend and
// v_extend alone; no request may have keys before them, and the buffers are
// neither read nor written. With is_cross_attn, k_extend and v_extend are
// accepted and not read. max_len_extend has no effect.
//
// tree_mask of extend_attention_cpu is u8[tokens * n]. All requests then have n
// <= 64 new tokens, which are drafts of a tree: token i sees token j of its
// request where element i * n + j is not 0, and all tokens before them; see
// AttentionBatch::draft_masks. Prepare reads it, and windows are allowed.
//
// Both: sm_scale multiplies the products, and 0 means 1 / sqrt(head_dim).
// logit_cap > 0 caps, in both; SGLang's extend ignores it. sliding_window W >=
// 1 shows W keys, that of the query included, and 0 or less shows all. With
// is_cross_attn the keys are the first encoder_lens[b] of the request, for
// every query, but for what a window cuts off; otherwise encoder_lens[b] tokens
// before those of seq_lens[b] are skipped. sinks[q_heads] are f32, bf16 or f16.
// Where each row of v_buffer is the beginning of a row of k_buffer (MLA: a view
// of the same memory), new keys alone are written, and new values are not read.
//
// Equations and roundings are those of attention/paged_attention.h. Providers:
// simd, and reference, with sums in double on the calling thread.
absl::Status RegisterSglangAttentionOps(OpRegistry& registry);

// Registers what speculation needs between steps: trees of draft tokens
// (ops/speculation/draft_tree.h) and slots of drafts
// (ops/speculation/draft_slots.h), with shapes and refusals as there. Masks are
// u8. tree_mask_mode is 0 (kFull) or 1 (kQueryOnly).
//
// verify_tree_greedy_cpu, build_tree_kernel_efficient_cpu,
// reconstruct_indices_from_tree_mask_cpu; assign_req_to_token_pool_cpu,
// assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu,
// build_draft_decode_metadata_cpu, fill_bonus_tokens_cpu,
// fill_accept_out_cache_loc_cpu, rotate_input_ids_cpu.
//
// Provider: reference, plain loops.
absl::Status RegisterSglangSpeculationOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_SGLANG_OPS_H_
