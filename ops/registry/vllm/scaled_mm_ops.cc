#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_declaration.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/registry/vllm/linear.h"
#include "quern/ops/registry/vllm/linear_ops.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

constexpr char kOp[] = "onednn_scaled_mm";

struct Spec : BoundLinearSpec {
  bool dynamic = false;  // scales and zero points of rows, not of the tensor
};
struct Args {
  AnyTensorView c, a, a_scales, azp, azp_adj, bias;
};

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

int32_t ZeroPointOf(const Args& t, int64_t term) {
  return static_cast<const int32_t*>(t.azp.data())[term];
}

class ScaledMmPlan {
 public:
  static absl::StatusOr<ScaledMmPlan> Create(const Spec& spec,
                                             absl::string_view provider) {
    QUERN_ASSIGN_OR_RETURN(
        LinearPlan plan,
        LinearPlanOf(kOp, LinearProviderOf(provider), spec, *spec.weights));
    ScaledMmPlan made(std::move(plan), spec);
    if (!made.zero_points()) return made;
    LinearSpec wide;
    wide.a = DType::kI8;
    wide.c = DType::kF32;
    QUERN_ASSIGN_OR_RETURN(
        made.wide_,
        LinearPlanOf(kOp, LinearProvider::kReference, wide, *spec.weights));
    return made;
  }

  const char* target() const { return plan_.target(); }
  std::string Explain(int64_t rows) const { return plan_.Explain(rows); }

  absl::Status CheckArgs(const Args& t) const {
    QUERN_RETURN_IF_ERROR(plan_.CheckRows(t.a));
    const int64_t m = t.a.extent(0), n = plan_.n(), terms = dynamic_ ? m : 1;
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "c", t.c, plan_.spec().c, {m, n}));
    QUERN_RETURN_IF_ERROR(
        CheckColumn("a_scales", t.a_scales, DType::kF32, terms));
    if (zero_points()) {
      QUERN_RETURN_IF_ERROR(CheckColumn("azp", t.azp, DType::kI32, terms));
    }
    if (t.azp_adj.rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          t.azp_adj.rank() == 2
              ? CheckInput(kOp, "azp_adj", t.azp_adj, DType::kF32, {1, n})
              : CheckInput(kOp, "azp_adj", t.azp_adj, DType::kF32, {n}));
    }
    if (t.bias.rank() == 0) return absl::OkStatus();
    return CheckInput(kOp, "bias", t.bias, plan_.spec().c, {n});
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(int64_t bytes,
                           plan_.WorkspaceBytes(max_rows, max_workers));
    if (wide_.has_value()) {
      QUERN_ASSIGN_OR_RETURN(const int64_t one,
                             wide_->WorkspaceBytes(1, max_workers));
      bytes = std::max(bytes, one);
    }
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("product", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": ", max_rows, " rows take more than 2^63 bytes"));
  }

  void Execute(const Args& t, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(t));
    const int64_t m = t.a.extent(0);
    LinearArgs args;
    args.a = t.a;
    args.c = t.c;
    args.residual = EachRow(t.bias, m);
    const Scratch scratch = LayOut(workspace, m);
    // The plan knows no scale that changes from call to call, but for those of
    // rows.
    const float* scales = static_cast<const float*>(t.a_scales.data());
    if (!dynamic_) {
      std::fill_n(scratch.scales, m, *scales);
      scales = scratch.scales;
    }
    args.a_scales = DenseVector<const float>(scales, m);
    if (zero_points()) {
      for (int64_t i = 0; i < m; ++i) {
        const int32_t zero = ZeroPoint(t, i);
        scratch.zero_points[i] = Fits(zero) ? zero : 0;
      }
      args.a_zero_points = DenseVector<const int32_t>(scratch.zero_points, m);
    }
    plan_.Execute(args, workspace, executor);
    if (!zero_points()) return;
    for (int64_t i = 0; i < m; ++i) {
      if (Fits(ZeroPoint(t, i))) continue;
      ExecuteWide(t, i, scales[i], scratch.row, workspace, executor);
    }
  }

 private:
  struct Scratch {
    float* scales;         // of rows
    int32_t* zero_points;  // of rows
    float* row;            // a row of wide_
  };

  ScaledMmPlan(LinearPlan plan, const Spec& spec)
      : plan_(std::move(plan)),
        dynamic_(spec.dynamic),
        weights_(*spec.weights) {}

  bool zero_points() const {
    return plan_.spec().zero_points == Int8ZeroPoint::kUsed;
  }
  int32_t ZeroPoint(const Args& t, int64_t row) const {
    return ZeroPointOf(t, dynamic_ ? row : 0);
  }
  // Whether sums of 32 bits hold the products less this zero point:
  // (128 + |zero|) * 128 * k < 2^31. oneDNN's form is proved for the zero
  // points of int8 only.
  bool Fits(int32_t zero) const {
    if (plan_.implementation() != absl::string_view("packed")) {
      return -128 <= zero && zero <= 127;
    }
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 128;
    const int64_t max = kMost / plan_.k() - 128;
    return -max <= zero && zero <= max;
  }

  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t m) const {
    const bool zeros = zero_points();
    return {a.template Allocate<float>("scales of rows", dynamic_ ? 0 : m),
            a.template Allocate<int32_t>("zero points of rows", zeros ? m : 0),
            a.template Allocate<float>("a row", zeros ? plan_.n() : 0)};
  }

  // Row i, whose zero point does not fit sums of 32 bits: the zero point times
  // the sum of a column is subtracted in double. As in the other rows, the sum
  // becomes f32 before the bias is added.
  void ExecuteWide(const Args& t, int64_t i, float a_scale, float* row,
                   const Workspace& workspace,
                   Executor& executor) const noexcept {
    static constexpr float kOne = 1;
    LinearArgs args;
    args.a = RowSlice(t.a, i, 1);
    args.c = DenseMatrix(row, 1, plan_.n());
    args.a_scales = DenseVector<const float>(&kOne, 1);
    wide_->Execute(args, workspace, executor);
    const ScalarRow c(t.c, i), bias(t.bias, 0);
    const double zero = static_cast<double>(ZeroPoint(t, i));
    for (int64_t n = 0; n < plan_.n(); ++n) {
      const double scale = double{weights_.scales()[n]};
      // row[n] has been rounded; up to 2^23 the product of codes is the nearest
      // whole number.
      const double dot =
          scale == 0 ? 0 : std::nearbyint(double{row[n]} / scale);
      const double less = zero * static_cast<double>(weights_.column_sums()[n]);
      const auto sum =
          static_cast<float>(double{a_scale} * scale * (dot - less));
      c.Set(n, bias.null() ? sum : sum + bias[n]);
    }
  }

  LinearPlan plan_;
  bool dynamic_;
  LinearWeights weights_;
  // Products of rows by b_scales in f32, where there are zero points.
  std::optional<LinearPlan> wide_;
};

// Sums in double, and one rounding.
void Native(const Spec& spec, const LinearWeights& weights,
            const NativeLinear& native, const Args& t) {
  const auto* const scales = static_cast<const float*>(t.a_scales.data());
  for (int64_t m = 0; m < t.c.extent(0); ++m) {
    const ScalarRow a(t.a, m), c(t.c, m), bias(t.bias, 0);
    const int64_t term = spec.dynamic ? m : 0;
    const double zero = spec.zero_points == Int8ZeroPoint::kUsed
                            ? static_cast<double>(ZeroPointOf(t, term))
                            : 0;
    for (int64_t n = 0; n < spec.columns; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < spec.k; ++k) {
        sum += (double{a[k]} - zero) * native.Weight(k, n);
      }
      sum *= double{scales[term]} * double{weights.scales()[n]};
      if (!bias.null()) sum += double{bias[n]};
      c.Set(n, static_cast<float>(sum));
    }
  }
}

absl::StatusOr<std::function<void(const Args&)>> NativeOf(const Spec& spec,
                                                          const ScaledMmPlan&) {
  QUERN_ASSIGN_OR_RETURN(const NativeLinear native,
                         NativeLinear::Create(*spec.weights, spec.activation));
  return [spec, weights = *spec.weights, native](const Args& args) {
    Native(spec, weights, native, args);
  };
}

absl::Status FillTerms(Spec& spec, const OpCall& call) {
  const OneDnnHandler& handler = HandlerOf(call);
  spec.dynamic = handler.dynamic_act_quant;
  spec.zero_points =
      handler.use_azp ? Int8ZeroPoint::kUsed : Int8ZeroPoint::kNone;
  const TensorMeta& a_scales = *call.Tensor("a_scales");
  const TensorMeta *azp = call.Tensor("azp"), *adj = call.Tensor("azp_adj");
  const int64_t terms = spec.dynamic ? spec.rows : 1;
  if (a_scales.dtype != DType::kF32 || !IsColumn(a_scales.extents, terms)) {
    return InvalidArgument(
        call.op(), "a_scales is ", PrintMeta(a_scales), "; need f32[", terms,
        ", 1], as ", spec.dynamic ? "rows of a are" : "static scales are");
  }
  if ((azp != nullptr) != handler.use_azp) {
    return InvalidArgument(call.op(), "azp is ",
                           azp != nullptr ? "given" : "missing", "; need ",
                           handler.use_azp ? "it" : "none",
                           ", as the handler was created with use_azp=",
                           handler.use_azp ? "True" : "False");
  }
  if (azp != nullptr &&
      (azp->dtype != DType::kI32 || !IsColumn(azp->extents, terms))) {
    return InvalidArgument(call.op(), "azp is ", PrintMeta(*azp), "; need i32[",
                           terms, ", 1]");
  }
  const int64_t n = spec.columns;
  if (adj == nullptr || *adj == TensorMeta{DType::kF32, {n}} ||
      *adj == TensorMeta{DType::kF32, {1, n}}) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "azp_adj is ", PrintMeta(*adj),
                         "; need f32[1, ", n, "] or f32[", n, "]");
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

DType OutputOf(const OpCall& call) { return HandlerOf(call).output_type; }

}  // namespace

absl::Status RegisterVllmScaledMm(OpRegistry& registry) {
  using Type = OpDType<Spec>;
  OpDeclaration<ScaledMmPlan, Spec, Args> op(kOp);
  BeginProduct(op, /*scaled=*/true);
  op.Known<DType>(&Spec::c, &OutputOf)
      .InOut("c", &Args::c, nullptr, {&Spec::rows, &Spec::columns},
             Type::Must(&Spec::c))
      .Given<DType>(&Spec::a, DType::kI8)
      .In("a", &Args::a, {&Spec::rows, &Spec::k}, Type::Must(DType::kI8))
      .In("a_scales", &Args::a_scales)
      .Maybe("azp", &Args::azp)
      .Maybe("azp_adj", &Args::azp_adj)
      .Then(&FillTerms);
  EndProduct(op, &Args::bias);
  return op.Layer()
      .Providers({"simd", "onednn", "reference"})
      .Creates([](const Spec& spec, const OpCall& call) {
        return ScaledMmPlan::Create(spec, call.provider());
      })
      .ReferenceFrom(&NativeOf)
      .ExampleOf(&Example)
      .AddTo(registry);
}

}  // namespace quern
