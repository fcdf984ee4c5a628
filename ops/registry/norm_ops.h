#ifndef QUERN_OPS_REGISTRY_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_NORM_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rms_norm, fused_add_rms_norm (in place), gemma_rms_norm, rms_norm_gated.
// Providers: simd, and reference, which rounds as a framework does: the normed
// row to the dtype of the weight, and their product; norms of the unrounded
// sum. x, residual and z are [..., hidden], weight is [hidden]: equations in
// ops/norm/rms_norm.h and rms_norm_gated.h.
absl::Status RegisterNormOps(OpRegistry& registry);

// mixer2_gated_rms_norm, over `ranks` where there are some; without a weight
// the gate alone. Providers: simd, and reference, which rounds the normed row
// before the product with the weight. Where ranks share a group, simd takes as
// many rows as the x that it was made with, and reference always. Calls of one
// operator take turns. Equation: ops/norm/mixer2_gated_rms_norm.h.
absl::Status RegisterMixer2NormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NORM_OPS_H_
