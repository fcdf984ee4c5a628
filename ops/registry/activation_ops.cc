#include "quern/ops/registry/activation_ops.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_activation.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
constexpr absl::string_view kSimd = "simd";

NamedArgs Example(DType dtype) { return {{"x", TensorMeta{dtype, {4, 64}}}}; }
NamedArgs XieluExample(DType dtype) {
  return {
      {"x", TensorMeta{dtype, {4, 64}}}, {"alpha_p", 0.2}, {"alpha_n", -1.0}};
}

Metas SameShape(const TensorMeta& x) { return std::vector<TensorMeta>{x}; }
Metas HalfShape(const TensorMeta& x) {
  QUERN_ASSIGN_OR_RETURN(const int64_t cols, LastExtent("act_and_mul", "x", x));
  if (cols % 2 != 0) {
    return InvalidArgument("act_and_mul", "x has ", cols,
                           " columns; need an even number");
  }
  TensorMeta out = x;
  out.extents.back() = cols / 2;
  return std::vector<TensorMeta>{out};
}
Metas HalfShapeText(const TensorMeta& x, const std::string&) {
  return HalfShape(x);
}
Metas HalfShapeFloat(const TensorMeta& x, double) { return HalfShape(x); }
Metas HalfShapeFloats(const TensorMeta& x, double, double) {
  return HalfShape(x);
}
Metas HalfShapeSparse(const TensorMeta& x, double, const std::string&) {
  return HalfShape(x);
}
Metas SameShapeText(const TensorMeta& x, const std::string&) {
  return SameShape(x);
}
Metas SameShapeXielu(const TensorMeta& x, double, double, double, double) {
  return SameShape(x);
}

absl::StatusOr<Activation> GeluOf(const std::string& approximate) {
  if (approximate == "none") return Activation::kGelu;
  if (approximate == "tanh") return Activation::kGeluTanh;
  return InvalidArgument("gelu", "approximate=\"", approximate,
                         "\"; need \"none\" or \"tanh\"");
}

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

// Operators that map x[..., n] to [..., n].
Bound Unary(ActivationSpec spec, const TensorMeta& x) {
  QUERN_ASSIGN_OR_RETURN(spec.hidden,
                         LastExtent(ActivationName(spec.activation), "x", x));
  spec.x_dtype = spec.out_dtype = x.dtype;
  return BindRowPlan(ActivationName(spec.activation),
                     ActivationPlan::Create(spec));
}
Bound NativeUnary(ActivationSpec spec, NativeActivation native,
                  const TensorMeta& x) {
  QUERN_ASSIGN_OR_RETURN(auto fast, Unary(spec, x));
  const int64_t n = x.extents.back();
  const NativeRound rd(x.dtype);
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast), {RowOf::kMatrix, RowOf::kMatrix},
      [=](absl::Span<const ScalarRow> row) {
        for (int64_t i = 0; i < n; ++i) {
          row[1].Set(i, NativeActivate(native, spec.params, row[0][i], rd));
        }
      }));
}

Bound Gated(ActAndMulSpec spec, const TensorMeta& x) {
  QUERN_ASSIGN_OR_RETURN(const auto out, HalfShape(x));
  spec.d = out[0].extents.back();
  spec.x_dtype = spec.out_dtype = x.dtype;
  return BindRowPlan(ActAndMulName(spec), ActAndMulPlan::Create(spec));
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

Bound NativeGated(ActAndMulSpec spec, const TensorMeta& x) {
  QUERN_ASSIGN_OR_RETURN(auto fast, Gated(spec, x));
  const int64_t d = x.extents.back() / 2;
  const NativeRound rd(x.dtype);
  const float quantile =
      spec.sparsity == 0.0 ? 0.0f
                           : static_cast<float>(NormalQuantile(spec.sparsity));
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast), {RowOf::kMatrix, RowOf::kMatrix},
      [=](absl::Span<const ScalarRow> row) {
        const float cutoff =
            spec.sparsity == 0.0 ? 0.0f : NativeCutoff(row[0], d, quantile, rd);
        for (int64_t i = 0; i < d; ++i) {
          const bool pairs = spec.order == GateOrder::kInterleaved;
          float gate = row[0][pairs ? 2 * i : i];
          float up = row[0][pairs ? 2 * i + 1 : d + i];
          if (spec.order == GateOrder::kGateSecond) std::swap(gate, up);
          if (spec.sparsity != 0.0) {
            const float above = rd(gate - cutoff);
            gate = above < 0.0f ? 0.0f : above;
          }
          if (spec.activation == Activation::kSwigluOai) {
            row[1].Set(i, NativeSwigluOai(spec.params, gate, up, rd));
          } else {
            row[1].Set(i, NativeActivate(NativeOf(spec.activation), spec.params,
                                         gate, rd) *
                              up);
          }
        }
      }));
}

// Makers of the operators: one for each provider and signature.
using MakeGated = Bound (*)(ActAndMulSpec, const TensorMeta&);

template <Activation kActivation>
Bound UnaryOf(const TensorMeta& x) {
  ActivationSpec spec;
  spec.activation = kActivation;
  return Unary(spec, x);
}
template <Activation kActivation, NativeActivation kNative>
Bound NativeUnaryOf(const TensorMeta& x) {
  ActivationSpec spec;
  spec.activation = kActivation;
  return NativeUnary(spec, kNative, x);
}

template <bool kNative>
Bound GeluUnary(const TensorMeta& x, const std::string& approximate) {
  ActivationSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.activation, GeluOf(approximate));
  return kNative ? NativeUnary(spec, NativeOf(spec.activation), x)
                 : Unary(spec, x);
}
// alpha_p and alpha_n are given as stored, before softplus.
template <bool kNative>
Bound XieluUnary(const TensorMeta& x, double alpha_p, double alpha_n,
                 double beta, double eps) {
  ActivationSpec spec;
  spec.activation = Activation::kXielu;
  spec.params =
      XieluParams(static_cast<float>(alpha_p), static_cast<float>(alpha_n),
                  static_cast<float>(beta), static_cast<float>(eps));
  return kNative ? NativeUnary(spec, NativeActivation::kXielu, x)
                 : Unary(spec, x);
}

template <MakeGated kMake, GateOrder kOrder>
Bound SiluGated(const TensorMeta& x) {
  ActAndMulSpec spec;
  spec.order = kOrder;
  return kMake(spec, x);
}
template <MakeGated kMake>
Bound GeluGated(const TensorMeta& x, const std::string& approximate) {
  ActAndMulSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.activation, GeluOf(approximate));
  return kMake(spec, x);
}
template <MakeGated kMake>
Bound SparseGated(const TensorMeta& x, double activation_sparsity,
                  const std::string& approximate) {
  ActAndMulSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.activation, GeluOf(approximate));
  if (activation_sparsity == 0.0) {
    return InvalidArgument("gelu_and_mul_sparse",
                           "activation_sparsity=0; need 0 < "
                           "activation_sparsity <= 1, or gelu_and_mul");
  }
  spec.sparsity = activation_sparsity;
  return kMake(spec, x);
}
template <MakeGated kMake>
Bound SwigluGated(const TensorMeta& x, double alpha, double limit) {
  ActAndMulSpec spec;
  spec.activation = Activation::kSwigluOai;
  spec.order = GateOrder::kInterleaved;
  spec.params.alpha = static_cast<float>(alpha);
  spec.params.limit = static_cast<float>(limit);
  return kMake(spec, x);
}
template <MakeGated kMake>
Bound FatreluGated(const TensorMeta& x, double threshold) {
  ActAndMulSpec spec;
  spec.activation = Activation::kFatrelu;
  spec.params.threshold = static_cast<float>(threshold);
  return kMake(spec, x);
}

// Registers an operator with both providers.
template <auto kShapes, auto kMake, auto kNative>
absl::Status Both(OpRegistry& registry, absl::string_view name,
                  absl::string_view params, OpExample example = &Example) {
  QUERN_RETURN_IF_ERROR(registry.Define<kShapes>(
      absl::StrCat(name, "(Tensor x", params, ") -> Tensor"), example));
  QUERN_RETURN_IF_ERROR(registry.Declare(name, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(registry.Add<kMake>(name, kSimd));
  return registry.Add<kNative>(name, OpRegistry::kReference);
}

template <Activation kActivation, NativeActivation kNative>
absl::Status BothUnary(OpRegistry& registry, absl::string_view name) {
  return Both<&SameShape, &UnaryOf<kActivation>,
              &NativeUnaryOf<kActivation, kNative>>(registry, name, "");
}

}  // namespace

absl::Status RegisterActivationOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(
      (Both<&HalfShape, &SiluGated<&Gated, GateOrder::kGateFirst>,
            &SiluGated<&NativeGated, GateOrder::kGateFirst>>(r, "silu_and_mul",
                                                             "")));
  QUERN_RETURN_IF_ERROR(
      (Both<&HalfShape, &SiluGated<&Gated, GateOrder::kGateSecond>,
            &SiluGated<&NativeGated, GateOrder::kGateSecond>>(r, "mul_and_silu",
                                                              "")));
  QUERN_RETURN_IF_ERROR(
      (Both<&HalfShapeText, &GeluGated<&Gated>, &GeluGated<&NativeGated>>(
          r, "gelu_and_mul", ", str approximate=\"none\"")));
  QUERN_RETURN_IF_ERROR(
      (Both<&HalfShapeSparse, &SparseGated<&Gated>, &SparseGated<&NativeGated>>(
          r, "gelu_and_mul_sparse",
          ", float activation_sparsity=0.95, str approximate=\"none\"")));
  QUERN_RETURN_IF_ERROR(
      (Both<&HalfShapeFloats, &SwigluGated<&Gated>, &SwigluGated<&NativeGated>>(
          r, "swigluoai_and_mul", ", float alpha=1.702, float limit=7.0")));
  QUERN_RETURN_IF_ERROR((
      Both<&HalfShapeFloat, &FatreluGated<&Gated>, &FatreluGated<&NativeGated>>(
          r, "fatrelu_and_mul", ", float threshold=0.0")));
  QUERN_RETURN_IF_ERROR(
      (BothUnary<Activation::kSilu, NativeActivation::kSilu>(r, "silu")));
  QUERN_RETURN_IF_ERROR(
      (Both<&SameShapeText, &GeluUnary<false>, &GeluUnary<true>>(
          r, "gelu", ", str approximate=\"none\"")));
  QUERN_RETURN_IF_ERROR(
      (BothUnary<Activation::kGeluTanh, NativeActivation::kGeluNew>(
          r, "gelu_new")));
  QUERN_RETURN_IF_ERROR(
      (BothUnary<Activation::kGeluTanh, NativeActivation::kGeluFast>(
          r, "gelu_fast")));
  QUERN_RETURN_IF_ERROR(
      (BothUnary<Activation::kQuickGelu, NativeActivation::kQuickGelu>(
          r, "quick_gelu")));
  QUERN_RETURN_IF_ERROR(
      (BothUnary<Activation::kRelu2, NativeActivation::kRelu2>(r, "relu2")));
  return Both<&SameShapeXielu, &XieluUnary<false>, &XieluUnary<true>>(
      r, "xielu",
      ", float alpha_p, float alpha_n, float beta=0.5, float eps=-1e-06",
      &XieluExample);
}

}  // namespace quern
