#include "quern/ops/registry/families/rows/gate_ops.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "quern/ops/activation/sigmoid_mul.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Spec = SigmoidMulSpec;

struct Args {
  AnyTensorView x, gate, out;
};

absl::Status CheckGate(Spec&, const OpCall& call) {
  const TensorMeta &x = *call.Tensor("x"), &gate = *call.Tensor("gate");
  std::vector<int64_t> one = x.extents;
  one.back() = 1;
  if (gate.extents == x.extents || gate.extents == one) return absl::OkStatus();
  return InvalidArgument(call.op(), "gate is ", PrintMeta(gate), " and x is ",
                         PrintMeta(x), "; need the shape of x, or 1 in ",
                         "place of its last extent, ", x.extents.back());
}

void Native(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), gate(args.gate, t), out(args.out, t);
    for (int64_t i = 0; i < spec.d; ++i) {
      const double g = double{gate[spec.gate_cols == 1 ? 0 : i]};
      out.Set(i, static_cast<float>(double{x[i]} / (1.0 + std::exp(-g))));
    }
  }
}

}  // namespace

absl::Status RegisterGateOps(OpRegistry& registry) {
  return OpDeclaration<SigmoidMulPlan, Spec, Args>("sigmoid_mul")
      .In("x", &Args::x, {kLeading, &Spec::d}, &Spec::x_dtype)
      .In("gate", &Args::gate, {kLeading, &Spec::gate_cols}, &Spec::gate_dtype)
      .Then(&CheckGate)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Takes<&Args::x, &Args::gate, &Args::out>()
      .Reference(&Native)
      .Example({{"x", {4, 64}}, {"gate", {4, 64}}})
      .AddTo(registry);
}

}  // namespace quern
