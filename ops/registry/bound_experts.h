#ifndef QUERN_OPS_REGISTRY_BOUND_EXPERTS_H_
#define QUERN_OPS_REGISTRY_BOUND_EXPERTS_H_

// The operators of experts_ops.h once their arguments are known. `op` is a
// literal; `native` asks for the reference.

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/communicator.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Experts with routes. The tensors are hidden_states, topk_weights, topk_ids,
// expert_map, shared_output, out.
absl::StatusOr<std::unique_ptr<BoundOp>> BindExperts(
    absl::string_view op, const ExpertsSpec& spec, const ExpertWeights& weights,
    Communicator* ranks, bool native);

// A router and its experts. The tensors are hidden_states, router_logits,
// e_score_correction_bias, expert_map, shared_output, out.
absl::StatusOr<std::unique_ptr<BoundOp>> BindMixture(
    absl::string_view op, const RouterSpec& route, const ExpertsSpec& spec,
    const ExpertWeights& weights, Communicator* ranks, bool native);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_BOUND_EXPERTS_H_
