#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/rows/gated_norm_ops.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Spec = RmsNormGatedSpec;

struct Args {
  AnyTensorView x, z, weight, out;
};

absl::Status Check(const RmsNormGatedPlan& plan, const Args& a) {
  return plan.CheckArgs(a.x, a.z, a.weight, a.out);
}
void Execute(const RmsNormGatedPlan& plan, const Args& a, Workspace,
             Executor& executor) {
  plan.Execute(a.x, a.z, a.weight, a.out, executor);
}

absl::Status FillGate(Spec& spec, const OpCall& call) {
  spec.gate = !call.has("z")                  ? GateWhen::kNone
              : call.Bool("norm_before_gate") ? GateWhen::kNormFirst
                                              : GateWhen::kGateFirst;
  return absl::OkStatus();
}

// Computes in double and rounds once, as the kernel rounds its f32 results.
void Native(const Spec& spec, const Args& args) {
  const auto act = [&](double v) {
    const double sigmoid = 1.0 / (1.0 + std::exp(-v));
    return spec.activation == NormGate::kSilu ? v * sigmoid : sigmoid;
  };
  const ScalarRow weight(args.weight, 0);
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), z(args.z, t), out(args.out, t);
    const auto h = [&](int64_t i) {
      const double v = double{x[i]};
      return spec.gate == GateWhen::kGateFirst ? v * act(double{z[i]}) : v;
    };
    for (int64_t g = 0; g < spec.hidden; g += spec.group) {
      double squares = 0;
      for (int64_t i = g; i < g + spec.group; ++i) squares += h(i) * h(i);
      const double rms = std::sqrt(squares / static_cast<double>(spec.group) +
                                   double{spec.eps});
      for (int64_t i = g; i < g + spec.group; ++i) {
        double y = h(i) / rms * double{weight[i]};
        if (spec.gate == GateWhen::kNormFirst) y *= act(double{z[i]});
        out.Set(i, static_cast<float>(y));
      }
    }
  }
}

}  // namespace

absl::Status RegisterGatedNormOps(OpRegistry& registry) {
  return OpDeclaration<RmsNormGatedPlan, Spec, Args>("rms_norm_gated")
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
      .Calls(&Check, &Execute)
      .Reference(&Native)
      .Example({{"x", {4, 64}},
                {"z", {4, 64}},
                {"weight", {64}},
                {"group_size", 16}})
      .AddTo(registry);
}

}  // namespace quern
