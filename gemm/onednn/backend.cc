// oneDNN as an implementation of gemm/linear.h, in programs that link this
// target. It packs weights of its own, from the packed form.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_layer.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/linear.h"
#include "quern/gemm/onednn/scaled_linear.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/gemm/packed_form.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

// Declared, weak, in gemm/linear.cc.
const LinearImplementation* LinkedOneDnn();

namespace {

constexpr char kOp[] = "linear";
using LayerOr = absl::StatusOr<std::unique_ptr<const LinearLayer>>;

std::string WhyNot(const LinearSpec& spec, const LinearWeightsSpec& weights) {
  if (HasGroups(weights.format)) {
    return absl::StrCat("has no kernel for ", WeightFormatName(weights.format));
  }
  if (spec.activation != LinearActivation::kNone) return "has no activation";
  if (spec.residual) return "adds no residual";
  constexpr int64_t kMax = OneDnnLinearPlan::kMaxExtent;
  if (weights.n > kMax || weights.k > kMax) {
    return absl::StrCat("takes n and k up to ", kMax);
  }
  return {};
}

// Refuses a row stride that oneDNN cannot hold.
absl::Status CheckStride(absl::string_view field, const AnyTensorView& view,
                         int64_t columns) {
  if (view.extent(0) <= 1) return absl::OkStatus();
  return CheckRange(kOp, field, view.stride(0), columns,
                    OneDnnLinearPlan::kMaxExtent);
}

// The packed weights as b[n, k] in plain memory.
absl::StatusOr<AlignedBuffer> Unpack(const LinearWeights& weights,
                                     Executor& executor) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(FloatOrI8(w.format), w.k, w.n));
  VnniPackSpec spec;
  spec.layout = layout;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack, VnniPackPlan::Create(spec));
  const auto size = static_cast<int64_t>(SizeOf(layout.dtype()));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer plain,
                         AlignedBuffer::Create(w.n * w.k * size));
  pack.Unpack(PackedView(layout, weights.panels()),
              AnyTensorView(layout.dtype(), static_cast<void*>(plain.data()), 2,
                            {w.n, w.k}, {w.k, 1}),
              executor);
  return plain;
}

class OneDnnFloatLayer final : public LinearLayer {
 public:
  explicit OneDnnFloatLayer(OneDnnLinearPlan plan) : plan_(std::move(plan)) {}

  const char* target() const override { return "oneDNN"; }
  std::string Explain(int64_t m) const override {
    return absl::StrCat("onednn ", plan_.Explain(m));
  }
  int64_t packed_bytes() const override {
    return static_cast<int64_t>(plan_.packed_bytes());
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    return plan_.WorkspaceBytes(max_m, max_workers);
  }
  absl::Status CheckRows(const AnyTensorView& a) const override {
    return CheckStride("a.stride(0)", a, plan_.spec().k);
  }
  absl::Status CheckArgs(const LinearArgs& args) const override {
    QUERN_RETURN_IF_ERROR(CheckRows(args.a));
    return CheckStride("c.stride(0)", args.c, plan_.spec().n);
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    OneDnnScratch scratch(workspace);
    plan_.Execute(args.a, args.c, scratch, executor);
  }

 private:
  OneDnnLinearPlan plan_;
};

LayerOr CreateFloat(const LinearSpec& spec, const LinearWeights& weights,
                    const AnyTensorView& plain, const AnyTensorView& bias,
                    Executor& executor) {
  OneDnnLinearSpec onednn;
  onednn.n = weights.spec().n;
  onednn.k = weights.spec().k;
  onednn.a = spec.a;
  onednn.c = spec.c;
  QUERN_ASSIGN_OR_RETURN(
      auto plan, OneDnnLinearPlan::Create(onednn, plain, bias, executor));
  return std::make_unique<const OneDnnFloatLayer>(std::move(plan));
}

// Rows of a as oneDNN takes them, where the caller's are not i8.
struct Quantised {
  int8_t* q;
  float* scales;
  int32_t* zero_points;
};

class OneDnnInt8Layer final : public LinearLayer {
 public:
  OneDnnInt8Layer(const LinearSpec& spec, OneDnnScaledLinearPlan plan,
                  std::optional<Int8QuantizePlan> quantize)
      : spec_(spec), plan_(std::move(plan)), quantize_(std::move(quantize)) {}

  const char* target() const override { return "oneDNN"; }
  std::string Explain(int64_t m) const override {
    return absl::StrCat("onednn ", plan_.Explain(m));
  }
  int64_t packed_bytes() const override {
    return static_cast<int64_t>(plan_.packed_bytes());
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plan_.WorkspaceBytes(max_m, max_workers));
    if (!quantize_.has_value()) return bytes;
    int64_t codes = 0, all = 0;
    const bool fits = CheckedMul(max_m, plan_.spec().k, &codes);
    WorkspaceLayout layout;
    if (fits) LayOut(layout, max_m);
    if (!fits || layout.overflow() ||
        !CheckedAdd(layout.bytes(), bytes, &all)) {
      return absl::ResourceExhaustedError(
          absl::StrCat(kOp, ": the codes of max_m=", max_m,
                       " rows do not fit in 2^63 bytes"));
    }
    return all;
  }

  absl::Status CheckRows(const AnyTensorView& a) const override {
    return CheckStride("a.stride(0)", a, plan_.spec().k);
  }
  absl::Status CheckArgs(const LinearArgs& args) const override {
    QUERN_RETURN_IF_ERROR(CheckRows(args.a));
    return CheckStride("c.stride(0)", args.c, plan_.spec().n);
  }

  void Execute(const LinearArgs& args, const Workspace& scratch,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    const int64_t m = args.a.extent(0);
    if (m == 0) return;
    OneDnnScaledLinearArgs onednn;
    onednn.a = args.a;
    onednn.c = args.c;
    const bool zeros = spec_.zero_points == Int8ZeroPoint::kUsed;
    const bool per_token = spec_.granularity == Int8Granularity::kPerToken;
    if (!per_token) {
      onednn.scales = DenseVector(&spec_.a_scale, 1);
      if (zeros) onednn.zero_points = DenseVector(&spec_.a_zero_point, 1);
    } else if (!quantize_.has_value()) {
      onednn.scales = args.a_scales;
      if (zeros) onednn.zero_points = args.a_zero_points;
    }
    Workspace workspace = scratch;
    if (quantize_.has_value()) {
      const Quantised rows = LayOut(workspace, m);
      const auto q = DenseMatrix(rows.q, m, plan_.spec().k);
      const auto scales = DenseVector(rows.scales, per_token ? m : 0);
      const auto zero_points =
          DenseVector(rows.zero_points, per_token && zeros ? m : 0);
      quantize_->Execute(args.a, q, scales, zero_points, executor);
      onednn.a = q;
      if (per_token) onednn.scales = scales;
      if (per_token && zeros) onednn.zero_points = zero_points;
    }
    OneDnnScratch rest(workspace);
    plan_.Execute(onednn, rest, executor);
  }

 private:
  template <typename Allocator>
  Quantised LayOut(Allocator& allocator, int64_t m) const {
    return {allocator.template Allocate<int8_t>("codes", m * plan_.spec().k),
            allocator.template Allocate<float>("scales", m),
            allocator.template Allocate<int32_t>("zero points", m)};
  }

  LinearSpec spec_;
  OneDnnScaledLinearPlan plan_;
  std::optional<Int8QuantizePlan> quantize_;  // where a is not i8
};

LayerOr CreateInt8(const LinearSpec& spec, const LinearWeights& weights,
                   const AnyTensorView& plain, const AnyTensorView& bias,
                   Executor& executor) {
  using Activation = OneDnnScaledLinearSpec::Activation;
  OneDnnScaledLinearSpec onednn;
  onednn.n = weights.spec().n;
  onednn.k = weights.spec().k;
  onednn.c = spec.c;
  onednn.activation = spec.granularity == Int8Granularity::kPerToken
                          ? Activation::kPerToken
                          : Activation::kPerTensor;
  onednn.zero_points = spec.zero_points == Int8ZeroPoint::kUsed;
  QUERN_ASSIGN_OR_RETURN(
      auto plan, OneDnnScaledLinearPlan::Create(
                     onednn, plain, DenseVector(weights.scales(), onednn.n),
                     bias, executor));
  std::optional<Int8QuantizePlan> quantize;
  if (spec.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(quantize,
                           Int8QuantizePlan::Create(QuantizeSpecOf(spec)));
  }
  return std::make_unique<const OneDnnInt8Layer>(spec, std::move(plan),
                                                 std::move(quantize));
}

LayerOr Create(const LinearSpec& spec, const LinearWeights& weights,
               Executor& executor) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(const AlignedBuffer memory, Unpack(weights, executor));
  const AnyTensorView plain(FloatOrI8(w.format),
                            static_cast<const void*>(memory.data()), 2,
                            {w.n, w.k}, {w.k, 1});
  AnyTensorView bias;
  if (weights.has_bias()) bias = DenseVector(weights.bias(), w.n);
  if (w.format == WeightFormat::kI8Channel) {
    return CreateInt8(spec, weights, plain, bias, executor);
  }
  return CreateFloat(spec, weights, plain, bias, executor);
}

}  // namespace

const LinearImplementation* LinkedOneDnn() {
  static constexpr LinearImplementation kOneDnn = {"onednn", &WhyNot, &Create};
  return &kOneDnn;
}

}  // namespace quern
