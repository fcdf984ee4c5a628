#ifndef QUERN_OPS_REGISTRY_VLLM_LINEAR_H_
#define QUERN_OPS_REGISTRY_VLLM_LINEAR_H_

// Private: what the operators of linear_ops.h have in common.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/families/linear/linear_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/vllm/linear_ops.h"

namespace quern {

// Defines onednn_scaled_mm.
absl::Status RegisterVllmScaledMm(OpRegistry& registry);
// Defines cpu_gemm_wna16.
absl::Status RegisterVllmWna16(OpRegistry& registry);

// bias[n] as a residual of m rows, which are one row in memory. No bias is no
// residual.
AnyTensorView EachRow(const AnyTensorView& bias, int64_t m);

inline OneDnnHandler& HandlerOf(const OpCall& call) {
  return *call.Object<OneDnnHandler>("handler");
}

// Takes the weights of `handler`, and their k and columns. InvalidArgument
// unless it has weights of the kind.
absl::Status FillFromHandler(BoundLinearSpec& spec, const OpCall& call,
                             bool scaled);

// What c[m, n], a[m, k] and bias[n] of a product begin with and end with.
template <class Plan, class Spec, class Args>
void BeginProduct(OpDeclaration<Plan, Spec, Args>& op, bool scaled) {
  op.Then([scaled](Spec& spec, const OpCall& call) {
      return FillFromHandler(spec, call, scaled);
    })
      .template Known<int64_t>(
          &Spec::k,
          [](const OpCall& call) { return HandlerOf(call).weights.spec().k; })
      .template Known<int64_t>(&Spec::columns, [](const OpCall& call) {
        return HandlerOf(call).weights.spec().n;
      });
}
template <class Plan, class Spec, class Args>
void EndProduct(OpDeclaration<Plan, Spec, Args>& op,
                AnyTensorView Args::*bias) {
  op.Maybe("bias", bias, {&Spec::columns}, OpDType<Spec>::Must(Like("c")))
      .template Object<OneDnnHandler>("handler")
      .Then([](Spec& spec, const OpCall& call) {
        spec.residual = call.has("bias");
        return absl::OkStatus();
      })
      .Rows("c");
}

// Weights of 64 x 48 ones, kF32 or kI8Channel, for listings and tests.
LinearWeights OnesForExamples(WeightFormat format);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_LINEAR_H_
