#include "quern/ops/registry/families/linear/router_declaration.h"

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/reference/router.h"

namespace quern {
namespace {

MatrixView<float> WeightsOf(const RouterArgs& a) {
  return a.weights.As<float, 2>();
}
MatrixView<int32_t> IdsOf(const RouterArgs& a) {
  return a.ids.As<int32_t, 2>();
}

absl::Status Check(const RouterArgs& a) {
  constexpr char kWhat[] = "router";
  constexpr int64_t kAnyMatrix[] = {kAnyExtent, kAnyExtent};
  if (a.hidden.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kWhat, "hidden_states", a.hidden,
                                     a.hidden.dtype(),
                                     {a.logits.extent(0), kAnyExtent}));
  }
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kWhat, "weights", a.weights, DType::kF32, kAnyMatrix));
  return CheckOutput(kWhat, "ids", a.ids, DType::kI32, kAnyMatrix);
}
void Native(const RouterSpec& spec, const RouterArgs& a) {
  NativeRouter(spec, a.logits, a.bias, WeightsOf(a), IdsOf(a));
}

absl::Status CheckTopK(RouterSpec& spec, const OpCall& call) {
  return CheckRange(call.op(), "topk", spec.top_k, 1, spec.experts);
}

}  // namespace

RouterDeclaration& RouterLogits(RouterDeclaration& op) {
  return op
      .In("gating_output", &RouterArgs::logits, {kRows, &RouterSpec::experts},
          &RouterSpec::logits_dtype)
      .Word("logits", "gating_output")
      .Word("logits_dtype", "gating_output");
}
RouterDeclaration& RouterTopK(RouterDeclaration& op) {
  return op.Need("topk", &RouterSpec::top_k)
      .Word("top_k", "topk")
      .Then(&CheckTopK);
}
RouterDeclaration& RouterRoutes(RouterDeclaration& op) {
  return op
      .Out("weights", &RouterArgs::weights, {kRows, &RouterSpec::top_k},
           DType::kF32)
      .Out("ids", &RouterArgs::ids, {kRows, &RouterSpec::top_k}, DType::kI32)
      .CheckFirst(&Check)
      .Takes<&RouterArgs::logits, &RouterArgs::bias, &WeightsOf, &IdsOf>()
      .Reference(&Native);
}

}  // namespace quern
