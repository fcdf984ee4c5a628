#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/families/linear/router_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/rows_ops.h"

namespace quern {
namespace {

using Spec = RouterSpec;
using Args = RouterArgs;
using Op = RouterDeclaration;

// hidden_states and gating_output, of as many tokens.
Op Router(const char* name) {
  Op op(name);
  op.In("hidden_states", &Args::hidden, {kRows, kAny}).Rows("gating_output");
  RouterLogits(op);
  return op;
}

absl::Status AddTopK(OpRegistry& registry, const char* name,
                     RouterScore score) {
  Op op = Router(name);
  RouterTopK(op)
      .Need("renormalize", &Spec::renormalize)
      .Given(&Spec::score, score);
  return RouterRoutes(op)
      .Example({{"hidden_states", {4, 32}},
                {"gating_output", {4, 64}},
                {"topk", int64_t{6}},
                {"renormalize", true}})
      .AddTo(registry);
}

// SGLang has these arguments for routes that it does not make on a CPU.
absl::Status CheckUnused(Spec&, const OpCall& call) {
  const int64_t shared = call.Int("num_fused_shared_experts");
  if (shared != 0) {
    return InvalidArgument(call.op(), "num_fused_shared_experts=", shared,
                           "; need 0: routes to shared experts are not made");
  }
  if (!call.has("num_token_non_padded")) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "num_token_non_padded is given; need none: every row "
                         "is a token");
}

Op& Groups(Op& op) {
  return RouterTopK(op)
      .Need("renormalize", &Spec::renormalize)
      .Need("num_expert_group", &Spec::groups)
      .Need("topk_group", &Spec::top_groups)
      .Need<int64_t>("num_fused_shared_experts")
      .Attr("routed_scaling_factor", 1.0, &Spec::scale)
      .Word("scale", "routed_scaling_factor")
      .Word("groups", "num_expert_group")
      .Word("top_groups", "topk_group")
      .Maybe("num_token_non_padded", &Args::non_padded, {}, {})
      .Then(&CheckUnused);
}

absl::Status AddGrouped(OpRegistry& registry) {
  Op op = Router("grouped_topk_cpu");
  Groups(op).Then([](Spec& spec, const OpCall& call) -> absl::Status {
    if (spec.scale == 1.0f) return absl::OkStatus();
    return InvalidArgument(call.op(), "routed_scaling_factor=", spec.scale,
                           "; need 1, or grouped_topk");
  });
  return RouterRoutes(op)
      .Example({{"hidden_states", {4, 32}},
                {"gating_output", {4, 64}},
                {"topk", int64_t{6}},
                {"renormalize", true},
                {"num_expert_group", int64_t{8}},
                {"topk_group", int64_t{4}},
                {"num_fused_shared_experts", int64_t{0}}})
      .AddTo(registry);
}

absl::Status AddBiased(OpRegistry& registry) {
  Op op = Router("biased_grouped_topk_cpu");
  op.In("correction_bias", &Args::bias, {&Spec::experts}, &Spec::bias_dtype)
      .Word("bias", "correction_bias")
      .Given(&Spec::biased, true)
      .Given(&Spec::score, RouterScore::kSigmoid);
  Groups(op);
  return RouterRoutes(op)
      .Example({{"hidden_states", {4, 32}},
                {"gating_output", {4, 64}},
                {"correction_bias", {64}, DType::kF32},
                {"topk", int64_t{8}},
                {"renormalize", true},
                {"num_expert_group", int64_t{8}},
                {"topk_group", int64_t{4}},
                {"num_fused_shared_experts", int64_t{0}},
                {"routed_scaling_factor", 2.5}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangRouterOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      AddTopK(registry, "topk_softmax_cpu", RouterScore::kSoftmax));
  QUERN_RETURN_IF_ERROR(
      AddTopK(registry, "topk_sigmoid_cpu", RouterScore::kSigmoid));
  QUERN_RETURN_IF_ERROR(AddGrouped(registry));
  return AddBiased(registry);
}

}  // namespace quern
