#include "quern/ops/registry/families/linear/moe_ops.h"

#include <cstdint>

#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/families/linear/router_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/router.h"

namespace quern {
namespace {

using Spec = RouterSpec;

using Args = RouterArgs;
using Op = RouterDeclaration;

absl::Status AddTopK(OpRegistry& registry, const char* name,
                     RouterScore score) {
  Op op(name);
  RouterTopK(RouterBias(RouterLogits(op), "bias"))
      .Attr("renormalize", false, &Spec::renormalize)
      .Given(&Spec::score, score);
  return RouterRoutes(RouterScale(op))
      .Example({{"gating_output", {4, 64}},
                {"topk", int64_t{6}},
                {"renormalize", true}})
      .AddTo(registry);
}

absl::Status AddGroupedTopK(OpRegistry& registry) {
  Op op("grouped_topk");
  op.Maybe("hidden_states", &Args::hidden, {kRows, kAny}).Rows("gating_output");
  RouterTopK(RouterBias(RouterLogits(op), "e_score_correction_bias"))
      .Need("renormalize", &Spec::renormalize)
      .Need("num_expert_group", &Spec::groups)
      .Need("topk_group", &Spec::top_groups);
  return RouterRoutes(RouterScoreAndScale(op))
      .Example({{"hidden_states", {4, 32}},
                {"gating_output", {4, 64}},
                {"e_score_correction_bias", {64}, DType::kF32},
                {"topk", int64_t{6}},
                {"renormalize", true},
                {"num_expert_group", int64_t{8}},
                {"topk_group", int64_t{4}},
                {"scoring_func", "sigmoid"},
                {"routed_scaling_factor", 2.5}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterMoeOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      AddTopK(registry, "topk_softmax", RouterScore::kSoftmax));
  QUERN_RETURN_IF_ERROR(
      AddTopK(registry, "topk_sigmoid", RouterScore::kSigmoid));
  return AddGroupedTopK(registry);
}

}  // namespace quern
