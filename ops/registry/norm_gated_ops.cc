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
#include "quern/core/workspace.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/gated_norm_ops.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "rms_norm_gated";

// The tensors are x, z (or nothing), weight, out.
class BoundRmsNormGated final : public BoundOp {
 public:
  explicit BoundRmsNormGated(RmsNormGatedPlan plan) : plan_(std::move(plan)) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, tensors, 4));
    return plan_.CheckArgs(AsRows(tensors[0]), AsRows(tensors[1]), tensors[2],
                           AsRows(tensors[3]));
  }
  void Execute(absl::Span<const AnyTensorView> tensors, Workspace,
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
  QUERN_ASSIGN_OR_RETURN(const int64_t n, LastExtent(kOp, "x", x));
  QUERN_RETURN_IF_ERROR(CheckExtents(kOp, "weight", weight, {n}));
  if (z.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckMeta(kOp, "z", *z, x, ", as x is"));
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
    return InvalidArgument(kOp, "activation=\"", activation,
                           "\"; need \"silu\", \"swish\" or \"sigmoid\"");
  }
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  return RmsNormGatedPlan::Create(spec);
}

// Computes in double and rounds once, as the kernel rounds its f32 results.
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

absl::Status RegisterGatedNormOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&GatedShapes>(
      "rms_norm_gated(Tensor x, Tensor? z, Tensor weight, float eps=1e-05, "
      "int group_size=0, bool norm_before_gate=False, "
      "str activation=\"silu\") -> Tensor",
      &GatedExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"x", "out"}, {"z", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Gated<false>>(kOp, "simd"));
  return r.Add<&Gated<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
