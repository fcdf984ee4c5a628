#include "quern/ops/registry/families/rows/gated_declaration.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/activation.h"

namespace quern {
namespace {

NativeActivation NativeOf(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return NativeActivation::kGelu;
    case Activation::kGeluTanh:
      return NativeActivation::kGeluTanh;
    case Activation::kQuickGelu:
      return NativeActivation::kQuickGelu;
    case Activation::kRelu2:
      return NativeActivation::kRelu2;
    case Activation::kFatrelu:
      return NativeActivation::kFatrelu;
    case Activation::kXielu:
      return NativeActivation::kXielu;
    default:
      return NativeActivation::kSilu;
  }
}

// The cutoff of one row, with mean, deviation and cutoff each rounded by rd.
// The quantile stays f32.
float NativeCutoff(const ScalarRow& gate, int64_t n, float quantile,
                   const NativeRound& rd) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{gate[i]};
  const double mean = sum / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) {
    squares += (double{gate[i]} - mean) * (double{gate[i]} - mean);
  }
  const float deviation =
      rd(static_cast<float>(std::sqrt(squares / static_cast<double>(n))));
  return rd(rd(static_cast<float>(mean)) + rd(deviation * quantile));
}

void NativeGated(const ActAndMulSpec& spec, const GatedArgs& args) {
  const int64_t d = spec.d;
  const bool pairs = spec.order == GateOrder::kInterleaved;
  const NativeRound rd(spec.x_dtype);
  const float quantile =
      spec.sparsity == 0.0 ? 0.0f
                           : static_cast<float>(NormalQuantile(spec.sparsity));
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    const float cutoff =
        spec.sparsity == 0.0 ? 0.0f : NativeCutoff(x, d, quantile, rd);
    for (int64_t i = 0; i < d; ++i) {
      float gate = x[pairs ? 2 * i : i], up = x[pairs ? 2 * i + 1 : d + i];
      if (spec.order == GateOrder::kGateSecond) std::swap(gate, up);
      if (spec.sparsity != 0.0) {
        const float above = rd(gate - cutoff);
        gate = above < 0.0f ? 0.0f : above;
      }
      out.Set(i, spec.activation == Activation::kSwigluOai
                     ? NativeSwigluOai(spec.params, gate, up, rd)
                     : NativeActivate(NativeOf(spec.activation), spec.params,
                                      gate, rd) *
                           up);
    }
  }
}

}  // namespace

GatedDeclaration GatedOp(const char* name, const char* input,
                         Activation activation, GateOrder order) {
  using Spec = ActAndMulSpec;
  GatedDeclaration op(name);
  op.In(input, &GatedArgs::x, {kLeading, Times(2, &Spec::d)},
        {&Spec::x_dtype, &Spec::out_dtype})
      .Given(&Spec::activation, activation)
      .Given(&Spec::order, order)
      .Out("out", &GatedArgs::out, {Like(input), &Spec::d}, Like(input))
      .InPlace(input, "out")
      .Takes<&GatedArgs::x, &GatedArgs::out>()
      .Reference(&NativeGated)
      .Example({{input, {4, 64}}});
  if (absl::string_view(input) != "x") op.Word("x", input);
  return op;
}

}  // namespace quern
