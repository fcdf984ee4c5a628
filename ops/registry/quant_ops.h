#ifndef QUERN_OPS_REGISTRY_QUANT_OPS_H_
#define QUERN_OPS_REGISTRY_QUANT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// quant_fp8 (dynamic: per tensor, token or group), static_quant_fp8 (scales
// given, of any block), quant_int8 (per token). Providers: simd, and reference,
// which divides by the scale of a group where simd multiplies. x is [m, k], a
// matrix; scales are f32: [1, 1], [m, 1] or [m, groups] of quant_fp8, [m] of
// quant_int8. Equations: quant/fp8_quantize.h and int8_quantize.h. convert: x
// [..., n] as f32, bf16 or f16, rounded to nearest even (quant/convert.h).
absl::Status RegisterQuantOps(OpRegistry& registry);

// rms_norm_quant and fused_add_rms_norm_quant (scales f32[rows], per token),
// rms_norm_static_quant and fused_add_rms_norm_static_quant. The residual is
// updated in place; q_dtype is "int8" or "fp8". Providers: simd, and reference,
// which norms in f32 without a rounding in between.
absl::Status RegisterNormQuantOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_QUANT_OPS_H_
