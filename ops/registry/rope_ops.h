#ifndef QUERN_OPS_REGISTRY_ROPE_OPS_H_
#define QUERN_OPS_REGISTRY_ROPE_OPS_H_

#include "absl/status/status.h"
#include "ops/registry/op_registry.h"

namespace quern {

// rotary_embedding (in place; positions are int32). Providers: simd, and
// reference, which rounds each product and each sum.
absl::Status RegisterRopeOps(OpRegistry& registry);

// mrope (in place; positions[3, n] of time, row and column), apply_rotary_emb,
// dual_chunk_rotary_embedding. Providers as above; enable_fp32_compute makes
// the reference round once.
absl::Status RegisterRopeVariantOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_ROPE_OPS_H_
