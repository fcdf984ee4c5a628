#ifndef QUERN_OPS_REGISTRY_VLLM_LINEAR_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_LINEAR_OPS_H_

// vLLM's operators of matrix products on a CPU, by its names and with its
// arguments, over gemm/linear.h, whose equations and roundings they have.
//
// The names say onednn because vLLM's kernels are oneDNN's. Here the packed
// kernels serve them, and oneDNN does so only in programs that link
// //gemm/onednn, where it is asked for: by QUERN_KERNELS, or by its provider's
// name. The target of these operators does not bring oneDNN along.

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What create_onednn_mm and create_onednn_scaled_mm make, and onednn_mm and
// onednn_scaled_mm are made with: the object that vLLM passes as an integer. It
// is an object because operators return tensors only, and a plan needs the
// weights when it is made. The caller owns it. It may be dropped after the
// operators on it are made, because they share the weights, and so may `b`.
struct OneDnnHandler {
  // Weights of nothing, until Prepare of an operator that creates them.
  LinearWeights weights;
  // What create_onednn_scaled_mm was told. create_onednn_mm sets them back.
  DType output_type = DType::kF32;
  bool dynamic_act_quant = false;
  bool use_azp = false;
};

// create_onednn_mm: packs b[k, n], f32, bf16 or f16, row-major or column-major
// (a transposed [n, k]), into the handler. create_onednn_scaled_mm: the same
// for i8 with b_scales f32[n] or [1], which are copied; output_type is "f32",
// "bf16" or "f16". Both pack in Prepare, which may allocate and may refuse;
// Execute, which may not, does nothing. A handler whose Prepare fails keeps
// what it had. primitive_cache_size is accepted from 0 on and has no effect:
// the packed kernels generate nothing, and oneDNN's keep the last 128.
//
// onednn_mm: c[m, n] = round(sum over k of a[m, k] * b[k, n] + bias[n]). a and
// c are f32, bf16 or f16, each on its own, and bias has c's dtype.
//
// onednn_scaled_mm: c[m, n] of the handler's output_type,
//
//   c = round(a_scale * (b_scale[n] * sum over k of (a - azp) * b) + bias[n])
//
// with a i8[m, k] and bias[n] of c's dtype. With dynamic_act_quant, a_scales is
// f32[m, 1] or [m] and azp i32[m, 1] or [m], one for each row; without, f32[1]
// and i32[1]. azp is there where the handler has use_azp, and not otherwise.
// The sum is exact where it fits 32 bits: (128 + |azp|) * 128 * k < 2^31
// (onednn: -128 <= azp <= 127). A row with another azp is multiplied once more,
// alone and by the packed kernels, and azp times the sum of the column is
// subtracted in double. azp_adj f32[n] is accepted and not read, because the
// column sums are formed, exactly, when b is packed.
//
// bias is an argument of the call, as in vLLM, and is added before the one
// rounding. oneDNN's kernels do not run with a bias here, so such an operator
// is not made by the provider onednn.
//
// Handlers are read while an operator is made: InvalidArgument for one that is
// empty or of the other kind. Providers: simd and onednn, as those of `linear`
// (families/linear/linear_weights_ops.h), and reference, with sums in double.
// Packing has the provider reference alone.
//
// cpu_gemm_wna16: output[m, n] = round(sum over k of input[m, k] * b[k, n] +
// bias[n]) with weights of 4 bits in groups of k / groups,
//
//   b[k, n] = scales[g, n] * (code(k, n) - zero(g, n)),  g = g_idx[k],
//             or k divided by the size of a group, rounded down
//
// code(k, n) is number n % 16 of the two words q_weight[n / 16, 2 k] and
// [n / 16, 2 k + 1], 8 numbers to an i32, the first in its lowest bits; zero(g,
// n) is number n % 8 of zeros[g, n / 8], or 8 without zeros. So AWQ's and
// GPTQ's weights lie as vLLM repacks them. n is a multiple of 16, a group of 16
// or is all of k, and g_idx i32[k] names each group as often as it has k.
// input, output, scales and bias are f32, bf16 or f16, each on its own.
// pack_factor is 8. Prepare packs the weights, and may allocate; CheckArgs
// wants the tensors that Prepare was given. isa_hint has no effect. Providers:
// simd, onednn and reference.
//
// Brings gemm along.
absl::Status RegisterVllmLinearOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_LINEAR_OPS_H_
