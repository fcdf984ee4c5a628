#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/native_linear.h"
#include "quern/ops/registry/vllm_linear.h"
#include "quern/ops/registry/vllm_linear_ops.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "onednn_scaled_mm";

// Where each tensor is in the order of the schema.
enum At : size_t { kC, kA, kAScales, kAzp, kAzpAdj, kBias, kTensors };

// Whether a tensor of such extents has one element for each of m rows: [m] or
// [m, 1].
bool IsColumn(absl::Span<const int64_t> extents, int64_t m) {
  return (extents.size() == 1 || (extents.size() == 2 && extents[1] == 1)) &&
         extents[0] == m;
}

// InvalidArgument unless the view is [m] or [m, 1] without gaps.
absl::Status CheckColumn(const char* field, const AnyTensorView& v, DType dtype,
                         int64_t m) {
  if (v.rank() != 2) return CheckInput(kOp, field, v, dtype, {m});
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, field, v, dtype, {m, 1}));
  if (m <= 1 || v.stride(0) == 1) return absl::OkStatus();
  return InvalidArgument(kOp, field, " has stride ", v.stride(0),
                         "; need 1, a dense column");
}

// What a row of a is multiplied with and less, for the plan.
struct RowTerms {
  float* scales;
  int32_t* zero_points;
};

class BoundScaledMm final : public BoundOp {
 public:
  BoundScaledMm(LinearPlan plan, bool dynamic, const LinearWeights& weights,
                std::optional<NativeLinear> native)
      : plan_(std::move(plan)),
        dynamic_(dynamic),
        weights_(weights),
        native_(std::move(native)) {}

  const char* target() const override {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t rows) const override {
    return native_.has_value() ? target() : plan_.Explain(rows);
  }

  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, kTensors));
    QUERN_RETURN_IF_ERROR(OfOp(kOp, plan_.CheckRows(t[kA])));
    const int64_t m = t[kA].extent(0), n = plan_.n();
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "c", t[kC], plan_.spec().c, {m, n}));
    const int64_t terms = dynamic_ ? m : 1;
    QUERN_RETURN_IF_ERROR(
        CheckColumn("a_scales", t[kAScales], DType::kF32, terms));
    if (zero_points()) {
      QUERN_RETURN_IF_ERROR(CheckColumn("azp", t[kAzp], DType::kI32, terms));
      QUERN_RETURN_IF_ERROR(CheckZeroPoints(t[kAzp], terms));
    }
    if (t[kAzpAdj].rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          t[kAzpAdj].rank() == 2
              ? CheckInput(kOp, "azp_adj", t[kAzpAdj], DType::kF32, {1, n})
              : CheckInput(kOp, "azp_adj", t[kAzpAdj], DType::kF32, {n}));
    }
    if (t[kBias].rank() == 0) return absl::OkStatus();
    return CheckInput(kOp, "bias", t[kBias], plan_.spec().c, {n});
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_.has_value()) return 0;
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plan_.WorkspaceBytes(max_rows, max_workers));
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("product", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": ", max_rows, " rows take more than 2^63 bytes"));
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_.has_value()) return Multiply(t);
    const int64_t m = t[kA].extent(0);
    LinearArgs args;
    args.a = t[kA];
    args.c = t[kC];
    args.residual = EachRow(t[kBias], m);
    const RowTerms terms = LayOut(workspace, m);
    // The plan knows no scale that changes from call to call, but for those of
    // rows.
    const float* scales = static_cast<const float*>(t[kAScales].data());
    const auto* zero_points = static_cast<const int32_t*>(t[kAzp].data());
    if (!dynamic_) {
      std::fill_n(terms.scales, m, *scales);
      scales = terms.scales;
      if (this->zero_points()) {
        std::fill_n(terms.zero_points, m, *zero_points);
        zero_points = terms.zero_points;
      }
    }
    args.a_scales = DenseVector<const float>(scales, m);
    if (this->zero_points()) {
      args.a_zero_points = DenseVector<const int32_t>(zero_points, m);
    }
    plan_.Execute(args, workspace, executor);
  }

 private:
  bool zero_points() const {
    return plan_.spec().zero_points == Int8ZeroPoint::kUsed;
  }
  template <typename Allocator>
  RowTerms LayOut(Allocator& a, int64_t m) const {
    const int64_t rows = dynamic_ ? 0 : m;
    return {a.template Allocate<float>("scales of rows", rows),
            a.template Allocate<int32_t>("zero points of rows",
                                         zero_points() ? rows : 0)};
  }

  absl::Status CheckZeroPoints(const AnyTensorView& azp, int64_t count) const {
    // (128 + |azp|) * 128 * k < 2^31, so that the sum fits. oneDNN's form is
    // proved for the zero points of int8 only.
    const bool packed = plan_.implementation() == absl::string_view("packed");
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 128;
    const int64_t max = packed ? kMost / plan_.k() - 128 : 127;
    const int64_t min = packed ? -max : -128;
    const auto* const values = static_cast<const int32_t*>(azp.data());
    for (int64_t i = 0; i < count; ++i) {
      if (min <= values[i] && values[i] <= max) continue;
      return InvalidArgument(kOp, "azp[", i, "]=", values[i], "; need ", min,
                             " <= azp <= ", max, " for k=", plan_.k());
    }
    return absl::OkStatus();
  }

  // The reference: sums in double, and one rounding.
  void Multiply(Tensors t) const {
    const auto* const scales = static_cast<const float*>(t[kAScales].data());
    const auto* const azp = static_cast<const int32_t*>(t[kAzp].data());
    for (int64_t m = 0; m < t[kC].extent(0); ++m) {
      const ScalarRow a(t[kA], m), c(t[kC], m);
      const int64_t term = dynamic_ ? m : 0;
      const double zero = zero_points() ? static_cast<double>(azp[term]) : 0;
      for (int64_t n = 0; n < plan_.n(); ++n) {
        double sum = 0;
        for (int64_t k = 0; k < plan_.k(); ++k) {
          sum += (double{a[k]} - zero) * native_->Weight(k, n);
        }
        sum *= double{scales[term]} * double{weights_.scales()[n]};
        if (t[kBias].rank() != 0) sum += double{ScalarRow(t[kBias], 0)[n]};
        c.Set(n, static_cast<float>(sum));
      }
    }
  }

  LinearPlan plan_;
  bool dynamic_;
  LinearWeights weights_;
  std::optional<NativeLinear> native_;
};

Metas Shapes(const MutatedMeta& c, const TensorMeta& a,
             const TensorMeta& a_scales, const MaybeMeta& azp,
             const MaybeMeta& azp_adj, const MaybeMeta& bias,
             OneDnnHandler* handler) {
  QUERN_RETURN_IF_ERROR(CheckProduct(kOp, *handler, true, a, c));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "a", a.dtype, DType::kI8));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "c", c.dtype, handler->output_type));
  QUERN_RETURN_IF_ERROR(CheckBiasMeta(kOp, bias, c));
  const int64_t terms = handler->dynamic_act_quant ? a.extents[0] : 1;
  if (a_scales.dtype != DType::kF32 || !IsColumn(a_scales.extents, terms)) {
    return InvalidArgument(
        kOp, "a_scales is not f32[", terms, ", 1], as ",
        handler->dynamic_act_quant ? "rows of a are" : "static scales are");
  }
  if (azp.has_value() != handler->use_azp) {
    return InvalidArgument(kOp, "azp is ",
                           azp.has_value() ? "given" : "missing", "; need ",
                           handler->use_azp ? "it" : "none",
                           ", as the handler was created with use_azp=",
                           handler->use_azp ? "True" : "False");
  }
  if (azp.has_value() &&
      (azp->dtype != DType::kI32 || !IsColumn(azp->extents, terms))) {
    return InvalidArgument(kOp, "azp is not i32[", terms, ", 1]");
  }
  if (azp_adj.has_value() &&
      !(*azp_adj == TensorMeta{DType::kF32, {c.extents[1]}}) &&
      !(*azp_adj == TensorMeta{DType::kF32, {1, c.extents[1]}})) {
    return InvalidArgument(kOp, "azp_adj is not f32[1, ", c.extents[1],
                           "] or f32[", c.extents[1], "]");
  }
  return std::vector<TensorMeta>();
}

template <LinearProvider kProvider>
Bound Make(const MutatedMeta& c, const TensorMeta& a,
           const TensorMeta& a_scales, const MaybeMeta& azp,
           const MaybeMeta& azp_adj, const MaybeMeta& bias,
           OneDnnHandler* handler) {
  QUERN_RETURN_IF_ERROR(
      Shapes(c, a, a_scales, azp, azp_adj, bias, handler).status());
  LinearSpec spec;
  spec.a = DType::kI8;
  spec.c = c.dtype;
  spec.residual = bias.has_value();
  spec.zero_points =
      handler->use_azp ? Int8ZeroPoint::kUsed : Int8ZeroPoint::kNone;
  std::optional<NativeLinear> native;
  if (kProvider == LinearProvider::kReference) {
    QUERN_ASSIGN_OR_RETURN(
        native, NativeLinear::Create(handler->weights, spec.activation));
  }
  QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                         LinearPlanOf(kOp, kProvider, spec, handler->weights));
  return std::unique_ptr<BoundOp>(
      new BoundScaledMm(std::move(plan), handler->dynamic_act_quant,
                        handler->weights, std::move(native)));
}

NamedArgs Example(DType dtype) {
  const auto make = [](DType output) {
    auto* const made = new OneDnnHandler;
    made->weights = OnesForExamples(WeightFormat::kI8Channel);
    made->output_type = output;
    made->dynamic_act_quant = true;
    return made;
  };
  static OneDnnHandler* const f32 = make(DType::kF32);
  static OneDnnHandler* const bf16 = make(DType::kBF16);
  static OneDnnHandler* const f16 = make(DType::kF16);
  return {{"c", TensorMeta{dtype, {4, 48}}},
          {"a", TensorMeta{DType::kI8, {4, 64}}},
          {"a_scales", TensorMeta{DType::kF32, {4, 1}}},
          {"handler", dtype == DType::kF32    ? f32
                      : dtype == DType::kBF16 ? bf16
                                              : f16}};
}

}  // namespace

absl::Status RegisterVllmScaledMm(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "onednn_scaled_mm(Tensor(a0!) c, Tensor a, Tensor a_scales, "
      "Tensor? azp, Tensor? azp_adj, Tensor? bias, "
      "OneDnnHandler handler) -> ()",
      &Example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<LinearProvider::kSimd>>(kOp, "simd"));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<LinearProvider::kOneDnn>>(kOp, "onednn"));
  return r.Add<&Make<LinearProvider::kReference>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
