#include "quern/ops/registry/families/linear/moe_ops.h"

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/router.h"

namespace quern {
namespace {

using Spec = RouterSpec;

struct Args {
  AnyTensorView hidden, logits, bias, weights, ids;
};
using Op = OpDeclaration<RouterPlan, Spec, Args>;

absl::Status Check(const RouterPlan& plan, const Args& a) {
  constexpr char kWhat[] = "router";
  constexpr int64_t kAnyMatrix[] = {kAnyExtent, kAnyExtent};
  if (a.hidden.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kWhat, "hidden_states", a.hidden,
                                     a.hidden.dtype(),
                                     {a.logits.extent(0), kAnyExtent}));
  }
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kWhat, "weights", a.weights, DType::kF32, kAnyMatrix));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kWhat, "ids", a.ids, DType::kI32, kAnyMatrix));
  return plan.CheckArgs(a.logits, a.bias, a.weights.As<float, 2>(),
                        a.ids.As<int32_t, 2>());
}
void Execute(const RouterPlan& plan, const Args& a, Workspace,
             Executor& executor) {
  plan.Execute(a.logits, a.bias, a.weights.As<float, 2>(),
               a.ids.As<int32_t, 2>(), executor);
}
void Native(const Spec& spec, const Args& a) {
  NativeRouter(spec, a.logits, a.bias, a.weights.As<float, 2>(),
               a.ids.As<int32_t, 2>());
}

absl::Status CheckTopK(Spec& spec, const OpCall& call) {
  return CheckRange(call.op(), "topk", spec.top_k, 1, spec.experts);
}

Op& Logits(Op& op) {
  return op
      .In("gating_output", &Args::logits, {kRows, &Spec::experts},
          &Spec::logits_dtype)
      .Word("logits", "gating_output")
      .Word("logits_dtype", "gating_output");
}
Op& TopK(Op& op) {
  return op.Need("topk", &Spec::top_k).Word("top_k", "topk").Then(&CheckTopK);
}
Op& Routes(Op& op) {
  return op.Out("weights", &Args::weights, {kRows, &Spec::top_k}, DType::kF32)
      .Out("ids", &Args::ids, {kRows, &Spec::top_k}, DType::kI32)
      .Calls(&Check, &Execute)
      .Reference(&Native);
}

absl::Status AddTopK(OpRegistry& registry, const char* name,
                     RouterScore score) {
  Op op(name);
  TopK(RouterBias(Logits(op), "bias"))
      .Attr("renormalize", false, &Spec::renormalize)
      .Given(&Spec::score, score);
  return Routes(RouterScale(op))
      .Example({{"gating_output", {4, 64}},
                {"topk", int64_t{6}},
                {"renormalize", true}})
      .AddTo(registry);
}

absl::Status AddGroupedTopK(OpRegistry& registry) {
  Op op("grouped_topk");
  op.Maybe("hidden_states", &Args::hidden, {kRows, kAny}).Rows("gating_output");
  TopK(RouterBias(Logits(op), "e_score_correction_bias"))
      .Need("renormalize", &Spec::renormalize)
      .Need("num_expert_group", &Spec::groups)
      .Need("topk_group", &Spec::top_groups);
  return Routes(RouterScoreAndScale(op))
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
