#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATE_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATE_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// sigmoid_mul of ops/activation/sigmoid_mul.h. x is [..., d], and gate is
// [..., d], or [..., 1] with one gate for each row; out_dtype is x's if it is
// empty. Providers: simd, and reference, which computes in double and rounds
// once.
absl::Status RegisterGateOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATE_OPS_H_
