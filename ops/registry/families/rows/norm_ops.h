#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rms_norm, add_rms_norm, fused_add_rms_norm and fused_add_rmsnorm_cpu (in
// place), gemma_rms_norm, and l2_norm, which has no weight. x and residual are
// [..., hidden], weight is [hidden]; equations are in ops/norm/rms_norm.h and
// ops/norm/l2_norm.h.
//
// x of rms_norm, gemma_rms_norm and l2_norm may also be [tokens, heads, hidden]
// with any strides, such as the heads of a query that are columns of a wider
// row; out may be x. add_rms_norm adds x to residual and returns the norm of
// the sum; fused_add_rms_norm writes the norm to x. An empty out_dtype means
// that of x; an f32 residual stream may be normalised to bf16.
//
// fused_add_rms_norm, vLLM's name, normalises the rounded sum.
// fused_add_rmsnorm_cpu, SGLang's name, normalises the f32 sum
// (NormSum::kExact) and is the same otherwise.
//
// Providers: simd, and reference, which takes the norm of the unrounded sum and
// rounds as a framework does: first the normalised row to the dtype of the
// weight, then its product with the weight. The references of gemma_rms_norm
// and fused_add_rmsnorm_cpu round the product alone, as that of l2_norm does.
absl::Status RegisterNormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_OPS_H_
