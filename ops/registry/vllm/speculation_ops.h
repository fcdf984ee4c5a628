#ifndef QUERN_OPS_REGISTRY_VLLM_SPECULATION_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_SPECULATION_OPS_H_

// vLLM's operators of speculation on a CPU, by its names and with its
// arguments, over the plans of ops/speculation. vLLM has i64 for most numbers;
// each tensor may also be i32 where the plan's header says so.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// rejection_greedy_sample_kernel_impl, rejection_random_sample_kernel_impl,
// expand_kernel_impl, sample_recovered_tokens_kernel_impl: see
// families/rows/speculation_ops.h.
//
// compute_slot_mapping_kernel_impl, eagle_prepare_inputs_padded_kernel_impl,
// eagle_prepare_next_token_padded_kernel_impl,
// eagle_step_slot_mapping_metadata_kernel_impl,
// copy_and_expand_eagle_inputs_kernel_impl: ops/speculation/draft_inputs.h.
// PAD_ID is pad_id here. Provider: reference, plain loops.
absl::Status RegisterVllmSpeculationOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_SPECULATION_OPS_H_
