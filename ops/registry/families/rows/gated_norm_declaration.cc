#include "quern/ops/registry/families/rows/gated_norm_declaration.h"

#include <cmath>
#include <cstdint>

#include "quern/ops/registry/bound_rows.h"

namespace quern {

absl::Status CheckRmsNormGated(const RmsNormGatedPlan& plan,
                               const RmsNormGatedArgs& a) {
  return plan.CheckArgs(a.x, a.z, a.weight, a.out);
}
void ExecuteRmsNormGated(const RmsNormGatedPlan& plan,
                         const RmsNormGatedArgs& a, Workspace,
                         Executor& executor) {
  plan.Execute(a.x, a.z, a.weight, a.out, executor);
}

void NativeRmsNormGated(const RmsNormGatedSpec& spec,
                        const RmsNormGatedArgs& args) {
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

}  // namespace quern
