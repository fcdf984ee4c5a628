// What SGLang's products of packed weights do.

#include "absl/strings/string_view.h"
#include "quern/ops/registry/docs/op_docs.h"

namespace quern {
namespace {

struct Doc {
  absl::string_view op, text;
};

#define FLOATS "f32, bf16 or f16"
#define PACKED "is_vnni: weights are what convert_weight_packed made of them.\n"
#define LATENT                                                             \
  "q_input = norm(hidden_states q_a^T) q_b^T, whose first columns w_kc "   \
  "multiplies and whose last ones are\nturned;  k_input = hidden_states "  \
  "kv_a^T, whose first columns are normalised and whose last ones are "    \
  "turned\nhidden_states[rows, hidden] is " FLOATS                         \
  "; w_kc[heads, kv_lora, nope], with w_scale f32[1] if f8e4m3;\n"         \
  "cos_sin_cache[positions, rope], neighbours are pairs. use_int8_w8a8, "  \
  "use_fp8_w8a16: what the weights are,\nwith their scales, and block_n "  \
  "and block_k of f8e4m3. q_a_layernorm_weight[q_lora] and\n"              \
  "kv_a_layernorm_weight[kv_lora] are of norms; positions[rows]. Returns " \
  "q_input[rows, heads, kv_lora + rope] and\n"                             \
  "k_input[rows, 1, kv_lora + rope], whose first kv_lora columns are "     \
  "SGLang's v_input.\n" PACKED

constexpr Doc kDocs[] = {
    {"bmm_cpu",
     "out[b] = mat1[b] mat2[b]^T * scale\n"
     "out[batch, m, n] and mat1[batch, m, k] are " FLOATS
     ", with any strides of batch and rows; mat2[batch, n, k] is\n" FLOATS
     ", or f8e4m3 with scale f32[1]. out is written. " PACKED},
    {"conv3d_embed_cpu",
     "out[p, n] = sum over all i of input[p, i] * weight[n, i] + bias[n]\n"
     "input[patches, channels, depth, height, width], weight[n, channels, "
     "depth, height, width] and bias[n] are\n" FLOATS
     ". is_vnni: weight is what conv3d_embed_weight_pack made.\n"},
    {"conv3d_embed_weight_pack",
     "The bytes that convert_weight_packed makes of weight[n, channels, depth, "
     "height, width] as a matrix [n, k],\nbf16 or f16; out has weight's "
     "shape.\n"},
    {"convert_scale_packed",
     "scale u8[.., n, groups] with each 32 rows as [groups][32]; n % 32 = "
     "0.\n"},
    {"convert_weight_packed_scale_zp",
     "Packs 4-bit codes for int4_scaled_mm_cpu. quant_method_4bit 0: AWQ, "
     "weight i32[k, n / 8]; 1: GPTQ,\nweight i32[k / 8, n]. qzeros i32[groups, "
     "n / 8]; scales[groups, n] are " FLOATS
     ". Experts may stand before.\nReturns u8[n / 32, k / block, 16 block + "
     "128], zeros i8 and scales f32[n / 32, groups, 32].\n"},
    {"flash_attn_varlen_func",
     "out = softmax(q k^T / sqrt(head_dim)) v, sequence by sequence\n"
     "q[tokens, q_heads, head_dim], k and v[kv_tokens, kv_heads, ..] are of "
     "one dtype, " FLOATS
     ".\ncu_seqlens_q and cu_seqlens_k i32[sequences + 1]; causal needs both "
     "alike. max_seqlen_q and max_seqlen_k have\nno effect.\n"},
    {"fused_input_proj_cpu",
     "out0 = hidden_states qkvz_weight^T;  out1 = hidden_states ba_weight^T\n"
     "hidden_states[rows, k] and the weights[n, k] are " FLOATS
     "; results are like hidden_states. " PACKED},
    {"fused_linear_sigmoid_mul",
     "out = post_mul_mat / (1 + e^-g), g = mat1 mat2^T + bias\n"
     "mat1[rows, k] and post_mul_mat[rows, d] are of one dtype, " FLOATS
     "; mat2[1, k], or with is_vnni f32[k, 1];\nbias f32[1].\n"},
    {"int4_scaled_mm_cpu",
     "out[.., n] = sum over k of x[.., k] * w_scales[g, n] * (w[n, k] - "
     "w_zeros[g, n]) + bias[n]\n"
     "x[.., k] and out[.., n] are " FLOATS
     "; w, w_zeros and w_scales are what convert_weight_packed_scale_zp\n"
     "returned; bias f32[n].\n"},
    {"mxfp4_scaled_mm_cpu",
     "out = mat1 (mat2 * 2^(scales2 - 127))^T + bias\n"
     "mat1[.., k] and out[.., n] are " FLOATS
     "; mat2 u8[n, k / 2] has two e2m1 a byte, scales2 u8[n, k / 32], or\n"
     "with is_vnni what convert_weight_packed and convert_scale_packed made; "
     "bias f32[n].\n"},
    {"qkv_proj_with_rope",
     LATENT "q_a is q_a_proj_weight with q_a_proj_scale, q_b q_b_proj_weight "
            "with q_b_proj_scale, kv_a\nkv_a_proj_weight with "
            "kv_a_proj_scale.\n"},
    {"qkv_proj_with_rope_fused_weight",
     LATENT "qkv_a_proj_weight, with qkv_a_proj_scale, has the rows of q_a "
            "before those of kv_a; q_b is\nq_b_proj_weight with "
            "q_b_proj_scale.\n"},
    {"shared_expert_cpu",
     "out = (silu(hidden_states gate^T) * (hidden_states up^T)) w2^T + "
     "routed_scaling_factor * fused_experts_out\n"
     "hidden_states[rows, hidden] is " FLOATS
     "; w1[2 inter, hidden] has gate over up, w2[hidden, inter]; "
     "use_int8_w8a8,\nuse_fp8_w8a16: what both are, with w1_scale and "
     "w2_scale, and block_n and block_k of f8e4m3. out may be\nhidden_states, "
     "and is with inplace. " PACKED},
};

}  // namespace

absl::string_view ProductOpDoc(absl::string_view op) {
  for (const Doc& doc : kDocs) {
    if (doc.op == op) return doc.text;
  }
  return {};
}

}  // namespace quern
