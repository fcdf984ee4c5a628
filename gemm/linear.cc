#include "gemm/linear.h"

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
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_impl.h"
#include "gemm/linear_spec.h"
#include "gemm/packed_linear.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear";

// Measured against oneDNN 3.7.2 on Zen 4 (2026), the packed kernels are faster
// for m <= 128 and within 2 % beyond, bf16 (gemm/README.md). Nobody has
// compared the two on a CPU with AMX, where oneDNN has tiles and the packed
// kernels do not: ask for oneDNN there, for many rows.
constexpr absl::string_view kWhy = "auto: the packed kernels are the default";

}  // namespace

absl::StatusOr<LinearPlan> LinearPlan::Create(const LinearSpec& spec,
                                              const AnyTensorView& weights,
                                              const AnyTensorView& bias,
                                              Executor& executor) {
  LinearPlan plan(spec);
  if (spec.impl != LinearImpl::kOneDnn) {
    PackedLinearSpec packed;
    packed.n = spec.n;
    packed.k = spec.k;
    packed.a = spec.a;
    packed.b = spec.b;
    packed.c = spec.c;
    packed.order = spec.order;
    packed.activation = spec.activation;
    QUERN_ASSIGN_OR_RETURN(plan.packed_, PackedLinearPlan::Create(
                                             packed, weights, bias, executor));
    return plan;
  }
  QUERN_RETURN_IF_ERROR(CheckNoActivation(kOp, spec.activation));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "weights", weights.dtype(), spec.b));
  QUERN_ASSIGN_OR_RETURN(const LinearBackend* backend, RequireOneDnn(kOp));
  QUERN_ASSIGN_OR_RETURN(plan.onednn_,
                         backend->linear(spec, weights, bias, executor));
  return plan;
}

std::string LinearPlan::Explain(int64_t m) const {
  const absl::string_view why =
      spec_.impl == LinearImpl::kAuto ? kWhy : "as the spec asks";
  return absl::StrCat(packed_.has_value()
                          ? packed_->Explain(m)
                          : absl::StrCat("oneDNN ", onednn_->Explain(m)),
                      "; ", why);
}

size_t LinearPlan::packed_bytes() const {
  return packed_.has_value() ? packed_->packed_bytes()
                             : onednn_->packed_bytes();
}

absl::Status LinearPlan::CheckArgs(const AnyTensorView& a,
                                   const AnyTensorView& c,
                                   const AnyTensorView& residual) const {
  if (packed_.has_value()) return packed_->CheckArgs(a, c, residual);
  QUERN_RETURN_IF_ERROR(CheckNoResidual(kOp, residual));
  return onednn_->CheckArgs({a, c});
}

void LinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                         const AnyTensorView& residual, LinearScratch& scratch,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, c, residual));
  if (packed_.has_value()) {
    packed_->Execute(a, c, residual, scratch.workspace(), executor);
  } else {
    onednn_->Execute({a, c}, scratch.workspace(), executor);
  }
}

absl::Status LinearScratch::Reserve(const LinearPlan& plan, int64_t max_m,
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
