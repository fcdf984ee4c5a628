// oneDNN behind gemm/linear.h and gemm/scaled_linear.h, in programs that link
// this target.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_spec.h"
#include "gemm/onednn/linear.h"
#include "gemm/onednn/scaled_linear.h"
#include "gemm/onednn/scratch.h"
#include "gemm/packed_scaled_linear.h"
#include "quant/int8_quantize.h"

namespace quern {

// Declared, weak, in gemm/linear_backend.cc.
const LinearBackend* LinkedOneDnnBackend();

namespace {

class OneDnnLayer final : public BackendLinear {
 public:
  explicit OneDnnLayer(OneDnnLinearPlan plan) : plan_(std::move(plan)) {}

  std::string Explain(int64_t m) const override { return plan_.Explain(m); }
  size_t packed_bytes() const override { return plan_.packed_bytes(); }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int workers) const override {
    return plan_.WorkspaceBytes(max_m, workers);
  }
  absl::Status CheckArgs(const LinearArgs& args) const override {
    return plan_.CheckArgs(args.a, args.c);
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

absl::StatusOr<std::unique_ptr<const BackendLinear>> CreateLinear(
    const LinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  OneDnnLinearSpec onednn;
  onednn.n = spec.n;
  onednn.k = spec.k;
  onednn.a = spec.a;
  onednn.c = spec.c;
  onednn.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(
      auto plan, OneDnnLinearPlan::Create(onednn, weights, bias, executor));
  return std::make_unique<const OneDnnLayer>(std::move(plan));
}

// Rows of a as oneDNN takes them, where the caller's are not i8.
struct Quantised {
  int8_t* q;
  float* scales;
  int32_t* zero_points;
};

class OneDnnScaledLayer final : public BackendScaledLinear {
 public:
  OneDnnScaledLayer(const ScaledLinearSpec& spec, OneDnnScaledLinearPlan plan,
                    std::optional<Int8QuantizePlan> quantize)
      : spec_(spec), plan_(std::move(plan)), quantize_(std::move(quantize)) {}

  std::string Explain(int64_t m) const override { return plan_.Explain(m); }
  size_t packed_bytes() const override { return plan_.packed_bytes(); }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int workers) const override {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plan_.WorkspaceBytes(max_m, workers));
    if (!quantize_.has_value()) return bytes;
    int64_t codes = 0, all = 0;
    const bool fits = CheckedMul(max_m, spec_.k, &codes);
    WorkspaceLayout layout;
    if (fits) LayOut(layout, max_m);
    if (!fits || layout.overflow() ||
        !CheckedAdd(layout.bytes(), bytes, &all)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("scaled_linear: the codes of max_m=", max_m,
                       " rows do not fit in 2^63 bytes"));
    }
    return all;
  }

  // The caller has checked what every implementation asks for; oneDNN besides
  // bounds the strides.
  absl::Status CheckArgs(const ScaledLinearArgs& args) const override {
    constexpr char kOp[] = "scaled_linear";
    constexpr int64_t kMaxStride = OneDnnScaledLinearPlan::kMaxExtent;
    if (args.a.extent(0) <= 1) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "a.stride(0)", args.a.stride(0), spec_.k, kMaxStride));
    return CheckRange(kOp, "c.stride(0)", args.c.stride(0), spec_.n,
                      kMaxStride);
  }

  void Execute(const ScaledLinearArgs& args, const Workspace& scratch,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    const int64_t m = args.a.extent(0);
    if (m == 0) return;
    OneDnnScaledLinearArgs onednn;
    onednn.a = args.a;
    onednn.c = args.c;
    const bool zeros = spec_.zero_points == Int8ZeroPoint::kUsed;
    if (spec_.granularity == Int8Granularity::kPerTensor) {
      onednn.scales = DenseVector(&spec_.a_scale, 1);
      if (zeros) onednn.zero_points = DenseVector(&spec_.a_zero_point, 1);
    } else if (!quantize_.has_value()) {
      onednn.scales = args.a_scales;
      if (zeros) onednn.zero_points = args.a_zero_points;
    }
    Workspace workspace = scratch;
    if (quantize_.has_value()) {
      const Quantised rows = LayOut(workspace, m);
      const bool per_token = spec_.granularity == Int8Granularity::kPerToken;
      const auto q = DenseMatrix(rows.q, m, spec_.k);
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
    return {allocator.template Allocate<int8_t>("codes", m * spec_.k),
            allocator.template Allocate<float>("scales", m),
            allocator.template Allocate<int32_t>("zero points", m)};
  }

  ScaledLinearSpec spec_;
  OneDnnScaledLinearPlan plan_;
  std::optional<Int8QuantizePlan> quantize_;  // where a is not i8
};

absl::StatusOr<std::unique_ptr<const BackendScaledLinear>> CreateScaledLinear(
    const ScaledLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& weight_scales, const AnyTensorView& bias,
    Executor& executor) {
  OneDnnScaledLinearSpec onednn;
  onednn.n = spec.n;
  onednn.k = spec.k;
  onednn.c = spec.c;
  onednn.activation = spec.granularity == Int8Granularity::kPerToken
                          ? OneDnnScaledLinearSpec::Activation::kPerToken
                          : OneDnnScaledLinearSpec::Activation::kPerTensor;
  onednn.zero_points = spec.zero_points == Int8ZeroPoint::kUsed;
  onednn.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(
      auto plan, OneDnnScaledLinearPlan::Create(onednn, weights, weight_scales,
                                                bias, executor));
  std::optional<Int8QuantizePlan> quantize;
  if (spec.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(
        quantize,
        Int8QuantizePlan::Create(PackedScaledLinearPlan::QuantizeSpecOf(spec)));
  }
  return std::make_unique<const OneDnnScaledLayer>(spec, std::move(plan),
                                                   std::move(quantize));
}

}  // namespace

const LinearBackend* LinkedOneDnnBackend() {
  static constexpr LinearBackend kBackend = {"oneDNN", &CreateLinear,
                                             &CreateScaledLinear};
  return &kBackend;
}

}  // namespace quern
