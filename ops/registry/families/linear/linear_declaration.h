#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_DECLARATION_H_

// Private: what declarations of operators on a LinearPlan have in common.

#include <cstdint>
#include <functional>
#include <iterator>

#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/linear.h"

namespace quern {

// What a LinearPlan is made from, with the extents of its tensors.
struct BoundLinearSpec : LinearSpec {
  const LinearWeights* weights = nullptr;  // borrowed while it is made
  int64_t rows = 0;
  int64_t k = 0;
  int64_t columns = 0;  // of the result
};
using LinearDeclaration =
    OpDeclaration<LinearPlan, BoundLinearSpec, LinearArgs>;

// A float of those that linear layers multiply, which `to` has.
template <class Spec>
OpDType<Spec> FloatOf(DType Spec::*to) {
  return OpDType<Spec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {to});
}

// The providers simd, onednn and reference of a layer on spec.weights, as
// linear_provider.h and reference/linear.h have them.
inline LinearDeclaration& OnWeights(LinearDeclaration& op) {
  using Spec = BoundLinearSpec;
  return op.Layer()
      .Providers({"simd", "onednn", "reference"})
      .Creates([](const Spec& spec, const OpCall& call) {
        return LinearPlanOf(call.op(), LinearProviderOf(call.provider()), spec,
                            *spec.weights);
      })
      .ReferenceFrom(
          [](const Spec& spec, const LinearPlan&)
              -> absl::StatusOr<std::function<void(const LinearArgs&)>> {
            QUERN_ASSIGN_OR_RETURN(
                const NativeLinear native,
                NativeLinear::Create(*spec.weights, spec.activation));
            return [native](const LinearArgs& args) {
              native.Multiply(args.a, args.residual, args.c);
            };
          });
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_DECLARATION_H_
