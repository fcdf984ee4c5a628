#include "gemm/scaled_linear.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/linear_impl.h"
#include "gemm/onednn/scaled_linear.h"
#include "gemm/packed_scaled_linear.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"

namespace quern {
namespace {

constexpr char kOp[] = "scaled_linear";

// tools/perf scaled_linear --n=4096 --k=4096, 2 threads, bf16 quantised per
// token, packed against oneDNN 3.7.2, microseconds (Zen 4, gcc 12, 2026):
//
//     m = 1       m = 16      m = 64
//   265 : 691   670 : 883   2630 : 2777
constexpr absl::string_view kWhy =
    "auto: measured faster than oneDNN for m <= 64; beyond, it needs no second "
    "copy of the weights";

// What oneDNN needs of a that is not i8: its codes, and what belongs to them.
struct Quantised {
  int8_t* q;
  float* scales;
  int32_t* zero_points;
};
template <typename Allocator>
Quantised LayOut(Allocator& allocator, int64_t m, int64_t k) {
  return {allocator.template Allocate<int8_t>("codes", m * k),
          allocator.template Allocate<float>("scales", m),
          allocator.template Allocate<int32_t>("zero points", m)};
}

}  // namespace

absl::StatusOr<ScaledLinearPlan> ScaledLinearPlan::Create(
    const ScaledLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& weight_scales, const AnyTensorView& bias,
    Executor& executor) {
  ScaledLinearPlan plan(spec);
  if (spec.impl == LinearImpl::kOneDnn) {
    QUERN_RETURN_IF_ERROR(
        plan.CreateOneDnn(weights, weight_scales, bias, executor));
  } else {
    QUERN_ASSIGN_OR_RETURN(plan.packed_,
                           PackedScaledLinearPlan::Create(
                               spec, weights, weight_scales, bias, executor));
  }
  return plan;
}

absl::Status ScaledLinearPlan::CreateOneDnn(const AnyTensorView& weights,
                                            const AnyTensorView& weight_scales,
                                            const AnyTensorView& bias,
                                            Executor& executor) {
  QUERN_RETURN_IF_ERROR(PackedScaledLinearPlan::CheckSpec(spec_));
  QUERN_RETURN_IF_ERROR(CheckNoActivation(kOp, spec_.activation));
  OneDnnScaledLinearSpec onednn;
  onednn.n = spec_.n;
  onednn.k = spec_.k;
  onednn.c = spec_.c;
  onednn.activation = spec_.granularity == Int8Granularity::kPerToken
                          ? OneDnnScaledLinearSpec::Activation::kPerToken
                          : OneDnnScaledLinearSpec::Activation::kPerTensor;
  onednn.zero_points = spec_.zero_points == Int8ZeroPoint::kUsed;
  onednn.order = spec_.order;
  QUERN_ASSIGN_OR_RETURN(
      onednn_, OneDnnScaledLinearPlan::Create(onednn, weights, weight_scales,
                                              bias, executor));
  if (spec_.a == DType::kI8) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(
      quantize_,
      Int8QuantizePlan::Create(PackedScaledLinearPlan::QuantizeSpecOf(spec_)));
  return absl::OkStatus();
}

std::string ScaledLinearPlan::Explain(int64_t m) const {
  const absl::string_view why =
      spec_.impl == LinearImpl::kAuto ? kWhy : "as the spec asks";
  return absl::StrCat(packed_.has_value()
                          ? packed_->Explain(m)
                          : absl::StrCat("oneDNN ", onednn_->Explain(m)),
                      "; ", why);
}

size_t ScaledLinearPlan::packed_bytes() const {
  return packed_.has_value() ? packed_->packed_bytes()
                             : onednn_->packed_bytes();
}

absl::Status ScaledLinearPlan::CheckArgs(const ScaledLinearArgs& args) const {
  if (!packed_.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckNoResidual(kOp, args.residual));
  }
  QUERN_RETURN_IF_ERROR(PackedScaledLinearPlan::CheckArgs(
      spec_, args.a, args.a_scales, args.a_zero_points, args.c, args.residual));
  if (packed_.has_value() || args.a.extent(0) <= 1) return absl::OkStatus();
  // What remains of oneDNN's conditions, and of the quantisation's.
  constexpr int64_t kMaxStride = OneDnnScaledLinearPlan::kMaxExtent;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "a.stride(0)", args.a.stride(0), spec_.k, kMaxStride));
  return CheckRange(kOp, "c.stride(0)", args.c.stride(0), spec_.n, kMaxStride);
}

void ScaledLinearPlan::Execute(const ScaledLinearArgs& args,
                               LinearScratch& scratch,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  if (packed_.has_value()) {
    packed_->Execute(args.a, args.a_scales, args.a_zero_points, args.c,
                     args.residual, scratch.workspace(), executor);
    return;
  }
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
  if (quantize_.has_value()) {
    Workspace workspace = scratch.workspace();
    const Quantised rows = LayOut(workspace, m, spec_.k);
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
  onednn_->Execute(onednn, scratch.onednn_, executor);
}

absl::Status LinearScratch::Reserve(const ScaledLinearPlan& plan, int64_t max_m,
                                    const Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_m", max_m, 0));
  if (plan.packed_.has_value()) {
    return Grow(plan.packed_->WorkspaceBytes(max_m, executor.num_workers()));
  }
  if (!plan.quantize_.has_value()) return absl::OkStatus();
  int64_t codes = 0;
  const bool fits = CheckedMul(max_m, plan.spec_.k, &codes);
  WorkspaceLayout layout;
  if (fits) LayOut(layout, max_m, plan.spec_.k);
  if (!fits || layout.overflow()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("scaled_linear: the codes of max_m=", max_m,
                     " rows do not fit in 2^63 bytes"));
  }
  return Grow(layout.bytes());
}

}  // namespace quern
