#ifndef QUERN_OPS_REGISTRY_GATED_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_GATED_NORM_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rms_norm_gated: x and z are [..., hidden]; equation in
// ops/norm/rms_norm_gated.h. Providers: simd, and reference, which computes in
// double and rounds once.
absl::Status RegisterGatedNormOps(OpRegistry& registry);

// mixer2_gated_rms_norm, over `ranks` where there are some; without a weight
// the gate alone. Providers: simd, and reference, which rounds the normed row
// before the product with the weight. Both need a workspace where ranks share a
// group, reference always. Equation: ops/norm/mixer2_gated_rms_norm.h.
absl::Status RegisterMixer2NormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_GATED_NORM_OPS_H_
