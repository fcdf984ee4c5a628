#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm_quant.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/quant_ops.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "rms_norm_quant";

// The arguments that the four operators share.
struct Wanted {
  TensorMeta x;
  std::optional<TensorMeta> residual;
  MaybeMeta weight;
  std::string q_dtype;
  double eps;
  std::optional<double> scale;  // set for a static scale
};

absl::StatusOr<RmsNormQuantSpec> SpecOf(const Wanted& w) {
  RmsNormQuantSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.norm.hidden, LastExtent(kOp, "x", w.x));
  if (w.weight.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckExtents(kOp, "weight", *w.weight, {spec.norm.hidden}));
  }
  if (w.residual.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckMeta(kOp, "residual", *w.residual, w.x, ", as x is"));
  }
  if (w.q_dtype != "int8" && w.q_dtype != "fp8") {
    return InvalidArgument(kOp, "q_dtype=\"", w.q_dtype,
                           "\"; need \"int8\" or \"fp8\"");
  }
  spec.norm.eps = static_cast<float>(w.eps);
  spec.norm.x_dtype = spec.norm.residual_dtype = w.x.dtype;
  spec.norm.weight_dtype = w.weight.has_value() ? w.weight->dtype : w.x.dtype;
  spec.norm.weight =
      w.weight.has_value() ? NormWeight::kPlain : NormWeight::kNone;
  spec.q_dtype = w.q_dtype == "int8" ? DType::kI8 : DType::kF8E4M3;
  if (w.scale.has_value()) {
    spec.scale_of = NormScale::kStatic;
    spec.scale = static_cast<float>(*w.scale);
  }
  return spec;
}

Metas ShapesOf(const Wanted& w) {
  QUERN_ASSIGN_OR_RETURN(const RmsNormQuantSpec spec, SpecOf(w));
  std::vector<TensorMeta> metas = {{spec.q_dtype, w.x.extents}};
  if (!w.scale.has_value()) {
    QUERN_ASSIGN_OR_RETURN(const int64_t rows, LeadingRows(kOp, "x", w.x));
    metas.push_back({DType::kF32, {rows}});
  }
  return metas;
}

// The tensors are x, residual (in place, or none), weight, q, and scales (or
// none).
RmsNormQuantArgs ArgsOf(Tensors t, bool add, bool dynamic) {
  RmsNormQuantArgs args;
  size_t i = 0;
  args.x = AsRows(t[i++]);
  if (add) args.residual = args.residual_out = AsRows(t[i++]);
  args.weight = t[i++];
  args.q = AsRows(t[i++]);
  if (dynamic) args.scales = t[i++];
  return args;
}

// Computes in f32 with a sum in double; the normalised row is not rounded to 16
// bits.
void NativeRows(const RmsNormQuantSpec& spec, const RmsNormQuantArgs& args,
                bool add) {
  const int64_t n = spec.norm.hidden;
  for (int64_t t = 0; t < args.x.extent(0); ++t) {
    const ScalarRow x(args.x, t), q(args.q, t);
    const ScalarRow residual(add ? args.residual_out : args.x, t);
    const ScalarRow weight(
        spec.norm.weight == NormWeight::kNone ? AnyTensorView() : args.weight,
        0);
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (add) residual.Set(i, x[i] + residual[i]);
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

Bound Make(const Wanted& w, bool native) {
  QUERN_ASSIGN_OR_RETURN(const RmsNormQuantSpec spec, SpecOf(w));
  QUERN_ASSIGN_OR_RETURN(RmsNormQuantPlan made, RmsNormQuantPlan::Create(spec));
  const auto plan = std::make_shared<const RmsNormQuantPlan>(std::move(made));
  const bool add = w.residual.has_value(), dynamic = !w.scale.has_value();
  const auto check = [plan, add, dynamic](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(
        CheckTensorCount(kOp, t, 3 + (add ? 1 : 0) + (dynamic ? 1 : 0)));
    const RmsNormQuantArgs args = ArgsOf(t, add, dynamic);
    return add ? plan->CheckAddArgs(args) : plan->CheckArgs(args);
  };
  if (native) {
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check, [spec, add, dynamic](Tensors t, Executor&) {
          NativeRows(spec, ArgsOf(t, add, dynamic), add);
        }));
  }
  return std::unique_ptr<BoundOp>(new BoundCalls(
      plan->target(), check, [plan, add, dynamic](Tensors t, Executor& e) {
        const RmsNormQuantArgs args = ArgsOf(t, add, dynamic);
        if (add) {
          plan->ExecuteAdd(args, e);
        } else {
          plan->Execute(args, e);
        }
      }));
}

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}}};
}
NamedArgs StaticExample(DType dtype) {
  NamedArgs args = Example(dtype);
  args.emplace_back("scale", 0.05);
  return args;
}
NamedArgs AddExample(DType dtype) {
  NamedArgs args = Example(dtype);
  args.emplace_back("residual", TensorMeta{dtype, {4, 64}});
  return args;
}
NamedArgs StaticAddExample(DType dtype) {
  NamedArgs args = AddExample(dtype);
  args.emplace_back("scale", 0.05);
  return args;
}

Metas Shapes(const TensorMeta& x, const MaybeMeta& weight,
             const std::string& q_dtype, double eps) {
  return ShapesOf({x, {}, weight, q_dtype, eps, {}});
}
template <bool kNative>
Bound Norm(const TensorMeta& x, const MaybeMeta& weight,
           const std::string& q_dtype, double eps) {
  return Make({x, {}, weight, q_dtype, eps, {}}, kNative);
}
Metas StaticShapes(const TensorMeta& x, const MaybeMeta& weight, double scale,
                   const std::string& q_dtype, double eps) {
  return ShapesOf({x, {}, weight, q_dtype, eps, scale});
}
template <bool kNative>
Bound StaticNorm(const TensorMeta& x, const MaybeMeta& weight, double scale,
                 const std::string& q_dtype, double eps) {
  return Make({x, {}, weight, q_dtype, eps, scale}, kNative);
}
Metas AddShapes(const TensorMeta& x, const MutatedMeta& residual,
                const MaybeMeta& weight, const std::string& q_dtype,
                double eps) {
  return ShapesOf({x, residual, weight, q_dtype, eps, {}});
}
template <bool kNative>
Bound AddNorm(const TensorMeta& x, const MutatedMeta& residual,
              const MaybeMeta& weight, const std::string& q_dtype, double eps) {
  return Make({x, residual, weight, q_dtype, eps, {}}, kNative);
}
Metas StaticAddShapes(const TensorMeta& x, const MutatedMeta& residual,
                      const MaybeMeta& weight, double scale,
                      const std::string& q_dtype, double eps) {
  return ShapesOf({x, residual, weight, q_dtype, eps, scale});
}
template <bool kNative>
Bound StaticAddNorm(const TensorMeta& x, const MutatedMeta& residual,
                    const MaybeMeta& weight, double scale,
                    const std::string& q_dtype, double eps) {
  return Make({x, residual, weight, q_dtype, eps, scale}, kNative);
}

}  // namespace

absl::Status RegisterNormQuantOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  // What the plans call the tensors that are returned.
  using Words = std::vector<std::pair<std::string, std::string>>;
  const Words codes = {{"q", "out"}};
  const Words scaled = {{"q", "out0"}, {"scales", "out1"}};
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "rms_norm_quant(Tensor x, Tensor? weight, str q_dtype=\"fp8\", "
      "float eps=1e-06) -> (Tensor, Tensor)",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{}, OpRows::kFirst, "", scaled}));
  QUERN_RETURN_IF_ERROR(r.Add<&Norm<false>>(kOp, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Norm<true>>(kOp, kReference));
  constexpr absl::string_view kStatic = "rms_norm_static_quant";
  QUERN_RETURN_IF_ERROR(r.Define<&StaticShapes>(
      "rms_norm_static_quant(Tensor x, Tensor? weight, float scale, "
      "str q_dtype=\"fp8\", float eps=1e-06) -> Tensor",
      &StaticExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kStatic, {{}, OpRows::kFirst, "", codes}));
  QUERN_RETURN_IF_ERROR(r.Add<&StaticNorm<false>>(kStatic, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&StaticNorm<true>>(kStatic, kReference));
  constexpr absl::string_view kAdd = "fused_add_rms_norm_quant";
  QUERN_RETURN_IF_ERROR(r.Define<&AddShapes>(
      "fused_add_rms_norm_quant(Tensor x, Tensor(a1!) residual, "
      "Tensor? weight, str q_dtype=\"fp8\", float eps=1e-06) -> "
      "(Tensor, Tensor)",
      &AddExample));
  QUERN_RETURN_IF_ERROR(
      r.Declare(kAdd, {{{"x", "residual"}}, OpRows::kFirst, "", scaled}));
  QUERN_RETURN_IF_ERROR(r.Add<&AddNorm<false>>(kAdd, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&AddNorm<true>>(kAdd, kReference));
  constexpr absl::string_view kStaticAdd = "fused_add_rms_norm_static_quant";
  QUERN_RETURN_IF_ERROR(r.Define<&StaticAddShapes>(
      "fused_add_rms_norm_static_quant(Tensor x, Tensor(a1!) residual, "
      "Tensor? weight, float scale, str q_dtype=\"fp8\", float eps=1e-06) -> "
      "Tensor",
      &StaticAddExample));
  QUERN_RETURN_IF_ERROR(
      r.Declare(kStaticAdd, {{{"x", "residual"}}, OpRows::kFirst, "", codes}));
  QUERN_RETURN_IF_ERROR(r.Add<&StaticAddNorm<false>>(kStaticAdd, kSimd));
  return r.Add<&StaticAddNorm<true>>(kStaticAdd, kReference);
}

}  // namespace quern
