#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_ACTIVATION_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_ACTIVATION_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Gated: silu_and_mul, mul_and_silu, gelu_and_mul, gelu_and_mul_sparse,
// swigluoai_and_mul, fatrelu_and_mul. Others: silu, gelu, gelu_new, gelu_fast,
// quick_gelu, relu2, xielu. x is [..., n]; gated operators need an even n.
// Equations are in act_and_mul.h and activation.h of ops/activation. Providers:
// simd, and reference, which rounds as ops/registry/reference/activation.h
// says.
absl::Status RegisterActivationOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_ACTIVATION_OPS_H_
