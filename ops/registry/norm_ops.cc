#include "quern/ops/registry/norm_ops.h"

#include <cmath>
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
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_activation.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}}};
}
NamedArgs AddExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"residual", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}}};
}

// x, weight, out; or x, residual, weight, the first two in place.
class BoundRmsNorm final : public BoundOp {
 public:
  BoundRmsNorm(RmsNormPlan plan, bool add)
      : plan_(std::move(plan)), add_(add) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount("rms_norm", tensors, 3));
    if (add_) return plan_.CheckAddArgs(InPlace(tensors));
    return plan_.CheckArgs(AsRows(tensors[0]), tensors[1], AsRows(tensors[2]));
  }
  void Execute(absl::Span<const AnyTensorView> tensors,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(tensors));
    if (add_) {
      plan_.ExecuteAdd(InPlace(tensors), executor);
    } else {
      plan_.Execute(AsRows(tensors[0]), tensors[1], AsRows(tensors[2]),
                    executor);
    }
  }

 private:
  static RmsNormArgs InPlace(absl::Span<const AnyTensorView> tensors) {
    const AnyTensorView x = AsRows(tensors[0]), residual = AsRows(tensors[1]);
    return {x, tensors[2], x, residual, residual};
  }

  RmsNormPlan plan_;
  bool add_;
};

absl::StatusOr<RmsNormPlan> PlanOf(NormWeight kind, const TensorMeta& x,
                                   const MaybeMeta& weight, double eps,
                                   int64_t span) {
  RmsNormSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.hidden, LastExtent("rms_norm", "x", x));
  spec.eps = static_cast<float>(eps);
  spec.span = span;
  spec.weight = weight.has_value() ? kind : NormWeight::kNone;
  spec.x_dtype = spec.out_dtype = spec.residual_dtype = x.dtype;
  spec.weight_dtype = weight.has_value() ? weight->dtype : x.dtype;
  return RmsNormPlan::Create(spec);
}

// Native: sum and norm unrounded, n rounded to the weight's dtype, then the
// product; with 1 + weight, which is f32, one rounding.
struct NativeNorm {
  int64_t n;
  int64_t span;
  float eps;
  bool one_plus;
  DType weight_dtype;

  // h(i) is the unrounded row; write(i, h, normed) follows the last h(i).
  template <typename H, typename Write>
  void Row(const H& h, const ScalarRow& weight, const Write& write) const {
    double squares = 0;
    for (int64_t i = 0; i < span; ++i) squares += double{h(i)} * double{h(i)};
    const double mean = squares / static_cast<double>(span);
    const float inverse = 1.0f / std::sqrt(static_cast<float>(mean) + eps);
    const NativeRound rd(weight_dtype);
    for (int64_t i = 0; i < n; ++i) {
      const float v = h(i) * inverse;
      float normed = v;
      if (!weight.null()) {
        normed = one_plus ? v * (1.0f + weight[i]) : rd(rd(v) * weight[i]);
      }
      write(i, h(i), normed);
    }
  }
};

template <NormWeight kKind, bool kAdd, bool kNative>
Bound Norm(const TensorMeta& x, const MaybeMeta& weight, double eps,
           int64_t span) {
  QUERN_ASSIGN_OR_RETURN(RmsNormPlan plan, PlanOf(kKind, x, weight, eps, span));
  const RmsNormSpec spec = plan.spec();
  std::unique_ptr<BoundOp> fast(new BoundRmsNorm(std::move(plan), kAdd));
  if (!kNative) return fast;
  const int64_t n = spec.hidden;
  const NativeNorm norm = {n, spec.span == 0 ? n : spec.span, spec.eps,
                           kKind == NormWeight::kOnePlus, spec.weight_dtype};
  const RowOf weight_row =
      weight.has_value() ? RowOf::kVector : RowOf::kNothing;
  if (kAdd) {
    return std::unique_ptr<BoundOp>(new BoundRowLoop(
        std::move(fast), {RowOf::kMatrix, RowOf::kMatrix, weight_row},
        [norm](absl::Span<const ScalarRow> row) {
          norm.Row([&](int64_t i) { return row[0][i] + row[1][i]; }, row[2],
                   [&](int64_t i, float h, float normed) {
                     row[1].Set(i, h);
                     row[0].Set(i, normed);
                   });
        }));
  }
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast), {RowOf::kMatrix, weight_row, RowOf::kMatrix},
      [norm](absl::Span<const ScalarRow> row) {
        norm.Row(
            [&](int64_t i) { return row[0][i]; }, row[1],
            [&](int64_t i, float, float normed) { row[2].Set(i, normed); });
      }));
}

Metas RmsShapes(const TensorMeta& x, const MaybeMeta& weight, double, int64_t) {
  QUERN_ASSIGN_OR_RETURN(const int64_t n, LastExtent("rms_norm", "x", x));
  if (weight.has_value() && weight->extents != std::vector<int64_t>{n}) {
    return InvalidArgument("rms_norm", "weight is not [", n, "]");
  }
  return std::vector<TensorMeta>{x};
}
template <bool kNative>
Bound Rms(const TensorMeta& x, const MaybeMeta& weight, double eps,
          int64_t var_hidden_size) {
  return Norm<NormWeight::kPlain, false, kNative>(x, weight, eps,
                                                  var_hidden_size);
}

Metas AddShapes(const MutatedMeta& x, const MutatedMeta& residual,
                const MaybeMeta& weight, double) {
  QUERN_RETURN_IF_ERROR(RmsShapes(x, weight, 0, 0).status());
  if (x == residual) return std::vector<TensorMeta>();
  return InvalidArgument("fused_add_rms_norm",
                         "residual has another shape than x");
}
template <bool kNative>
Bound AddRms(const MutatedMeta& x, const MutatedMeta& residual,
             const MaybeMeta& weight, double eps) {
  QUERN_RETURN_IF_ERROR(AddShapes(x, residual, weight, eps).status());
  return Norm<NormWeight::kPlain, true, kNative>(x, weight, eps, 0);
}

Metas GemmaShapes(const TensorMeta& x, const TensorMeta& weight, double) {
  return RmsShapes(x, weight, 0, 0);
}
template <bool kNative>
Bound Gemma(const TensorMeta& x, const TensorMeta& weight, double eps) {
  return Norm<NormWeight::kOnePlus, false, kNative>(x, weight, eps, 0);
}

// x, z or nothing, weight, out.
class BoundRmsNormGated final : public BoundOp {
 public:
  explicit BoundRmsNormGated(RmsNormGatedPlan plan) : plan_(std::move(plan)) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount("rms_norm_gated", tensors, 4));
    return plan_.CheckArgs(AsRows(tensors[0]), AsRows(tensors[1]), tensors[2],
                           AsRows(tensors[3]));
  }
  void Execute(absl::Span<const AnyTensorView> tensors,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(tensors));
    plan_.Execute(AsRows(tensors[0]), AsRows(tensors[1]), tensors[2],
                  AsRows(tensors[3]), executor);
  }

 private:
  RmsNormGatedPlan plan_;
};

NamedArgs GatedExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"z", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}},
          {"group_size", int64_t{16}}};
}

Metas GatedShapes(const TensorMeta& x, const MaybeMeta& z,
                  const TensorMeta& weight, double, int64_t, bool,
                  const std::string&) {
  QUERN_RETURN_IF_ERROR(RmsShapes(x, weight, 0, 0).status());
  if (z.has_value() && !(*z == x)) {
    return InvalidArgument("rms_norm_gated", "z has another shape than x");
  }
  return std::vector<TensorMeta>{x};
}

absl::StatusOr<RmsNormGatedPlan> GatedPlanOf(const TensorMeta& x,
                                             const MaybeMeta& z,
                                             const TensorMeta& weight,
                                             double eps, int64_t group_size,
                                             bool norm_before_gate,
                                             const std::string& activation) {
  QUERN_RETURN_IF_ERROR(
      GatedShapes(x, z, weight, eps, group_size, norm_before_gate, activation)
          .status());
  RmsNormGatedSpec spec;
  spec.hidden = x.extents.back();
  spec.group = group_size;
  spec.eps = static_cast<float>(eps);
  spec.gate = !z.has_value()     ? GateWhen::kNone
              : norm_before_gate ? GateWhen::kNormFirst
                                 : GateWhen::kGateFirst;
  if (activation == "sigmoid") {
    spec.activation = NormGate::kSigmoid;
  } else if (activation != "silu" && activation != "swish") {
    return InvalidArgument("rms_norm_gated", "activation=\"", activation,
                           "\"; need \"silu\", \"swish\" or \"sigmoid\"");
  }
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  return RmsNormGatedPlan::Create(spec);
}

// All f32, one rounding: in double.
void NativeGatedRow(const RmsNormGatedSpec& spec,
                    absl::Span<const ScalarRow> row) {
  const auto act = [&](double v) {
    const double sigmoid = 1.0 / (1.0 + std::exp(-v));
    return spec.activation == NormGate::kSilu ? v * sigmoid : sigmoid;
  };
  const auto h = [&](int64_t i) {
    const double x = double{row[0][i]};
    return spec.gate == GateWhen::kGateFirst ? x * act(double{row[1][i]}) : x;
  };
  for (int64_t g = 0; g < spec.hidden; g += spec.group) {
    double squares = 0;
    for (int64_t i = g; i < g + spec.group; ++i) squares += h(i) * h(i);
    const double rms =
        std::sqrt(squares / static_cast<double>(spec.group) + double{spec.eps});
    for (int64_t i = g; i < g + spec.group; ++i) {
      double y = h(i) / rms * double{row[2][i]};
      if (spec.gate == GateWhen::kNormFirst) y *= act(double{row[1][i]});
      row[3].Set(i, static_cast<float>(y));
    }
  }
}

template <bool kNative>
Bound Gated(const TensorMeta& x, const MaybeMeta& z, const TensorMeta& weight,
            double eps, int64_t group_size, bool norm_before_gate,
            const std::string& activation) {
  QUERN_ASSIGN_OR_RETURN(
      RmsNormGatedPlan plan,
      GatedPlanOf(x, z, weight, eps, group_size, norm_before_gate, activation));
  const RmsNormGatedSpec spec = plan.spec();
  std::unique_ptr<BoundOp> fast(new BoundRmsNormGated(std::move(plan)));
  if (!kNative) return fast;
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast),
      {RowOf::kMatrix, z.has_value() ? RowOf::kMatrix : RowOf::kNothing,
       RowOf::kVector, RowOf::kMatrix},
      [spec](absl::Span<const ScalarRow> row) { NativeGatedRow(spec, row); }));
}

}  // namespace

absl::Status RegisterNormOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&RmsShapes>(
      "rms_norm(Tensor x, Tensor? weight, float eps=1e-06, "
      "int var_hidden_size=0) -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Add<&Rms<false>>("rms_norm", kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Rms<true>>("rms_norm", kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&AddShapes>(
      "fused_add_rms_norm(Tensor(a0!) x, Tensor(a1!) residual, "
      "Tensor? weight, float eps=1e-06) -> ()",
      &AddExample));
  QUERN_RETURN_IF_ERROR(r.Add<&AddRms<false>>("fused_add_rms_norm", kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&AddRms<true>>("fused_add_rms_norm", kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&GemmaShapes>(
      "gemma_rms_norm(Tensor x, Tensor weight, float eps=1e-06) -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Add<&Gemma<false>>("gemma_rms_norm", kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Gemma<true>>("gemma_rms_norm", kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&GatedShapes>(
      "rms_norm_gated(Tensor x, Tensor? z, Tensor weight, float eps=1e-05, "
      "int group_size=0, bool norm_before_gate=False, "
      "str activation=\"silu\") -> Tensor",
      &GatedExample));
  QUERN_RETURN_IF_ERROR(r.Add<&Gated<false>>("rms_norm_gated", kSimd));
  return r.Add<&Gated<true>>("rms_norm_gated", kReference);
}

}  // namespace quern
