#ifndef QUERN_OPS_REGISTRY_VLLM_ROWS_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_ROWS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// vLLM's operators on rows of its CPU backend, by its names where ours have
// other ones. Rows are f32, bf16 or f16. Results of activations are returned,
// where vLLM has an argument for them.
//
// gelu_tanh_and_mul: gelu_and_mul with approximate="tanh". gelu_tanh: GELU by
// tanh. gelu_quick: quick_gelu. activation_lut_bf16: the exact GELU of bf16,
// computed, where vLLM looks it up in a table of 2^16 codes; `activation` must
// be "gelu".
//
// static_scaled_int8_quant: out[rows, k] <- input, i8, by the scale f32[1] and
// the zero point azp i32[1] (none: 0), whose values CheckArgs reads: 2^-125 <=
// scale <= 2^118 and -128 <= azp <= 127. dynamic_scaled_int8_quant: scale
// f32[rows, 1], and azp i32[rows, 1] if it is given, are written. Both as
// quant/int8_quantize.h has them, which differs from vLLM where a row has no
// range: a row of zeros has the scale 1, a row with NaN or infinity the scale
// NaN, and the range of azp includes 0.
//
// static_scaled_fp8_quant: out[rows, k] <- input as f8e4m3, by scale f32[1], or
// by one of scale[ceil(rows / group_m), ceil(k / group_n)], where 0 stands for
// all; dynamic_scaled_fp8_quant: scale f32[1] is written;
// dynamic_per_token_scaled_fp8_quant: scale f32[rows, 1] is written, and
// scale_ub f32[1], above 0, bounds the numbers of a row where its scale is
// found; quantize_fp8e4m3_vec returns codes, and channelwise scales f32[rows],
// or else by scale_opt f32[1], which it returns. All as quant/fp8_quantize.h
// has them, where a row of zeros has the scale 1 / (448 * 512).
//
// biased_topk_cpu: ops/moe/router_spec.h with a bias and scoring_func "sigmoid"
// or "sqrtsoftplus"; routed_scaling_factor counts where
// apply_routed_scaling_factor_on_output is set. greedy_argmax: the first of the
// largest of logits f32[rows, n], as i64[rows]; NaN is less than any number,
// and a row without numbers gives 0.
//
// Providers: simd and reference; greedy_argmax: reference.
absl::Status RegisterVllmRowsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ROWS_OPS_H_
