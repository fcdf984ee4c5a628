#ifndef QUERN_OPS_REGISTRY_VLLM_COLLECTIVE_OPS_H_
#define QUERN_OPS_REGISTRY_VLLM_COLLECTIVE_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Collective operators of tensor parallelism, by vLLM's and SGLang's names, on
// a Communicator (core/communicator.h) in place of their handles and their
// process-wide state; ops/parallel has ranks as threads and as processes.
// Without one there is a single rank.
//
// shm_allreduce: data[..., n], f32, bf16 or f16, becomes the sum over all
// ranks, in f32 in the order of ranks, rounded once. reduce_op is 0, a sum.
// vLLM's argument handle is `ranks`.
//
// shm_allgather (SGLang): out is what ranks have as `data`, one behind the
// other along dimension `dim`, which may count from the end. shm_all_gather
// (vLLM): output[ranks, ...] <- data of each rank, in their order. Dense
// tensors of any dtype.
//
// All ranks must make the same calls in the same order. Providers: reference,
// which moves what the Communicator does not.
absl::Status RegisterVllmCollectiveOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_COLLECTIVE_OPS_H_
