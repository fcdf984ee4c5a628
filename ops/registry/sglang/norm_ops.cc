#include <vector>

#include "absl/status/status.h"
#include "quern/core/status_macros.h"
#include "quern/ops/norm/layer_norm.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/families/rows/gated_norm_declaration.h"
#include "quern/ops/registry/families/rows/layer_norm_declaration.h"
#include "quern/ops/registry/families/rows/norm_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/qk_norm.h"
#include "quern/ops/registry/sglang/rows_ops.h"

namespace quern {
namespace {

using Spec = RmsNormSpec;
using Args = RmsNormArgs;
using Op = RmsNormDeclaration;

OpDType<Spec> OneDType() {
  return {&Spec::x_dtype, &Spec::residual_dtype, &Spec::out_dtype};
}

Op Norm(const char* name, bool has_weight) {
  Op op(name);
  op.In("input", &Args::x, {kLeading, &Spec::hidden}, OneDType())
      .Word("x", "input");
  if (has_weight) {
    op.In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype);
  }
  op.Need("eps", &Spec::eps)
      .Given(&Spec::sum, NormSum::kExact)
      .Out("out", &Args::out, Like("input"), Like("input"))
      .InPlace("input", "out")
      .OrHeads()
      .Calls(&CheckRmsNorm, &ExecuteRmsNorm)
      .Reference(&NativeRmsNorm);
  return op;
}

std::vector<OpExampleArg> Example() {
  return {{"input", {4, 64}}, {"weight", {64}}, {"eps", 1e-6}};
}

absl::Status AddNorms(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      Norm("rmsnorm_cpu", true).Example(Example()).AddTo(registry));
  for (const char* name : {"gemma_rmsnorm_cpu", "gemma3_rmsnorm_cpu"}) {
    QUERN_RETURN_IF_ERROR(Norm(name, true)
                              .Given(&Spec::weight, NormWeight::kOnePlus)
                              .Example(Example())
                              .AddTo(registry));
  }
  QUERN_RETURN_IF_ERROR(Norm("l2norm_cpu", false)
                            .Given(&Spec::weight, NormWeight::kNone)
                            .Example({{"input", {4, 64}}, {"eps", 1e-6}})
                            .AddTo(registry));
  return Norm("gemma4_rmsnorm_cpu", true)
      .Need("scale_shift", &Spec::shift)
      .Need<bool>("with_scale")
      .Then([](Spec& spec, const OpCall& call) {
        spec.weight =
            call.Bool("with_scale") ? NormWeight::kOnePlus : NormWeight::kNone;
        return absl::OkStatus();
      })
      .Example({{"input", {4, 64}},
                {"weight", {64}},
                {"eps", 1e-6},
                {"scale_shift", 0.5},
                {"with_scale", true}})
      .AddTo(registry);
}

absl::Status AddFusedAdd(OpRegistry& registry, const char* name,
                         NormWeight weight) {
  return Op(name)
      .InOut("input", &Args::x, &Args::out, {kLeading, &Spec::hidden},
             OneDType())
      .Word("x", "input")
      .InOut("residual", &Args::residual, &Args::residual_out, Like("input"),
             Like("input"))
      .In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Need("eps", &Spec::eps)
      .Given(&Spec::sum, NormSum::kExact)
      .Given(&Spec::weight, weight)
      .Calls(&CheckAddRmsNorm, &ExecuteAddRmsNorm)
      .Reference(&NativeAddRmsNorm)
      .Example({{"input", {4, 64}},
                {"residual", {4, 64}},
                {"weight", {64}},
                {"eps", 1e-6}})
      .AddTo(registry);
}

absl::Status AddGated(OpRegistry& registry) {
  using Spec = RmsNormGatedSpec;
  using Args = RmsNormGatedArgs;
  return RmsNormGatedDeclaration("fused_rmsnorm_gated_cpu")
      .In("input", &Args::x, {kLeading, &Spec::hidden}, &Spec::dtype)
      .Word("x", "input")
      .In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .In("gate", &Args::z, Like("input"), Like("input"))
      .Word("z", "gate")
      .Need("eps", &Spec::eps)
      .Given(&Spec::gate, GateWhen::kNormFirst)
      .Out("out", &Args::out, Like("input"), Like("input"))
      .InPlace("input", "out")
      .InPlace("gate", "out")
      .Calls(&CheckRmsNormGated, &ExecuteRmsNormGated)
      .Reference(&NativeRmsNormGated)
      .Example({{"input", {4, 64}},
                {"weight", {64}},
                {"gate", {4, 64}},
                {"eps", 1e-6}})
      .AddTo(registry);
}

absl::Status AddLayerNorms(OpRegistry& registry) {
  using Spec = LayerNormSpec;
  using Args = LayerNormArgs;
  const OpDType<Spec> one = {&Spec::dtype, &Spec::out_dtype};
  LayerNormDeclaration norm("layernorm_cpu");
  norm.In("input", &Args::x, {kLeading, &Spec::hidden}, one).OrHeads();
  LayerNormDeclaration add("fused_add_layernorm_cpu");
  add.In("input", &Args::x, {kLeading, &Spec::hidden}, one)
      .InOut("residual", &Args::residual, &Args::residual_out, Like("input"),
             Like("input"))
      .Given(&Spec::residual, true)
      .InPlace("input", "residual");
  for (LayerNormDeclaration* op : {&norm, &add}) {
    op->In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype);
    MaybeBias(*op)
        .Word("x", "input")
        .Need("eps", &Spec::eps)
        .Out("out", &Args::out, Like("input"), Like("input"))
        .InPlace("input", "out")
        .Reference(&NativeLayerNorm);
  }
  QUERN_RETURN_IF_ERROR(norm.Example({{"input", {4, 64}},
                                      {"weight", {64}},
                                      {"bias", {64}},
                                      {"eps", 1e-5}})
                            .AddTo(registry));
  return add
      .Example({{"input", {4, 64}},
                {"residual", {4, 64}},
                {"weight", {64}},
                {"bias", {64}},
                {"eps", 1e-5}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangNormOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddNorms(registry));
  QUERN_RETURN_IF_ERROR(
      AddFusedAdd(registry, "fused_add_rmsnorm_cpu", NormWeight::kPlain));
  QUERN_RETURN_IF_ERROR(AddFusedAdd(registry, "gemma_fused_add_rmsnorm_cpu",
                                    NormWeight::kOnePlus));
  QUERN_RETURN_IF_ERROR(AddGated(registry));
  QUERN_RETURN_IF_ERROR(AddLayerNorms(registry));
  return AddQkNorms(registry);
}

}  // namespace quern
