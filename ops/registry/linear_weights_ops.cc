#include "quern/ops/registry/linear_weights_ops.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_activations.h"
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/native_linear.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMutated = std::optional<MutatedMeta>;

constexpr char kOp[] = "linear";

absl::StatusOr<LinearActivation> ActivationOf(const std::string& name) {
  constexpr LinearActivation kAll[] = {
      LinearActivation::kNone,           LinearActivation::kSilu,
      LinearActivation::kGelu,           LinearActivation::kGeluTanh,
      LinearActivation::kSiluAndMul,     LinearActivation::kGeluAndMul,
      LinearActivation::kGeluTanhAndMul, LinearActivation::kSwigluOaiAndMul};
  std::string names;
  for (const LinearActivation activation : kAll) {
    if (name == LinearActivationName(activation)) return activation;
    absl::StrAppend(&names, names.empty() ? "" : ", ",
                    LinearActivationName(activation));
  }
  return InvalidArgument(kOp, "activation=\"", name, "\"; need one of ", names);
}

absl::StatusOr<LinearSpec> SpecOf(const TensorMeta& x,
                                  const MaybeMutated& residual,
                                  const std::string& activation,
                                  const std::string& out_dtype,
                                  const std::string& activations) {
  LinearSpec spec;
  spec.a = x.dtype;
  // x cannot be int8, because the schema has no parameter for its scales.
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "x", x.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_ASSIGN_OR_RETURN(
      spec.c, DTypeOr(kOp, "out_dtype", out_dtype,
                      residual.has_value() ? residual->dtype : x.dtype));
  QUERN_ASSIGN_OR_RETURN(spec.activation, ActivationOf(activation));
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kOp, activations));
  spec.residual = residual.has_value();
  return spec;
}

Metas Shapes(const TensorMeta& x, const LinearWeights* weights,
             const MaybeMutated& residual, const std::string& activation,
             const std::string& out_dtype, const std::string& activations) {
  QUERN_ASSIGN_OR_RETURN(const LinearSpec spec, SpecOf(x, residual, activation,
                                                       out_dtype, activations));
  QUERN_ASSIGN_OR_RETURN(const int64_t columns, LastExtent(kOp, "x", x));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "columns of x", columns,
                                   weights->spec().k, "the weights have"));
  TensorMeta out = {spec.c, x.extents};
  out.extents.back() = ColumnsOfC(spec.activation, weights->spec().n);
  if (residual.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckMeta(kOp, "residual", *residual, out, ", as the result is"));
  }
  return std::vector<TensorMeta>{out};
}

// The tensors are x, residual (or nothing), out.
class BoundLinear final : public BoundOp {
 public:
  BoundLinear(LinearPlan plan, std::optional<NativeLinear> native)
      : plan_(std::move(plan)), native_(std::move(native)) {}

  const char* target() const override {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t rows) const override {
    return native_.has_value() ? target() : plan_.Explain(rows);
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 3));
    if (t[1].rank() != 0 &&
        (t[1].data() != t[2].data() || !SameElements(t[1], t[2]))) {
      return InvalidArgument(kOp,
                             "the result is not where the residual is; need "
                             "one view for both, which the layer adds to");
    }
    return plan_.CheckArgs(ArgsOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_.has_value()) return 0;
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_.has_value()) {
      const LinearArgs args = ArgsOf(t);
      native_->Multiply(args.a, args.residual, args.c);
    } else {
      plan_.Execute(ArgsOf(t), workspace, executor);
    }
  }

 private:
  static LinearArgs ArgsOf(Tensors t) {
    return {AsMatrix(t[0]), AsMatrix(t[2]), AsMatrix(t[1])};
  }

  LinearPlan plan_;
  std::optional<NativeLinear> native_;
};

template <LinearProvider kProvider>
Bound Make(const TensorMeta& x, const LinearWeights* weights,
           const MaybeMutated& residual, const std::string& activation,
           const std::string& out_dtype, const std::string& activations) {
  QUERN_RETURN_IF_ERROR(
      Shapes(x, weights, residual, activation, out_dtype, activations)
          .status());
  QUERN_ASSIGN_OR_RETURN(const LinearSpec spec, SpecOf(x, residual, activation,
                                                       out_dtype, activations));
  std::optional<NativeLinear> native;
  if (kProvider == LinearProvider::kReference) {
    QUERN_ASSIGN_OR_RETURN(native,
                           NativeLinear::Create(*weights, spec.activation));
  }
  QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                         LinearPlanOf(kOp, kProvider, spec, *weights));
  return std::unique_ptr<BoundOp>(
      new BoundLinear(std::move(plan), std::move(native)));
}

// An example with weights of 48 x 64, for listings and tests.
NamedArgs Example(DType dtype) {
  static const LinearWeights* const weights = [] {
    constexpr int64_t kN = 48, kK = 64;
    std::vector<float> codes(kN * kK);
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<float>(static_cast<int>(i * 7 % 17) - 8) / 8;
    }
    LinearWeightsSpec spec;
    spec.n = kN;
    spec.k = kK;
    spec.format = WeightFormat::kF32;
    LinearSource source;
    source.codes = DenseMatrix<const float>(codes.data(), kN, kK);
    InlineExecutor executor;
    auto packed = LinearWeights::Pack(spec, {source}, executor);
    QUERN_CHECK(packed.ok());
    return new LinearWeights(*packed);
  }();
  return {{"x", TensorMeta{dtype, {4, 64}}}, {"weights", weights}};
}

}  // namespace

absl::Status RegisterLinearWeightsOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "linear(Tensor x, LinearWeights weights, Tensor(a2!)? residual, "
      "str activation=\"none\", str out_dtype=\"\", "
      "str activations=\"exact\") -> Tensor",
      &Example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"residual", "out"}},
                                        OpRows::kLeading,
                                        "",
                                        {{"a", "x"}, {"c", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<LinearProvider::kSimd>>(kOp, "simd"));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<LinearProvider::kOneDnn>>(kOp, "onednn"));
  return r.Add<&Make<LinearProvider::kReference>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
