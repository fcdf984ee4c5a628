// What operators of vLLM's CPU backend do that have its names alone.

#include "absl/strings/string_view.h"
#include "quern/ops/registry/docs/op_docs.h"

namespace quern {
namespace {

struct Doc {
  absl::string_view op, text;
};

// Lines that several operators share. A float is f32, bf16 or f16.
#define FLOATS "f32, bf16 or f16"
#define PACKED                                                                \
  "packed[n / 16][k / v][n % 16][k % v] = weight[n, k] for each expert; isa " \
  "vec: v = 1, amx: as many as\n4 bytes hold\n"
#define EXPERTS                                                               \
  "output[t] = sum over j of topk_weights[t, j] * w2_e act(w13_e input[t]), " \
  "with w13_bias[experts, 2 inter] and w2_bias[experts, hidden]; e = "        \
  "topk_id[t, j]\nw13[experts, 2 inter, hidden] and "                         \
  "w2[experts, hidden, inter] are as prepack packs them by isa. topk_id "     \
  "i32\n[tokens, k], -1 adds nothing. act: silu, gelu, gelu_tanh, or "        \
  "swigluoai with gate and up in turn.\nskip_weighted: k = 1, and weights "   \
  "count as 1. Prepare packs w13 and w2 for our kernels.\n"
#define HANDLER "An object that vLLM's wrapper makes: see "

constexpr Doc kDocs[] = {
    {"biased_topk_cpu",
     "Chooses topk experts by score(gating_output) + correction_bias[experts]; "
     "scoring_func: sigmoid or\nsqrtsoftplus. Weights are without the bias, "
     "and multiplied by routed_scaling_factor if\n"
     "apply_routed_scaling_factor_on_output.\n"
     "gating_output[n, experts] is " FLOATS
     "; hidden_states[n, any] is not read. Returns weights f32[n, topk] and\n"
     "ids i32[n, topk]. num_fused_shared_experts must be 0.\n"},
    {"causal_conv1d_update_cpu_vec",
     "causal_conv1d_update with pad_slot_id, the state index of a sequence to "
     "skip.\nx and out[tokens, channels] are " FLOATS
     "; weight[channels, width], bias[channels]. conv_state[slots, channels,\n"
     "width - 1] is written; conv_state_indices i32[sequences], "
     "query_start_loc i32[sequences + 1].\n"},
    {"concat_and_cache_mla_cpu",
     "kv_cache[slot / block_size, slot % block_size] <- kv_c_normed[t], "
     "k_pe[t], slot = slot_mapping[t]\n"
     "kv_c_normed[tokens, latent], k_pe[tokens, rope] and kv_cache[blocks, "
     "block_size, latent + rope] are\n" FLOATS
     "; a negative slot is skipped.\n"},
    {"cpu_fused_moe",
     EXPERTS "input and output[tokens, hidden], weights and biases "
             "are " FLOATS ".\n"},
    {"cpu_fused_moe_int8",
     EXPERTS "w13 and w2 are i8, with w13_scale f32[experts, 2 inter] and "
             "w2_scale f32[experts, hidden]; rows become int8.\n"},
    {"cpu_gemm_wna16",
     "output[m, n] = sum over k of input[m, k] * scales[g, n] * (code(k, n) - "
     "zero(g, n)) + bias[n]\n"
     "code(k, n): number n % 16 of words 2 k and 2 k + 1 of q_weight[n / 16]; "
     "zero(g, n): number n % 8 of\nzeros[g, n / 8], or 8; g = g_idx[k], or k "
     "by groups. Floats are " FLOATS ". Prepare packs the weights.\n"},
    {"create_onednn_mm_handler", HANDLER
     "create_onednn_mm.\nb[k, n] is f32, bf16 or f16; handler is set.\n"},
    {"create_onednn_scaled_mm_handler",
     HANDLER "create_onednn_scaled_mm.\nb i8[k, n], b_scales f32[n] or f32[1]; "
             "handler is set.\n"},
    {"dynamic_per_token_scaled_fp8_quant",
     "scale[t] = max(min(max |input[t]|, scale_ub), 1 / 512) / 448;  out = "
     "input / scale\n"
     "out f8e4m3[rows, k] and scale f32[rows, 1] are written; input "
     "is " FLOATS "; scale_ub f32[1].\n"},
    {"dynamic_scaled_fp8_quant",
     "scale = max(max |input|, 1 / 512) / 448;  out = input / scale\n"
     "out f8e4m3[rows, k] and scale f32[1] are written; input is " FLOATS
     ".\n"},
    {"gelu_tanh",
     "out = x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))\nx[.., n] "
     "is " FLOATS "; out is like x.\n"},
    {"get_scheduler_metadata",
     HANDLER "cpu_attn_get_scheduler_metadata.\nseq_lens i32[sequences], "
             "query_start_loc i32[sequences + 1], "
             "dynamic_causal u8[sequences]; scheduler_metadata\nis set.\n"},
    {"greedy_argmax",
     "out[t] = the first i with the largest logits[t, i]; NaN is less than "
     "any number\nlogits f32[rows, n]; out i64[rows].\n"},
    {"mamba_chunk_scan_fwd_cpu",
     "s <- exp(min(a dt, 0)) s + b (dt x);  out = (s . c + d x) silu(z), from "
     "final_states f32[sequences, heads,\nhead_dim, d_state] on, which has "
     "the last states then\n"
     "x, z and out[tokens, heads, head_dim], b and c[tokens, groups, d_state] "
     "are " FLOATS
     "; dt f32[tokens, heads],\na and d f32[heads], cu_seqlens[sequences + "
     "1].\n"},
    {"mla_decode_kvcache",
     "out[s, h] = sum over t of softmax(scale query[s, h] . kv[t]) kv[t, "
     "first columns]\n"
     "query[sequences, heads, dim], out[sequences, heads, values] and "
     "kv_cache[blocks, block_size, dim] are\n" FLOATS
     "; block_tables i32[sequences, any], seq_lens i32[sequences].\n"},
    {"prepack_moe_weight",
     PACKED "weight and packed_weight[experts, n, k] are " FLOATS ".\n"},
    {"prepack_moe_weight_int8",
     PACKED "weight and packed_weight[experts, n, k] are i8.\n"},
    {"quantize_fp8e4m3_vec",
     "out0 = input / scale: channelwise as dynamic_per_token_scaled_fp8_quant, "
     "else by scale_opt f32[1]\n"
     "input[rows, k] is " FLOATS
     "; out0 f8e4m3[rows, k]; out1, the scales, f32[rows] or [1].\n"},
    {"selective_state_update_cpu",
     "selective_state_update into out, with null_block_id for null_slot and "
     "cu_seqlens for query_start_loc\n"
     "state[slots, heads, head_dim, d_state]; x, z and out[tokens, heads, "
     "head_dim], dt[tokens, heads], b and\nc[tokens, groups, d_state] "
     "are " FLOATS "; a, d and dt_bias f32[heads]. state_batch_indices,\n"
     "dst_state_batch_indices, num_accepted_tokens and cu_seqlens are i32.\n"},
    {"shm_all_gather",
     "output[r] <- data of rank r\nDense tensors of any dtype; output[ranks, "
     "..] for data[..].\n"},
    {"shm_allgather",
     "out = data of all ranks, one behind the other along dimension dim\n"
     "data[..] is dense and of any dtype.\n"},
    {"shm_allreduce",
     "data <- the sum of data over all ranks, in f32 and rounded once\n"
     "data[.., n] is " FLOATS "; reduce_op is 0, a sum.\n"},
    {"static_scaled_fp8_quant",
     "out = input / scale, to the nearest, at most 448\n"
     "out f8e4m3[rows, k] is written; input is " FLOATS
     "; scale f32[1], or one for group_m rows and group_n\ncolumns; 0: "
     "all.\n"},
};

}  // namespace

absl::string_view VllmOpDoc(absl::string_view op) {
  for (const Doc& doc : kDocs) {
    if (doc.op == op) return doc.text;
  }
  return {};
}

}  // namespace quern
