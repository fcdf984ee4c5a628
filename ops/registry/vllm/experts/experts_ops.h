#ifndef QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// vLLM's mixture of experts on a CPU, by its names and with its arguments, over
// ops/moe/experts.h, whose equation and roundings they have.
//
// prepack_moe_weight, prepack_moe_weight_int8: packed_weight <- weight[experts,
// n, k] of f32, bf16 or f16, or of i8, where n is a multiple of 16. For each
// expert, with v elements side by side:
//
//   packed[n / 16][k / v][n % 16][k % v] = weight[n, k]
//
// isa "vec": v = 1. isa "amx": v is as many as 4 bytes hold, which k is a
// multiple of. Floats lie as vLLM's own packing has them. Provider:
// reference, which moves elements by their size.
//
// cpu_fused_moe: output[tokens, hidden] <- the experts of packed w13[experts,
// 2 inter, hidden] and w2[experts, hidden, inter] of f32, bf16 or f16, with
// w13_bias[experts, 2 inter] and w2_bias[experts, hidden] of their dtype.
// input and output are f32, bf16 or f16, each on its own. topk_weights is
// f32[tokens, k], and topk_id i32[tokens, k] with numbers in [0, experts), or
// -1, which adds nothing. The rows of w13 are those of the gate and then those
// of up; of act "swigluoai" (GPT-OSS) they alternate, the gate first. act is
// "silu", "gelu", "gelu_tanh" or "swigluoai". skip_weighted, with k = 1:
// weights count as 1, as the caller has multiplied the input.
//
// cpu_fused_moe_int8: w13 and w2 are i8, with w13_scale f32[experts, 2 inter]
// and w2_scale f32[experts, hidden]; the rows of the input and those between
// the two products become int8 with a scale each. Biases are f32.
//
// Both pack the weights for our kernels in Prepare, which may allocate, and
// keep no view of them; CheckArgs wants the tensors that Prepare was given. isa
// is what the weights were packed with. Providers: simd and reference.
absl::Status RegisterVllmExpertsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_OPS_H_
