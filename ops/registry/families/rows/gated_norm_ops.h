#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rms_norm_gated of ops/norm/rms_norm_gated.h. x and z are [..., hidden].
// Providers: simd, and reference, which computes in double and rounds once.
absl::Status RegisterGatedNormOps(OpRegistry& registry);

// mixer2_gated_rms_norm over `ranks`, or on one rank without; without a weight
// it computes the gate alone. Providers: simd, and reference, which rounds the
// normalised row before the product with the weight. simd needs a workspace
// only where a group spans ranks, reference always. Equation:
// ops/norm/mixer2_gated_rms_norm.h.
absl::Status RegisterMixer2NormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_OPS_H_
