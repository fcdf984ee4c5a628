#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rotary_embedding works in place: positions is i32[n] or i64[n]; query and key
// are [n, heads, head_dim] with any token and head strides, not [n, heads *
// head_dim]. Angles are computed from `base` and `scaling`
// (ops/rope/rotary_scaling.h: linear, Llama 3, YaRN, LongRoPE and others),
// where vLLM takes a table. rot_dim 0 means head_dim, and positions must be
// less than max_position. Providers: simd, and reference, which rounds each
// product and each sum. Equation: ops/rope/rotary_embedding.h.
absl::Status RegisterRopeOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_OPS_H_
