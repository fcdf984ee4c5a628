#include "quern/ops/registry/families/rows/activation_ops.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/registry/families/rows/gated_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/activation.h"

namespace quern {
namespace {

struct Args {
  AnyTensorView x, out;
};
using Unary = OpDeclaration<ActivationPlan, ActivationSpec, Args>;

template <NativeActivation kNative>
void NativeUnaryOf(const ActivationSpec& spec, const Args& args) {
  const NativeRound rd(spec.x_dtype);
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    for (int64_t i = 0; i < spec.hidden; ++i) {
      out.Set(i, NativeActivate(kNative, spec.params, x[i], rd));
    }
  }
}
void NativeGelu(const ActivationSpec& spec, const Args& args) {
  if (spec.activation == Activation::kGelu) {
    NativeUnaryOf<NativeActivation::kGelu>(spec, args);
  } else {
    NativeUnaryOf<NativeActivation::kGeluTanh>(spec, args);
  }
}

// An operator that maps x[..., n] to [..., n].
Unary UnaryOp(const char* name, Activation activation,
              void (*reference)(const ActivationSpec&, const Args&)) {
  using Spec = ActivationSpec;
  Unary op(name);
  op.In("x", &Args::x, {kLeading, &Spec::hidden},
        {&Spec::x_dtype, &Spec::out_dtype})
      .Given(&Spec::activation, activation)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Takes<&Args::x, &Args::out>()
      .Reference(reference)
      .Example({{"x", {4, 64}}});
  return op;
}

// The argument that chooses between two formulas of GELU.
template <class Op, class Spec>
Op& Approximate(Op& op, Activation Spec::*to) {
  const std::vector<std::pair<const char*, Activation>> formulas = {
      {"none", Activation::kGelu}, {"tanh", Activation::kGeluTanh}};
  return op.Choice("approximate", "none", formulas, to);
}

// alpha_p and alpha_n are given as stored, before softplus.
absl::Status FillXielu(ActivationSpec& spec, const OpCall& call) {
  const auto at = [&](const char* name) {
    return static_cast<float>(call.Float(name));
  };
  spec.params =
      XieluParams(at("alpha_p"), at("alpha_n"), at("beta"), at("eps"));
  return absl::OkStatus();
}

absl::Status CheckSparsity(ActAndMulSpec& spec, const OpCall& call) {
  if (spec.sparsity != 0.0) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "activation_sparsity=0; need 0 < "
                         "activation_sparsity <= 1, or gelu_and_mul");
}

absl::Status RegisterUnary(OpRegistry& r) {
  using N = NativeActivation;
  QUERN_RETURN_IF_ERROR(
      UnaryOp("silu", Activation::kSilu, &NativeUnaryOf<N::kSilu>).AddTo(r));
  Unary gelu = UnaryOp("gelu", Activation::kGelu, &NativeGelu);
  QUERN_RETURN_IF_ERROR(
      Approximate(gelu, &ActivationSpec::activation).AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("gelu_new", Activation::kGeluTanh, &NativeUnaryOf<N::kGeluNew>)
          .AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("gelu_fast", Activation::kGeluTanh, &NativeUnaryOf<N::kGeluFast>)
          .AddTo(r));
  QUERN_RETURN_IF_ERROR(UnaryOp("quick_gelu", Activation::kQuickGelu,
                                &NativeUnaryOf<N::kQuickGelu>)
                            .AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("relu2", Activation::kRelu2, &NativeUnaryOf<N::kRelu2>).AddTo(r));
  return UnaryOp("xielu", Activation::kXielu, &NativeUnaryOf<N::kXielu>)
      .Need<double>("alpha_p")
      .Need<double>("alpha_n")
      .Attr("beta", 0.5)
      .Attr("eps", -1e-6)
      .Then(&FillXielu)
      .Example({{"x", {4, 64}}, {"alpha_p", 0.2}, {"alpha_n", -1.0}})
      .AddTo(r);
}

float& Alpha(ActAndMulSpec& s) { return s.params.alpha; }
float& Limit(ActAndMulSpec& s) { return s.params.limit; }
float& Threshold(ActAndMulSpec& s) { return s.params.threshold; }

absl::Status RegisterGated(OpRegistry& r) {
  using Spec = ActAndMulSpec;
  QUERN_RETURN_IF_ERROR(
      GatedOp("silu_and_mul", "x", Activation::kSilu).AddTo(r));
  QUERN_RETURN_IF_ERROR(
      GatedOp("mul_and_silu", "x", Activation::kSilu, GateOrder::kGateSecond)
          .AddTo(r));
  GatedDeclaration gelu = GatedOp("gelu_and_mul", "x", Activation::kGelu);
  QUERN_RETURN_IF_ERROR(Approximate(gelu, &Spec::activation).AddTo(r));
  GatedDeclaration sparse =
      GatedOp("gelu_and_mul_sparse", "x", Activation::kGelu);
  sparse.Attr("activation_sparsity", 0.95, &Spec::sparsity)
      .Then(&CheckSparsity);
  QUERN_RETURN_IF_ERROR(Approximate(sparse, &Spec::activation).AddTo(r));
  QUERN_RETURN_IF_ERROR(GatedOp("swigluoai_and_mul", "x",
                                Activation::kSwigluOai, GateOrder::kInterleaved)
                            .Attr("alpha", 1.702, &Alpha)
                            .Attr("limit", 7.0, &Limit)
                            .AddTo(r));
  return GatedOp("fatrelu_and_mul", "x", Activation::kFatrelu)
      .Attr("threshold", 0.0, &Threshold)
      .AddTo(r);
}

}  // namespace

absl::Status RegisterActivationOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterGated(registry));
  return RegisterUnary(registry);
}

}  // namespace quern
