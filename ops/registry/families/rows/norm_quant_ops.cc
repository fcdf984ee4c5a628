#include <cmath>
#include <cstdint>

#include "quern/ops/norm/rms_norm_quant.h"
#include "quern/ops/registry/families/rows/quant_ops.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

using Spec = RmsNormQuantSpec;
using Args = RmsNormQuantArgs;
using Plan = RmsNormQuantPlan;
using Op = OpDeclaration<Plan, Spec, Args>;

// Computes in f32 with a sum in double; the normalised row is not rounded to 16
// bits.
template <bool kAdd>
void Native(const Spec& spec, const Args& args) {
  const int64_t n = spec.norm.hidden;
  for (int64_t t = 0; t < args.x.extent(0); ++t) {
    const ScalarRow x(args.x, t), q(args.q, t);
    const ScalarRow residual(kAdd ? args.residual_out : args.x, t);
    const ScalarRow weight(
        spec.norm.weight == NormWeight::kNone ? AnyTensorView() : args.weight,
        0);
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (kAdd) residual.Set(i, x[i] + residual[i]);
      squares += double{residual[i]} * double{residual[i]};
    }
    const double rms = std::sqrt(squares / static_cast<double>(n) +
                                 static_cast<double>(spec.norm.eps));
    // The normalised row is computed twice, because there is no memory to keep
    // it.
    const auto normed = [&](int64_t i) {
      const double w = weight.null() ? 1.0 : double{weight[i]};
      return static_cast<float>(double{residual[i]} / rms * w);
    };
    float most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float v = std::abs(normed(i));
      if (!(v <= most)) most = std::isnan(most) ? most : v;
    }
    const bool int8 = spec.q_dtype == DType::kI8;
    float s = spec.scale;
    if (spec.scale_of == NormScale::kPerToken) {
      s = !int8 ? std::max(most / 448.0f, Fp8QuantizePlan::kMinScale)
          : most < 0x1p-126f
              ? 1.0f
              : std::max(most / 127.0f, Int8QuantizePlan::kMinScale);
      if (!std::isfinite(most)) s = std::nanf("");
      static_cast<float*>(args.scales.mutable_data())[t] = s;
    }
    const float limit = int8 ? 127.0f : 448.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float v = normed(i) / s;
      if (std::isnan(v)) {
        q.Set(i, int8 ? 0.0f : v);
        continue;
      }
      const float clamped =
          std::min(std::max(v, int8 ? -128.0f : -limit), limit);
      q.Set(i, int8 ? std::nearbyint(clamped) : clamped);
    }
  }
}

int64_t& Hidden(Spec& s) { return s.norm.hidden; }
float& Eps(Spec& s) { return s.norm.eps; }
DType& XDType(Spec& s) { return s.norm.x_dtype; }
DType& ResidualDType(Spec& s) { return s.norm.residual_dtype; }
DType& WeightDType(Spec& s) { return s.norm.weight_dtype; }

absl::Status MaybeWithoutWeight(Spec& spec, const OpCall& call) {
  if (call.has("weight")) return absl::OkStatus();
  spec.norm.weight = NormWeight::kNone;
  spec.norm.weight_dtype = spec.norm.x_dtype;
  return absl::OkStatus();
}

// kAdd: with a residual. kScale: a scale for each token, or one that is given.
template <bool kAdd, NormScale kScale>
absl::Status Add(OpRegistry& registry, const char* name) {
  constexpr bool kStatic = kScale == NormScale::kStatic;
  Op op(name);
  op.In("x", &Args::x, {kLeading, &Hidden}, {&XDType, &ResidualDType});
  std::vector<OpExampleArg> example = {{"x", {4, 64}}, {"weight", {64}}};
  if (kAdd) {
    op.InOut("residual", &Args::residual, &Args::residual_out, Like("x"),
             Like("x"))
        .InPlace("x", "residual")
        .Calls<&Plan::CheckAddArgs, &Plan::ExecuteAdd>();
    example.push_back({"residual", {4, 64}});
  }
  op.Maybe("weight", &Args::weight, {&Hidden}, &WeightDType)
      .Then(&MaybeWithoutWeight);
  if (kStatic) {
    op.Need("scale", &Spec::scale);
    example.push_back({"scale", 0.05});
  }
  op.Given(&Spec::scale_of, kScale)
      .Choice<DType>("q_dtype", "fp8",
                     {{"int8", DType::kI8}, {"fp8", DType::kF8E4M3}},
                     &Spec::q_dtype)
      .Attr("eps", 1e-6, &Eps)
      .Out("q", &Args::q, Like("x"), &Spec::q_dtype);
  if (!kStatic) op.Out("scales", &Args::scales, {kRows}, DType::kF32);
  return op.Reference(&Native<kAdd>)
      .Example(std::move(example))
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterNormQuantOps(OpRegistry& r) {
  constexpr NormScale kPerToken = NormScale::kPerToken;
  constexpr NormScale kStatic = NormScale::kStatic;
  QUERN_RETURN_IF_ERROR((Add<false, kPerToken>(r, "rms_norm_quant")));
  QUERN_RETURN_IF_ERROR((Add<false, kStatic>(r, "rms_norm_static_quant")));
  QUERN_RETURN_IF_ERROR((Add<true, kPerToken>(r, "fused_add_rms_norm_quant")));
  return Add<true, kStatic>(r, "fused_add_rms_norm_static_quant");
}

}  // namespace quern
