#ifndef QUERN_OPS_REGISTRY_SGLANG_QK_NORM_H_
#define QUERN_OPS_REGISTRY_SGLANG_QK_NORM_H_

// Private to this folder.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Registers fused_qk_gemma_rmsnorm_cpu and fused_qk_gemma_rmsnorm_with_gate_cpu
// (rows_ops.h).
absl::Status AddQkNorms(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_QK_NORM_H_
