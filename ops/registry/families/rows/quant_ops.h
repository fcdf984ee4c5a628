#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_QUANT_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_QUANT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// quant_fp8: dynamic scales, per tensor, token or group. static_quant_fp8:
// given scales, for blocks of any shape. quant_int8: dynamic scales per token.
// x is [..., k], whose m rows are all dimensions but the last. Scales are f32:
// [1], [m, 1] or [m, groups] for quant_fp8, and [m] for quant_int8. A single
// scale of static_quant_fp8 may be [1] or [1, 1].
// Equations: quant/fp8_quantize.h and quant/int8_quantize.h. convert: x[..., n]
// to f32, bf16 or f16, rounded to nearest even (quant/convert.h). Providers:
// simd, and reference, which divides by a group's scale where simd multiplies
// by its reciprocal.
absl::Status RegisterQuantOps(OpRegistry& registry);

// rms_norm_quant and fused_add_rms_norm_quant return scales f32[rows], per
// token; rms_norm_static_quant and fused_add_rms_norm_static_quant take a
// scale. The residual is updated in place; q_dtype is "int8" or "fp8".
// Providers: simd, and reference, which keeps the normalised row in f32 without
// an intermediate rounding.
absl::Status RegisterNormQuantOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_QUANT_OPS_H_
