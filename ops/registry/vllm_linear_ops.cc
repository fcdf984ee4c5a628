#include "quern/ops/registry/vllm_linear_ops.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
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
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/native_linear.h"
#include "quern/ops/registry/vllm_linear.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kCreate[] = "create_onednn_mm";
constexpr char kCreateScaled[] = "create_onednn_scaled_mm";
constexpr char kMm[] = "onednn_mm";

// Packs b into the handler. The tensors are b, and b_scales if there are.
class BoundCreate final : public BoundOp {
 public:
  // `made` is what the handler becomes, but for the weights.
  BoundCreate(absl::string_view op, WeightFormat format,
              const OneDnnHandler& made, OneDnnHandler* handler)
      : op_(op), format_(format), made_(made), handler_(handler) {}

  const char* target() const override { return "scalar"; }
  absl::Status Prepare(Tensors t, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(CheckArgs(t));
    LinearWeightsSpec spec;
    spec.format = format_;
    spec.k = t[0].extent(0);
    spec.n = t[0].extent(1);
    LinearSource source;
    // The last stride of a single column is meaningless and is not used.
    source.codes = AnyTensorView(t[0].dtype(), t[0].data(), 2, {spec.k, spec.n},
                                 {t[0].stride(0), 1});
    source.layout = WeightLayout::kKN;
    if (!RowMajor(t[0])) {
      source.codes = AnyTensorView(t[0].dtype(), t[0].data(), 2,
                                   {spec.n, spec.k}, {t[0].stride(1), 1});
      source.layout = WeightLayout::kNK;
    }
    if (Scaled()) source.scales = t[1];
    auto weights = LinearWeights::Pack(spec, {source}, executor);
    if (!weights.ok()) return OfOp(op_, weights.status());
    *handler_ = made_;
    handler_->weights = *weights;
    return absl::OkStatus();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, Scaled() ? 2 : 1));
    const AnyTensorView& b = t[0];
    if (b.rank() != 2) {
      return InvalidArgument(op_, "b has rank ", b.rank(), "; need 2");
    }
    if (!RowMajor(b) && b.stride(0) != 1) {
      return InvalidArgument(op_, "b has strides ", b.stride(0), " and ",
                             b.stride(1),
                             "; need one of 1, as rows or columns have");
    }
    if (!Scaled()) return absl::OkStatus();
    const bool one = t[1].rank() == 1 && t[1].extent(0) == 1;
    return CheckInput(op_, "b_scales", t[1], DType::kF32,
                      {one ? 1 : b.extent(1)});
  }
  void Execute(Tensors, Workspace, Executor&) const noexcept override {}

 private:
  bool Scaled() const { return format_ == WeightFormat::kI8Channel; }
  static bool RowMajor(const AnyTensorView& b) {
    return b.stride(1) == 1 || b.extent(1) == 1;
  }

  absl::string_view op_;
  WeightFormat format_;
  OneDnnHandler made_;
  OneDnnHandler* handler_;
};

absl::Status CheckWeightMeta(absl::string_view op, const TensorMeta& b,
                             int64_t primitive_cache_size) {
  if (b.extents.size() != 2) {
    return InvalidArgument(op, "b has rank ", b.extents.size(), "; need 2");
  }
  return CheckAtLeast(op, "primitive_cache_size", primitive_cache_size, 0);
}

Metas CreateShapes(const TensorMeta& b, OneDnnHandler*,
                   int64_t primitive_cache_size) {
  QUERN_RETURN_IF_ERROR(CheckWeightMeta(kCreate, b, primitive_cache_size));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kCreate, "b", b.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  return std::vector<TensorMeta>();
}
Bound MakeCreate(const TensorMeta& b, OneDnnHandler* handler,
                 int64_t primitive_cache_size) {
  QUERN_RETURN_IF_ERROR(
      CreateShapes(b, handler, primitive_cache_size).status());
  return std::unique_ptr<BoundOp>(new BoundCreate(
      kCreate, FormatOfFloats(b.dtype), OneDnnHandler(), handler));
}

Metas CreateScaledShapes(const TensorMeta& b, const TensorMeta& b_scales,
                         const std::string& output_type, bool, bool,
                         OneDnnHandler*, int64_t primitive_cache_size) {
  QUERN_RETURN_IF_ERROR(
      CheckWeightMeta(kCreateScaled, b, primitive_cache_size));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kCreateScaled, "b", b.dtype, {DType::kI8}));
  QUERN_ASSIGN_OR_RETURN(
      const DType output,
      DTypeOr(kCreateScaled, "output_type", output_type, DType::kF32));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kCreateScaled, "output_type", output,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  if (b_scales.dtype != DType::kF32 ||
      (b_scales.extents != std::vector<int64_t>{1} &&
       b_scales.extents != std::vector<int64_t>{b.extents[1]})) {
    return InvalidArgument(kCreateScaled, "b_scales is not f32[", b.extents[1],
                           "] or f32[1]");
  }
  return std::vector<TensorMeta>();
}
Bound MakeCreateScaled(const TensorMeta& b, const TensorMeta& b_scales,
                       const std::string& output_type, bool dynamic_act_quant,
                       bool use_azp, OneDnnHandler* handler,
                       int64_t primitive_cache_size) {
  QUERN_RETURN_IF_ERROR(CreateScaledShapes(b, b_scales, output_type,
                                           dynamic_act_quant, use_azp, handler,
                                           primitive_cache_size)
                            .status());
  OneDnnHandler made;
  QUERN_ASSIGN_OR_RETURN(made.output_type, DTypeOr(kCreateScaled, "output_type",
                                                   output_type, DType::kF32));
  made.dynamic_act_quant = dynamic_act_quant;
  made.use_azp = use_azp;
  return std::unique_ptr<BoundOp>(
      new BoundCreate(kCreateScaled, WeightFormat::kI8Channel, made, handler));
}

// The tensors are c, a, bias (or nothing).
class BoundMm final : public BoundOp {
 public:
  BoundMm(LinearPlan plan, std::optional<NativeLinear> native)
      : plan_(std::move(plan)), native_(std::move(native)) {}

  const char* target() const override {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t rows) const override {
    return native_.has_value() ? target() : plan_.Explain(rows);
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kMm, t, 3));
    if (t[2].rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kMm, "bias", t[2], plan_.spec().c, {plan_.n()}));
    }
    return OfOp(kMm, plan_.CheckArgs(ArgsOf(t)));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_.has_value()) return 0;
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const LinearArgs args = ArgsOf(t);
    if (native_.has_value()) {
      native_->Multiply(args.a, args.residual, args.c);
    } else {
      plan_.Execute(args, workspace, executor);
    }
  }

 private:
  static LinearArgs ArgsOf(Tensors t) {
    return {t[1], t[0], EachRow(t[2], t[1].extent(0))};
  }

  LinearPlan plan_;
  std::optional<NativeLinear> native_;
};

Metas MmShapes(const MutatedMeta& c, const TensorMeta& a, const MaybeMeta& bias,
               OneDnnHandler* handler) {
  QUERN_RETURN_IF_ERROR(CheckProduct(kMm, *handler, false, a, c));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kMm, "a", a.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckBiasMeta(kMm, bias, c));
  return std::vector<TensorMeta>();
}
template <LinearProvider kProvider>
Bound MakeMm(const MutatedMeta& c, const TensorMeta& a, const MaybeMeta& bias,
             OneDnnHandler* handler) {
  QUERN_RETURN_IF_ERROR(MmShapes(c, a, bias, handler).status());
  LinearSpec spec;
  spec.a = a.dtype;
  spec.c = c.dtype;
  spec.residual = bias.has_value();
  std::optional<NativeLinear> native;
  if (kProvider == LinearProvider::kReference) {
    QUERN_ASSIGN_OR_RETURN(
        native, NativeLinear::Create(handler->weights, spec.activation));
  }
  QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                         LinearPlanOf(kMm, kProvider, spec, handler->weights));
  return std::unique_ptr<BoundOp>(
      new BoundMm(std::move(plan), std::move(native)));
}

NamedArgs CreateExample(DType dtype) {
  static OneDnnHandler handler;
  return {{"b", TensorMeta{dtype, {64, 48}}}, {"handler", &handler}};
}
NamedArgs CreateScaledExample(DType dtype) {
  static OneDnnHandler handler;
  return {{"b", TensorMeta{DType::kI8, {64, 48}}},
          {"b_scales", TensorMeta{DType::kF32, {48}}},
          {"output_type", DTypeName(dtype)},
          {"dynamic_act_quant", true},
          {"use_azp", false},
          {"handler", &handler}};
}
NamedArgs MmExample(DType dtype) {
  static OneDnnHandler* const handler = [] {
    auto* const made = new OneDnnHandler;
    made->weights = OnesForExamples(WeightFormat::kF32);
    return made;
  }();
  return {{"c", TensorMeta{dtype, {4, 48}}},
          {"a", TensorMeta{dtype, {4, 64}}},
          {"handler", handler}};
}

}  // namespace

absl::Status RegisterVllmLinearOps(OpRegistry& r) {
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&CreateShapes>(
      "create_onednn_mm(Tensor b, OneDnnHandler handler, "
      "int primitive_cache_size=128) -> ()",
      &CreateExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeCreate>(kCreate, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&CreateScaledShapes>(
      "create_onednn_scaled_mm(Tensor b, Tensor b_scales, str output_type, "
      "bool dynamic_act_quant, bool use_azp, OneDnnHandler handler, "
      "int primitive_cache_size=128) -> ()",
      &CreateScaledExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeCreateScaled>(kCreateScaled, kReference));
  QUERN_RETURN_IF_ERROR(
      r.Define<&MmShapes>("onednn_mm(Tensor(a0!) c, Tensor a, Tensor? bias, "
                          "OneDnnHandler handler) -> ()",
                          &MmExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeMm<LinearProvider::kSimd>>(kMm, "simd"));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeMm<LinearProvider::kOneDnn>>(kMm, "onednn"));
  QUERN_RETURN_IF_ERROR(
      r.Add<&MakeMm<LinearProvider::kReference>>(kMm, kReference));
  return RegisterVllmScaledMm(r);
}

}  // namespace quern
