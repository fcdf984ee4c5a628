#include "quern/ops/registry/families/rows/layer_norm_declaration.h"

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {

void NativeLayerNorm(const LayerNormSpec& spec, const LayerNormArgs& args) {
  const auto count = static_cast<double>(spec.hidden);
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    const ScalarRow residual(args.residual, spec.residual ? t : 0);
    const ScalarRow weight(args.weight, 0), bias(args.bias, 0);
    const auto h = [&](int64_t i) {
      return spec.residual ? double{x[i]} + double{residual[i]} : double{x[i]};
    };
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < spec.hidden; ++i) mean += h(i) / count;
    for (int64_t i = 0; i < spec.hidden; ++i) {
      squares += (h(i) - mean) * (h(i) - mean);
    }
    const double deviation = std::sqrt(squares / count + double{spec.eps});
    for (int64_t i = 0; i < spec.hidden; ++i) {
      const double v = h(i);
      double y = (v - mean) / deviation;
      if (spec.weight) y *= double{weight[i]};
      if (spec.bias) y += double{bias[i]};
      if (spec.residual) residual.Set(i, static_cast<float>(v));
      out.Set(i, static_cast<float>(y));
    }
  }
}

LayerNormDeclaration& MaybeBias(LayerNormDeclaration& op) {
  return op
      .Maybe("bias", &LayerNormArgs::bias, {&LayerNormSpec::hidden},
             &LayerNormSpec::weight_dtype)
      .Then([](LayerNormSpec& spec, const OpCall& call) {
        spec.bias = call.has("bias");
        return absl::OkStatus();
      });
}

}  // namespace quern
