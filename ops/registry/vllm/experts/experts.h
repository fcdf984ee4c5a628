#ifndef QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_H_
#define QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_H_

// Private: the parts of RegisterVllmExpertsOps.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// prepack_moe_weight and prepack_moe_weight_int8.
absl::Status RegisterVllmPrepackOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_H_
