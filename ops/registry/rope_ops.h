#ifndef QUERN_OPS_REGISTRY_ROPE_OPS_H_
#define QUERN_OPS_REGISTRY_ROPE_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rotary_embedding (in place): positions is int32[n], query and key are
// [n, heads, head_dim], not [n, heads * head_dim]. Angles are computed from
// `base`, where vLLM's is handed a table; rot_dim 0 is head_dim, and positions
// are less than max_position. A model's scaling (YaRN, Llama 3) is in the
// plan's spec alone. Providers: simd, and reference, which rounds each product
// and each sum. Equation: ops/rope/rotary_embedding.h.
absl::Status RegisterRopeOps(OpRegistry& registry);

// mrope (in place; positions[3, n] of time, row and column), apply_rotary_emb,
// dual_chunk_rotary_embedding. Providers as above; enable_fp32_compute makes
// the reference round once.
absl::Status RegisterRopeVariantOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_ROPE_OPS_H_
