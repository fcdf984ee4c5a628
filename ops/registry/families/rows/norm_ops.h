#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rms_norm, add_rms_norm, fused_add_rms_norm (in place), gemma_rms_norm,
// l2_norm, which has no weight, and layer_norm. x and residual are [...,
// hidden], weight and bias [hidden]; equations are in ops/norm/rms_norm.h,
// ops/norm/l2_norm.h and ops/norm/layer_norm.h.
//
// x of all that return out but add_rms_norm may also be [tokens, heads, hidden]
// with any strides, such as the heads of a query that are columns of a wider
// row; out may be x. add_rms_norm adds x to residual and returns the norm of
// the sum; fused_add_rms_norm writes the norm to x. An empty out_dtype means
// that of x; an f32 residual stream may be normalised to bf16.
//
// fused_add_rms_norm, vLLM's name, normalises the rounded sum. SGLang's name,
// fused_add_rmsnorm_cpu (sglang/rows_ops.h), normalises the f32 sum.
//
// Providers: simd, and reference, which takes the norm of the unrounded sum and
// rounds as a framework does: first the normalised row to the dtype of the
// weight, then its product with the weight. The references of gemma_rms_norm,
// l2_norm and layer_norm round the result alone.
absl::Status RegisterNormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_
