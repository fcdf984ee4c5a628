#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/families/rows/gated_norm_declaration.h"
#include "quern/ops/registry/families/rows/gated_norm_ops.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Spec = RmsNormGatedSpec;

using Args = RmsNormGatedArgs;

absl::Status FillGate(Spec& spec, const OpCall& call) {
  spec.gate = !call.has("z")                  ? GateWhen::kNone
              : call.Bool("norm_before_gate") ? GateWhen::kNormFirst
                                              : GateWhen::kGateFirst;
  return absl::OkStatus();
}

}  // namespace

absl::Status RegisterGatedNormOps(OpRegistry& registry) {
  return RmsNormGatedDeclaration("rms_norm_gated")
      .In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::dtype)
      .Maybe("z", &Args::z, Like("x"), Like("x"))
      .In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Attr("eps", 1e-5, &Spec::eps)
      .Attr("group_size", int64_t{0}, &Spec::group)
      .Attr("norm_before_gate", false)
      .Then(&FillGate)
      .Choice<NormGate>("activation", "silu",
                        {{"silu", NormGate::kSilu},
                         {"swish", NormGate::kSilu},
                         {"sigmoid", NormGate::kSigmoid}},
                        &Spec::activation)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .InPlace("z", "out")
      .Calls(&CheckRmsNormGated, &ExecuteRmsNormGated)
      .Reference(&NativeRmsNormGated)
      .Example({{"x", {4, 64}},
                {"z", {4, 64}},
                {"weight", {64}},
                {"group_size", 16}})
      .AddTo(registry);
}

}  // namespace quern
