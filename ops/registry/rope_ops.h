#ifndef QUERN_OPS_REGISTRY_ROPE_OPS_H_
#define QUERN_OPS_REGISTRY_ROPE_OPS_H_

#include "absl/status/status.h"
#include "ops/registry/op_registry.h"

namespace quern {

// rotary_embedding (in place; positions are int32). Providers: simd, and
// reference, which rounds each product and each sum.
absl::Status RegisterRopeOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_ROPE_OPS_H_
