#ifndef QUERN_OPS_REGISTRY_VLLM_RECURRENT_H_
#define QUERN_OPS_REGISTRY_VLLM_RECURRENT_H_

// Private: the parts of RegisterVllmRecurrentOps.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// mamba_chunk_scan_fwd_cpu.
absl::Status RegisterVllmChunkScan(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_RECURRENT_H_
