#ifndef QUERN_OPS_REGISTRY_VLLM_ROWS_H_
#define QUERN_OPS_REGISTRY_VLLM_ROWS_H_

// Private: the parts of RegisterVllmRowsOps.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// The quantisers to fp8.
absl::Status RegisterVllmFp8Ops(OpRegistry& registry);
// biased_topk_cpu and greedy_argmax.
absl::Status RegisterVllmChoiceOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ROWS_H_
