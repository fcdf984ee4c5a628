#ifndef QUERN_OPS_REGISTRY_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_NORM_OPS_H_

#include "absl/status/status.h"
#include "ops/registry/op_registry.h"

namespace quern {

// rms_norm, fused_add_rms_norm (in place), gemma_rms_norm, rms_norm_gated.
// Providers: simd, and reference, which rounds as a framework does: the normed
// row to the dtype of the weight, and their product; norms of the unrounded
// sum.
absl::Status RegisterNormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NORM_OPS_H_
