// What operators on rows do that have the names of other projects.

#include "absl/strings/string_view.h"
#include "quern/ops/registry/docs/op_docs.h"

namespace quern {
namespace {

struct Doc {
  absl::string_view op, text;
};

// Lines that several operators share. A float is f32, bf16 or f16.
#define FLOATS "f32, bf16 or f16"
#define GATED "input[.., 2 d] is " FLOATS "; out[.., d] has its dtype.\n"
#define NORM                                                               \
  "input[.., hidden] is " FLOATS                                           \
  "; weight and bias[hidden] have its dtype or are f32; out is like input" \
  ".\n"
#define ADD                                    \
  "input and residual[.., hidden] are " FLOATS \
  "; both are written. "                       \
  "weight[hidden] has their dtype or is f32.\n"
#define RMS "h / sqrt(mean over i of h^2 + eps)"
#define HEADS                                                             \
  "k[tokens, key heads * head_dim], q_weight and k_weight[head_dim] are " \
  "like q, " FLOATS ".\n"

#define ROUTER                                                              \
  "gating_output[n, experts] is " FLOATS                                    \
  "; hidden_states[n, any] is not read. Returns weights f32[n, topk] and\n" \
  "ids i32[n, topk]. renormalize: weights add up to 1.\n"
#define UNUSED \
  "num_fused_shared_experts must be 0, and num_token_non_padded None.\n"

#define ROPE                                                           \
  "query and key[tokens, heads * head_size] are " FLOATS               \
  "; cos_sin_cache[max_position, rot_dim] has cosines before\nsines. " \
  "is_neox: pairs (j, j + rot_dim / 2), else (2 j, 2 j + 1). Returns " \
  "tensors like query and key, which\nthey may be.\n"
#define SPLIT                                                              \
  "mixed_qkvz[tokens, ..] and mixed_ba[tokens, 2 num_heads_v] are " FLOATS \
  ". Returns qkv[tokens, ..] (queries, keys,\nvalues), z[tokens, "         \
  "num_heads_v, head_v], b and a[tokens, num_heads_v].\n"

constexpr Doc kDocs[] = {
    {"activation_lut_bf16",
     "out = gelu(input), by erf; activation: gelu\n"
     "input[.., n] and out are bf16.\n"},
    {"apply_rotary_pos_emb_cpu",
     "out[j] = x[j] cos[t, j] - x[j + n / 2] sin[t, j];  out[j + n / 2] = x[j "
     "+ n / 2] cos[t, j + n / 2] +\nx[j] sin[t, j + n / 2], for each head x of "
     "query and of key\n"
     "query and key[tokens, heads, n], cos and sin[tokens, n] are " FLOATS
     ". Returns tensors like query and key, which\nthey may be.\n"},
    {"biased_grouped_topk_cpu",
     "Chooses topk_group of num_expert_group groups of experts, by their two "
     "largest sigmoid(gating_output) +\ncorrection_bias[experts], then topk "
     "experts in them. Weights are without the bias, and multiplied by\n"
     "routed_scaling_factor.\n" ROUTER UNUSED},
    {"dynamic_scaled_int8_quant",
     "scale[t] = max |input[t]| / 127;  out = input / scale, to the nearest. "
     "With azp: scale[t] = (max - min) /\n255, azp[t] = -128 - min / scale, "
     "out = input / scale + azp\n"
     "input[rows, k] is " FLOATS
     "; out i8[rows, k], scale f32[rows, 1] and azp i32[rows, 1] are "
     "written.\n"},
    {"fused_add_layernorm_cpu",
     "h = input + residual in f32;  residual <- round(h);  out = (h - mean(h)) "
     "/ sqrt(mean over i of (h - mean(h))^2 + eps) * weight + bias\n"
     "residual is like input.\n" NORM},
    {"fused_add_rmsnorm_cpu",
     "h = input + residual in f32;  residual <- round(h);  input <- " RMS
     " * weight\n" ADD},
    {"fused_qk_gemma_rmsnorm_cpu",
     "Each head h of q and of k becomes " RMS " * (1 + weight).\n"
     "q[tokens, heads * head_dim], " HEADS "Returns tensors like q and k.\n"},
    {"fused_qk_gemma_rmsnorm_with_gate_cpu",
     "As fused_qk_gemma_rmsnorm_cpu, where q_gate[tokens, num_head * 2 * "
     "head_dim] has a gate behind each head.\n" HEADS
     "Returns q[tokens * num_head, head_dim], k[tokens * key heads, head_dim] "
     "and the gates, like q.\n"},
    {"fused_qkvzba_split_reshape_cat_contiguous_cpu",
     "Splits the projections of a gated delta net: all queries, keys, values "
     "and gates, and all b and all a.\n" SPLIT},
    {"fused_qkvzba_split_reshape_cat_cpu",
     "Splits the projections of a gated delta net: for each key head its "
     "query, key, values and gates, and its b\nand a.\n" SPLIT},
    {"fused_rmsnorm_gated_cpu",
     "out = " RMS " * weight * silu(gate), h = input\n"
     "gate is like input.\n" NORM},
    {"fused_sigmoid_mul_cpu",
     "out = input / (1 + e^-gate)\n"
     "input[tokens, n] is " FLOATS
     "; gate is like input, or [tokens, heads, n / heads] with any strides. "
     "With inplace out\nmust be input.\n"},
    {"gelu_and_mul_cpu", "out = gelu(input[:d]) * input[d:], by erf\n" GATED},
    {"gelu_quick",
     "out = x / (1 + e^(-1.702 x))\n"
     "x[.., n] is " FLOATS "; out is like x.\n"},
    {"gelu_tanh_and_mul",
     "out = gelu(x[:d]) * x[d:], by tanh\n"
     "x[.., 2 d] is " FLOATS "; out[.., d] has its dtype.\n"},
    {"gelu_tanh_and_mul_cpu",
     "out = gelu(input[:d]) * input[d:], by tanh\n" GATED},
    {"gemma3_rmsnorm_cpu", "out = " RMS " * (1 + weight), h = input\n" NORM},
    {"gemma4_rmsnorm_cpu",
     "out = " RMS
     " * (scale_shift + weight), h = input; without with_scale * 1\n" NORM},
    {"gemma_fused_add_rmsnorm_cpu",
     "h = input + residual in f32;  residual <- round(h);  input <- " RMS
     " * (1 + weight)\n" ADD},
    {"gemma_rmsnorm_cpu", "out = " RMS " * (1 + weight), h = input\n" NORM},
    {"grouped_topk_cpu",
     "Chooses topk_group of num_expert_group groups of experts, by their "
     "largest softmax(gating_output), then\ntopk experts in them. "
     "routed_scaling_factor must be 1.\n" ROUTER UNUSED},
    {"l2norm_cpu",
     "out = " RMS ", h = input: the root of a mean, unlike l2_norm\n" NORM},
    {"layernorm_cpu",
     "out = (h - mean(h)) / sqrt(mean over i of (h - mean(h))^2 + eps) * "
     "weight + bias, h = input\n" NORM},
    {"multimodal_rotary_embedding_cpu",
     "Turns query and key by rows of cos_sin_cache. With positions[3, tokens], "
     "section_t, section_h and\nsection_w pairs take the row of the first, the "
     "second and the third position, or interleaved j % 3.\n" ROPE},
    {"rmsnorm_cpu", "out = " RMS " * weight, h = input\n" NORM},
    {"rotary_embedding_cpu",
     "Turns query and key by the rows of cos_sin_cache that positions[tokens] "
     "name.\n" ROPE
     "Both may be [tokens, heads, n] or [batch, tokens, heads, n] too; "
     "head_size is not read then.\n"},
    {"silu_and_mul_cpu",
     "out = s / (1 + e^-s) * input[d:], s = input[:d]\n" GATED},
    {"static_scaled_int8_quant",
     "out = input / scale + azp, to the nearest, in [-128, 127]\n"
     "input[rows, k] is " FLOATS
     "; out i8[rows, k] is written; scale f32[1], azp i32[1] (None: 0).\n"},
    {"store_cache_cpu",
     "k_cache[indices[t]] <- k[t];  v_cache[indices[t]] <- v[t]\n"
     "k and v[tokens, heads, n], k_cache and v_cache[slots, heads, n] are of "
     "one dtype, " FLOATS
     " or u8; indices\n[tokens] are i32 or i64. row_dim: heads * n, or 0.\n"},
    {"topk_sigmoid_cpu", "The topk largest of sigmoid(gating_output)\n" ROUTER},
    {"topk_softmax_cpu", "The topk largest of softmax(gating_output)\n" ROUTER},
};

}  // namespace

absl::string_view NamedOpDoc(absl::string_view op) {
  for (const Doc& doc : kDocs) {
    if (doc.op == op) return doc.text;
  }
  const absl::string_view doc = ProductOpDoc(op);
  return doc.empty() ? VllmOpDoc(op) : doc;
}

}  // namespace quern
