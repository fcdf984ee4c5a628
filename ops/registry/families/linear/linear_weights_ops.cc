#include "quern/ops/registry/families/linear/linear_weights_ops.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/families/linear/example_weights.h"
#include "quern/ops/registry/families/linear/linear_declaration.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Spec = BoundLinearSpec;
using Args = LinearArgs;

int64_t ColumnsOfX(const OpCall& call) {
  return call.Object<const LinearWeights>("weights")->spec().k;
}

absl::Status FillResult(Spec& spec, const OpCall& call) {
  spec.weights = call.Object<const LinearWeights>("weights");
  spec.columns = ColumnsOfC(spec.activation, spec.weights->spec().n);
  const TensorMeta* const residual = call.Tensor("residual");
  spec.residual = residual != nullptr;
  QUERN_ASSIGN_OR_RETURN(spec.c,
                         DTypeOr(call.op(), "out_dtype", call.Text("out_dtype"),
                                 spec.residual ? residual->dtype : spec.a));
  if (!spec.residual) return absl::OkStatus();
  TensorMeta out = {spec.c, call.Tensor("x")->extents};
  out.extents.back() = spec.columns;
  return CheckMeta(call.op(), "residual", *residual, out, ", as the result is");
}

absl::Status CheckOneView(const Args& args) {
  if (args.residual.rank() == 0 || SameElements(args.residual, args.c)) {
    return absl::OkStatus();
  }
  return InvalidArgument("linear",
                         "the result is not where the residual is; need one "
                         "view for both, which the layer adds to");
}

// An example with weights of 48 x 64, for listings and tests.
NamedArgs Example(DType dtype) {
  static const auto* const weights =
      new LinearWeights(ExampleWeights(48, 64, 1.0f / 8));
  return {{"x", TensorMeta{dtype, {4, 64}}}, {"weights", weights}};
}

}  // namespace

absl::Status RegisterLinearWeightsOps(OpRegistry& registry) {
  using A = LinearActivation;
  std::vector<std::pair<const char*, A>> activations;
  for (const A a : {A::kNone, A::kSilu, A::kGelu, A::kGeluTanh, A::kSiluAndMul,
                    A::kGeluAndMul, A::kGeluTanhAndMul, A::kSwigluOaiAndMul}) {
    // The names are literals.
    activations.emplace_back(LinearActivationName(a).data(), a);
  }
  LinearDeclaration op("linear");
  op.Known<int64_t>(&Spec::k, &ColumnsOfX)
      // x cannot be int8, because the schema has no parameter for its scales.
      .In("x", &Args::a, {kLeading, &Spec::k}, FloatOf<Spec>(&Spec::a))
      .Word("a", "x")
      .Object<const LinearWeights>("weights")
      .MaybeInOut("residual", &Args::residual, {kLeading, kAny})
      .Choice<A>("activation", "none", activations, &Spec::activation)
      .Attr("out_dtype", std::string())
      .Choice<LinearActivations>("activations", "exact",
                                 LinearActivationsByName(), &Spec::activations)
      .Then(&FillResult)
      .Out("c", &Args::c, {Like("x"), &Spec::columns}, &Spec::c)
      .InPlace("residual", "out")
      .CheckFirst(&CheckOneView)
      .ExampleOf(&Example);
  return OnWeights(op).AddTo(registry);
}

}  // namespace quern
