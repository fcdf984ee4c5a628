#include "quern/ops/registry/families/rows/norm_ops.h"

#include <cmath>
#include <cstdint>

#include "quern/ops/norm/l2_norm.h"
#include "quern/ops/norm/layer_norm.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/families/rows/layer_norm_declaration.h"
#include "quern/ops/registry/families/rows/norm_declaration.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Spec = RmsNormSpec;
using Args = RmsNormArgs;
using Op = RmsNormDeclaration;

// The product alone is rounded.
void NativeL2(const L2NormSpec& spec, const L2NormArgs& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    double squares = 0;
    for (int64_t i = 0; i < spec.hidden; ++i) {
      squares += double{x[i]} * double{x[i]};
    }
    const auto inverse =
        static_cast<float>(1.0 / std::sqrt(squares + double{spec.eps}));
    for (int64_t i = 0; i < spec.hidden; ++i) out.Set(i, x[i] * inverse);
  }
}

// A norm that may be without a weight.
Op& MaybeWeight(Op& op) {
  return op.Maybe("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Then([](Spec& spec, const OpCall& call) {
        if (call.has("weight")) return absl::OkStatus();
        spec.weight = NormWeight::kNone;
        spec.weight_dtype = spec.x_dtype;
        return absl::OkStatus();
      });
}

// One that must have one.
Op& Weight(Op& op) {
  return op.In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype);
}

// All that is read and written has the dtype of x.
OpDType<Spec> OneDType() {
  return {&Spec::x_dtype, &Spec::residual_dtype, &Spec::out_dtype};
}

absl::Status AddRmsNorm(OpRegistry& registry) {
  Op op("rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden},
        {&Spec::x_dtype, &Spec::residual_dtype});
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Attr("var_hidden_size", int64_t{0}, &Spec::span)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Takes<&Args::x, &Args::weight, &Args::out>()
      .Reference(&NativeRmsNorm)
      .Example({{"x", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddAddRmsNorm(OpRegistry& registry) {
  Op op("add_rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::x_dtype)
      .InOut("residual", &Args::residual, &Args::residual_out, Like("x"),
             &Spec::residual_dtype);
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .InPlace("x", "residual")
      .Calls<&RmsNormPlan::CheckAddArgs, &RmsNormPlan::ExecuteAdd>()
      .Reference(&NativeAddRmsNorm)
      .Example({{"x", {4, 64}}, {"residual", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddFusedAddRmsNorm(OpRegistry& registry) {
  Op op("fused_add_rms_norm");
  op.InOut("x", &Args::x, &Args::out, {kLeading, &Spec::hidden}, OneDType())
      .InOut("residual", &Args::residual, &Args::residual_out, Like("x"),
             Like("x"));
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Calls<&RmsNormPlan::CheckAddArgs, &RmsNormPlan::ExecuteAdd>()
      .Reference(&NativeAddRmsNorm)
      .Example({{"x", {4, 64}}, {"residual", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddGemmaRmsNorm(OpRegistry& registry) {
  Op op("gemma_rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden}, OneDType());
  return Weight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Given(&Spec::weight, NormWeight::kOnePlus)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .OrHeads()
      .Takes<&Args::x, &Args::weight, &Args::out>()
      .Reference(&NativeRmsNorm)
      .Example({{"x", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddL2Norm(OpRegistry& registry) {
  return OpDeclaration<L2NormPlan, L2NormSpec, L2NormArgs>("l2_norm")
      .In("x", &L2NormArgs::x, {kLeading, &L2NormSpec::hidden},
          &L2NormSpec::x_dtype)
      .Attr("eps", 1e-6, &L2NormSpec::eps)
      .DTypeAttr("out_dtype", Like("x"), &L2NormSpec::out_dtype)
      .Out("out", &L2NormArgs::out, Like("x"), &L2NormSpec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Reference(&NativeL2)
      .Example({{"x", {4, 64}}})
      .AddTo(registry);
}

absl::Status AddLayerNorm(OpRegistry& registry) {
  using Spec = LayerNormSpec;
  using Args = LayerNormArgs;
  LayerNormDeclaration op("layer_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::dtype)
      .Maybe("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Then([](Spec& spec, const OpCall& call) {
        spec.weight = call.has("weight");
        return absl::OkStatus();
      });
  return MaybeBias(op)
      .Attr("eps", 1e-5, &Spec::eps)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Reference(&NativeLayerNorm)
      .Example({{"x", {4, 64}}, {"weight", {64}}, {"bias", {64}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterNormOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddAddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddFusedAddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddGemmaRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddL2Norm(registry));
  return AddLayerNorm(registry);
}

}  // namespace quern
