#ifndef QUERN_OPS_REGISTRY_REFERENCE_ROUTER_H_
#define QUERN_OPS_REGISTRY_REFERENCE_ROUTER_H_

#include <cstdint>

#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

// The formulas of ops/moe/router_spec.h as plain loops in f32, on the calling
// thread: what RouterPlan::Execute does, with exponentials rounded from double.
void NativeRouter(const RouterSpec& spec, const AnyTensorView& logits,
                  const AnyTensorView& bias, const MatrixView<float>& weights,
                  const MatrixView<int32_t>& ids);

// Adds routed_scaling_factor, and the schema's words for what RouterPlan
// refuses. Spec is derived from RouterSpec, or is it.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& RouterScale(
    OpDeclaration<Plan, Spec, Args>& op) {
  return op.Attr("routed_scaling_factor", 1.0, &RouterSpec::scale)
      .Word("scale", "routed_scaling_factor")
      .Word("groups", "num_expert_group")
      .Word("top_groups", "topk_group");
}

// Adds scoring_func and routed_scaling_factor.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& RouterScoreAndScale(
    OpDeclaration<Plan, Spec, Args>& op) {
  return RouterScale(op.template Choice<RouterScore>(
      "scoring_func", "softmax",
      {{"softmax", RouterScore::kSoftmax},
       {"sigmoid", RouterScore::kSigmoid},
       {"sqrtsoftplus", RouterScore::kSqrtSoftplus}},
      &RouterSpec::score));
}

// Adds a bias of the experts, which may be left out.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& RouterBias(OpDeclaration<Plan, Spec, Args>& op,
                                            const char* name) {
  return op
      .Maybe(name, &Args::bias, {&RouterSpec::experts}, &RouterSpec::bias_dtype)
      .Word("bias", name)
      .Then([name](Spec& spec, const OpCall& call) {
        spec.biased = call.has(name);
        return absl::OkStatus();
      });
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_ROUTER_H_
