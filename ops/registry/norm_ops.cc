#include "quern/ops/registry/norm_ops.h"

#include <cmath>
#include <cstdint>
#include <limits>
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
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_activation.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;
using Tensors = absl::Span<const AnyTensorView>;

constexpr char kRms[] = "rms_norm";
constexpr char kAdd[] = "add_rms_norm";
constexpr char kFused[] = "fused_add_rms_norm";
constexpr char kSglang[] = "fused_add_rmsnorm_cpu";
constexpr char kGemma[] = "gemma_rms_norm";

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}}};
}
NamedArgs AddExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"residual", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}}};
}
NamedArgs SglangExample(DType dtype) {
  return {{"input", TensorMeta{dtype, {4, 64}}},
          {"residual", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}},
          {"eps", 1e-6}};
}

// The tensors that a norm reads and writes, in the order of its schema.
enum class Form : uint8_t {
  kNorm,        // x, weight, out
  kAdd,         // x, residual, weight, out: residual += x
  kAddInPlace,  // x, residual, weight: residual += x, x becomes the norm
};

class BoundRmsNorm final : public BoundOp {
 public:
  BoundRmsNorm(absl::string_view op, RmsNormPlan plan, Form form)
      : op_(op), plan_(std::move(plan)), form_(form) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(
        CheckTensorCount(op_, t, form_ == Form::kAdd ? 4 : 3));
    if (form_ != Form::kNorm) return plan_.CheckAddArgs(AddArgs(t));
    if (ByRows(t)) {
      return plan_.CheckArgs(AsRows(t[0]), t[1], AsRows(t[2]));
    }
    return plan_.CheckArgs(t[0], t[1], t[2]);
  }
  void Execute(Tensors t, Workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (form_ != Form::kNorm) {
      plan_.ExecuteAdd(AddArgs(t), executor);
    } else if (ByRows(t)) {
      plan_.Execute(AsRows(t[0]), t[1], AsRows(t[2]), executor);
    } else {
      plan_.Execute(t[0], t[1], t[2], executor);
    }
  }

 private:
  // Whether x and out are matrices; heads that are columns of wider rows are
  // not.
  static bool ByRows(Tensors t) {
    return AsRows(t[0]).rank() == 2 && AsRows(t[2]).rank() == 2;
  }
  RmsNormArgs AddArgs(Tensors t) const {
    const AnyTensorView x = AsRows(t[0]), residual = AsRows(t[1]);
    return {x, t[2], form_ == Form::kAdd ? AsRows(t[3]) : x, residual,
            residual};
  }

  absl::string_view op_;
  RmsNormPlan plan_;
  Form form_;
};

struct Dtypes {
  DType residual;
  DType out;
  NormSum sum = NormSum::kRounded;
};

absl::StatusOr<RmsNormPlan> PlanOf(NormWeight kind, const TensorMeta& x,
                                   const MaybeMeta& weight, double eps,
                                   int64_t span, const Dtypes& dtypes) {
  RmsNormSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.hidden, LastExtent("rms_norm", "x", x));
  spec.eps = static_cast<float>(eps);
  spec.span = span;
  spec.weight = weight.has_value() ? kind : NormWeight::kNone;
  spec.x_dtype = x.dtype;
  spec.residual_dtype = dtypes.residual;
  spec.sum = dtypes.sum;
  spec.out_dtype = dtypes.out;
  spec.weight_dtype = weight.has_value() ? weight->dtype : x.dtype;
  return RmsNormPlan::Create(spec);
}

// The reference. Sum and norm are not rounded; the normalised row is rounded to
// the weight's dtype, and then the product. With 1 + weight, which is f32, and
// with one_rounding, the product alone is rounded.
struct NativeNorm {
  int64_t n;
  int64_t span;
  float eps;
  bool one_plus;
  bool one_rounding;
  DType weight_dtype;

  // h(i) is element i of the unrounded row. write(i, h, normed) is only called
  // after the last call of h.
  template <typename H, typename Write>
  void Row(const H& h, const ScalarRow& weight, const Write& write) const {
    double squares = 0;
    for (int64_t i = 0; i < span; ++i) squares += double{h(i)} * double{h(i)};
    const double mean = squares / static_cast<double>(span);
    // simd sums again in double where f32 has overflowed.
    const float inverse =
        mean <= double{std::numeric_limits<float>::max()}
            ? 1.0f / std::sqrt(static_cast<float>(mean) + eps)
            : static_cast<float>(1.0 / std::sqrt(mean + double{eps}));
    const NativeRound rd(weight_dtype);
    for (int64_t i = 0; i < n; ++i) {
      const float v = h(i) * inverse;
      float normed = v;
      if (!weight.null()) {
        const float w = one_plus ? 1.0f + weight[i] : weight[i];
        normed = one_plus || one_rounding ? v * w : rd(rd(v) * w);
      }
      write(i, h(i), normed);
    }
  }
};

template <NormWeight kKind, Form kForm, bool kNative>
Bound Norm(const char* op, const TensorMeta& x, const MaybeMeta& weight,
           double eps, int64_t span, const Dtypes& dtypes) {
  QUERN_ASSIGN_OR_RETURN(RmsNormPlan plan,
                         PlanOf(kKind, x, weight, eps, span, dtypes));
  const RmsNormSpec spec = plan.spec();
  std::unique_ptr<BoundOp> fast(new BoundRmsNorm(op, std::move(plan), kForm));
  if (!kNative) return fast;
  const int64_t n = spec.hidden;
  const NativeNorm norm = {n,
                           spec.span == 0 ? n : spec.span,
                           spec.eps,
                           kKind == NormWeight::kOnePlus,
                           spec.sum == NormSum::kExact,
                           spec.weight_dtype};
  const RowOf weight_row =
      weight.has_value() ? RowOf::kVector : RowOf::kNothing;
  if (kForm == Form::kNorm) {
    return std::unique_ptr<BoundOp>(new BoundRowLoop(
        std::move(fast), {RowOf::kMatrix, weight_row, RowOf::kMatrix},
        [norm](absl::Span<const ScalarRow> row) {
          norm.Row(
              [&](int64_t i) { return row[0][i]; }, row[1],
              [&](int64_t i, float, float normed) { row[2].Set(i, normed); });
        }));
  }
  // In place, the norm is written to x.
  constexpr size_t kOut = kForm == Form::kAdd ? 3 : 0;
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast),
      {RowOf::kMatrix, RowOf::kMatrix, weight_row, RowOf::kMatrix},
      [norm](absl::Span<const ScalarRow> row) {
        norm.Row([&](int64_t i) { return row[0][i] + row[1][i]; }, row[2],
                 [&](int64_t i, float h, float normed) {
                   row[1].Set(i, h);
                   row[kOut].Set(i, normed);
                 });
      }));
}

absl::Status CheckNorm(const char* op, const TensorMeta& x,
                       const MaybeMeta& weight) {
  QUERN_ASSIGN_OR_RETURN(const int64_t n, LastExtent(op, "x", x));
  if (!weight.has_value()) return absl::OkStatus();
  return CheckExtents(op, "weight", *weight, {n});
}

Metas RmsShapes(const TensorMeta& x, const MaybeMeta& weight, double, int64_t,
                const std::string& out_dtype) {
  QUERN_RETURN_IF_ERROR(CheckNorm(kRms, x, weight));
  QUERN_ASSIGN_OR_RETURN(const DType out,
                         DTypeOr(kRms, "out_dtype", out_dtype, x.dtype));
  return std::vector<TensorMeta>{{out, x.extents}};
}
template <bool kNative>
Bound Rms(const TensorMeta& x, const MaybeMeta& weight, double eps,
          int64_t var_hidden_size, const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> out,
                         RmsShapes(x, weight, eps, var_hidden_size, out_dtype));
  return Norm<NormWeight::kPlain, Form::kNorm, kNative>(
      kRms, x, weight, eps, var_hidden_size, {x.dtype, out[0].dtype});
}

Metas AddShapes(const TensorMeta& x, const MutatedMeta& residual,
                const MaybeMeta& weight, double, const std::string& out_dtype) {
  QUERN_RETURN_IF_ERROR(CheckNorm(kAdd, x, weight));
  QUERN_ASSIGN_OR_RETURN(const DType out,
                         DTypeOr(kAdd, "out_dtype", out_dtype, x.dtype));
  QUERN_RETURN_IF_ERROR(
      CheckExtents(kAdd, "residual", residual, x.extents, ", as x is"));
  return std::vector<TensorMeta>{{out, x.extents}};
}
template <bool kNative>
Bound AddRms(const TensorMeta& x, const MutatedMeta& residual,
             const MaybeMeta& weight, double eps,
             const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> out,
                         AddShapes(x, residual, weight, eps, out_dtype));
  return Norm<NormWeight::kPlain, Form::kAdd, kNative>(
      kAdd, x, weight, eps, 0, {residual.dtype, out[0].dtype});
}

Metas FusedShapes(const MutatedMeta& x, const MutatedMeta& residual,
                  const MaybeMeta& weight, double) {
  QUERN_RETURN_IF_ERROR(CheckNorm(kFused, x, weight));
  QUERN_RETURN_IF_ERROR(
      CheckMeta(kFused, "residual", residual, x, ", as x is"));
  return std::vector<TensorMeta>();
}
template <bool kNative>
Bound FusedAddRms(const MutatedMeta& x, const MutatedMeta& residual,
                  const MaybeMeta& weight, double eps) {
  QUERN_RETURN_IF_ERROR(FusedShapes(x, residual, weight, eps).status());
  return Norm<NormWeight::kPlain, Form::kAddInPlace, kNative>(
      kFused, x, weight, eps, 0, {x.dtype, x.dtype});
}

Metas SglangShapes(const MutatedMeta& input, const MutatedMeta& residual,
                   const TensorMeta& weight, double) {
  QUERN_RETURN_IF_ERROR(CheckNorm(kSglang, input, weight));
  QUERN_RETURN_IF_ERROR(
      CheckMeta(kSglang, "residual", residual, input, ", as input is"));
  return std::vector<TensorMeta>();
}
template <bool kNative>
Bound SglangFusedAdd(const MutatedMeta& input, const MutatedMeta& residual,
                     const TensorMeta& weight, double eps) {
  QUERN_RETURN_IF_ERROR(SglangShapes(input, residual, weight, eps).status());
  return Norm<NormWeight::kPlain, Form::kAddInPlace, kNative>(
      kSglang, input, weight, eps, 0,
      {input.dtype, input.dtype, NormSum::kExact});
}

Metas GemmaShapes(const TensorMeta& x, const TensorMeta& weight, double) {
  QUERN_RETURN_IF_ERROR(CheckNorm(kGemma, x, weight));
  return std::vector<TensorMeta>{x};
}
template <bool kNative>
Bound Gemma(const TensorMeta& x, const TensorMeta& weight, double eps) {
  QUERN_RETURN_IF_ERROR(GemmaShapes(x, weight, eps).status());
  return Norm<NormWeight::kOnePlus, Form::kNorm, kNative>(
      kGemma, x, weight, eps, 0, {x.dtype, x.dtype});
}

}  // namespace

absl::Status RegisterNormOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&RmsShapes>(
      "rms_norm(Tensor x, Tensor? weight, float eps=1e-06, "
      "int var_hidden_size=0, str out_dtype=\"\") -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(kRms, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Rms<false>>(kRms, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Rms<true>>(kRms, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&AddShapes>(
      "add_rms_norm(Tensor x, Tensor(a1!) residual, Tensor? weight, "
      "float eps=1e-06, str out_dtype=\"\") -> Tensor",
      &AddExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kAdd, {{{"x", "out"}, {"x", "residual"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&AddRms<false>>(kAdd, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&AddRms<true>>(kAdd, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&FusedShapes>(
      "fused_add_rms_norm(Tensor(a0!) x, Tensor(a1!) residual, "
      "Tensor? weight, float eps=1e-06) -> ()",
      &AddExample));
  QUERN_RETURN_IF_ERROR(r.Add<&FusedAddRms<false>>(kFused, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&FusedAddRms<true>>(kFused, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&SglangShapes>(
      "fused_add_rmsnorm_cpu(Tensor(a0!) input, Tensor(a1!) residual, "
      "Tensor weight, float eps) -> ()",
      &SglangExample));
  QUERN_RETURN_IF_ERROR(
      r.Declare(kSglang, {{}, OpRows::kFirst, "", {{"x", "input"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&SglangFusedAdd<false>>(kSglang, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&SglangFusedAdd<true>>(kSglang, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&GemmaShapes>(
      "gemma_rms_norm(Tensor x, Tensor weight, float eps=1e-06) -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(kGemma, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Gemma<false>>(kGemma, kSimd));
  return r.Add<&Gemma<true>>(kGemma, kReference);
}

}  // namespace quern
