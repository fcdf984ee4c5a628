#include "gemm/scaled_linear.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_impl.h"
#include "gemm/linear_spec.h"
#include "gemm/packed_scaled_linear.h"

namespace quern {
namespace {

constexpr char kOp[] = "scaled_linear";

// Measured against oneDNN 3.7.2 on Zen 4 (2026), the packed kernels are faster
// for m <= 64 (gemm/README.md).
constexpr absl::string_view kWhy = "auto: the packed kernels are the default";

}  // namespace

absl::StatusOr<ScaledLinearPlan> ScaledLinearPlan::Create(
    const ScaledLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& weight_scales, const AnyTensorView& bias,
    Executor& executor) {
  ScaledLinearPlan plan(spec);
  if (spec.impl != LinearImpl::kOneDnn) {
    QUERN_ASSIGN_OR_RETURN(plan.packed_,
                           PackedScaledLinearPlan::Create(
                               spec, weights, weight_scales, bias, executor));
    return plan;
  }
  QUERN_RETURN_IF_ERROR(PackedScaledLinearPlan::CheckSpec(spec));
  QUERN_RETURN_IF_ERROR(CheckNoActivation(kOp, spec.activation));
  QUERN_ASSIGN_OR_RETURN(const LinearBackend* backend, RequireOneDnn(kOp));
  QUERN_ASSIGN_OR_RETURN(
      plan.onednn_,
      backend->scaled_linear(spec, weights, weight_scales, bias, executor));
  return plan;
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
  return packed_.has_value() ? absl::OkStatus() : onednn_->CheckArgs(args);
}

void ScaledLinearPlan::Execute(const ScaledLinearArgs& args,
                               LinearScratch& scratch,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  if (packed_.has_value()) {
    packed_->Execute(args.a, args.a_scales, args.a_zero_points, args.c,
                     args.residual, scratch.workspace(), executor);
  } else {
    onednn_->Execute(args, scratch.workspace(), executor);
  }
}

absl::Status LinearScratch::Reserve(const ScaledLinearPlan& plan, int64_t max_m,
                                    const Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_m", max_m, 0));
  const int workers = executor.num_workers();
  if (plan.packed_.has_value()) {
    return Grow(plan.packed_->WorkspaceBytes(max_m, workers));
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                         plan.onednn_->WorkspaceBytes(max_m, workers));
  return Grow(bytes);
}

}  // namespace quern
