#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_OPS_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_OPS_H_

// SGLang's operators of several products, or of a product and what follows it,
// by its names. Weights are packed once, by Prepare, as
// ops/registry/sglang/sglang_ops.h says of products; is_vnni, scales and block
// sizes are as there. Rows and results are f32, bf16 or f16, of one dtype, and
// each product is that of gemm/linear.h. Providers: simd, which runs oneDNN
// where QUERN_KERNELS asks for it, and reference, with sums in double.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// bmm_cpu: out[b, m, n] = sum over k of mat1[b, m, k] * mat2[b, n, k], for any
// number of rows m. out and mat1 may have any strides of batch and rows. mat2
// is f32, bf16 or f16, or f8e4m3 with a scale f32[1] for all of it.
//
// fused_linear_sigmoid_mul: post_mul_mat[rows, d] * sigmoid(mat1[rows, k] *
// mat2 + bias), where mat2 is one column of weights, plain [1, k] or, with
// is_vnni, f32[k, 1]. The product stays f32, and the result is rounded once.
//
// fused_input_proj_cpu: the products of hidden_states[rows, k] with qkvz_weight
// and with ba_weight.
//
// shared_expert_cpu: down(silu(gate) * up) + routed_scaling_factor *
// fused_experts_out for hidden_states[rows, hidden], w1[2 * inter, hidden],
// gate over up, and w2[hidden, inter]. silu(gate) * up is rounded to the dtype
// of the rows, and the sum once. use_int8_w8a8 and use_fp8_w8a16 say what the
// dtype of w1 and w2 says, too; block_n and block_k are the elements of
// SGLang's list block_size. out may be hidden_states, and with `inplace` must
// be, because whoever asks for it reads hidden_states afterwards.
absl::Status RegisterSglangProductOps(OpRegistry& registry);

// What precedes multi-head latent attention (DeepSeek), for hidden_states[rows,
// hidden]:
//
//   q_a     = norm(hidden_states * q_a_proj^T) * q_a_layernorm_weight
//   latent  = hidden_states * kv_a_proj^T        [rows, kv_lora + rope]
//   q       = q_a * q_b_proj^T                   [rows, heads, nope + rope]
//   q_input = q[.., :nope] * w_kc[head]^T, then the rotation of q[.., nope:]
//   k_input = norm(latent[:, :kv_lora]) * kv_a_layernorm_weight, then the
//             rotation of latent[:, kv_lora:]
//
// with w_kc[heads, kv_lora, nope], in any form of bmm_cpu's mat2, w_scale with
// f8e4m3, and neighbours rotated as pairs by cos_sin_cache[positions, rope],
// the cosines before the sines. Each arrow of the equations rounds to the dtype
// of hidden_states. Returns q_input[rows, heads, kv_lora + rope] and
// k_input[rows, 1, kv_lora + rope]; SGLang's third result is a view of the
// first kv_lora columns of k_input.
//
// qkv_proj_with_rope has the first two matrices apart, and
// qkv_proj_with_rope_fused_weight as one, the rows of q_a_proj before those of
// kv_a_proj, with q_lora_rank, kv_lora_rank and qk_rope_head_dim to part them.
absl::Status RegisterSglangLatentOps(OpRegistry& registry);

// conv3d_embed_cpu: a Conv3d over patches of the kernel's own size, so that
// each of input[patches, channels, depth, height, width] becomes one row,
// out[patches, n], of its product with weight[n, channels, depth, height,
// width], plus bias[n]. Patches and kernels are dense. With is_vnni, weight is
// bf16 or f16 and what conv3d_embed_weight_pack returned for it (sglang_ops.h).
absl::Status RegisterSglangEmbedOps(OpRegistry& registry);

// convert_scale_packed: u8 scale[n, groups] or [experts, n, groups], of which
// each 32 rows become [groups][32]. n % 32 = 0.
//
// convert_weight_packed_scale_zp: codes of 4 bits in words of i32, for the
// products of int4_scaled_mm_cpu. quant_method_4bit 0 is AWQ, weight[k, n / 8]
// and qzeros[groups, n / 8], and 1 GPTQ, weight[k / 8, n] and zeros stored less
// one (gemm/linear_weights.h: kAwq, kGptq); scales[groups, n] are f32, bf16 or
// f16. Experts may stand before all three. n % 32 = 0. With block = min(128, k
// / groups), returns
//
//   u8[n / 32, k / block, 16 block + 128]   rows of four k: byte (p * 8 + i) *
//   4
//       + j has k = j of the columns 16 p + i, in the low half, and 16 p + 8 +
//       i; behind them i32 sums over the block of code - zero
//   i8[n / 32, groups, 32]                  zero points
//   f32[n / 32, groups, 32]                 scales
//
// Tensors are dense. Provider: reference, plain loops.
absl::Status RegisterSglangPack4Ops(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_OPS_H_
