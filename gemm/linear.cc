#include "gemm/linear.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/linear_impl.h"
#include "gemm/onednn/linear.h"
#include "gemm/packed_linear.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear";

// tools/perf linear --n=4096 --k=4096 --m=1,16,256, 2 threads, packed against
// oneDNN 3.7.2, microseconds (Zen 4, gcc 12, 2026):
//
//              m = 1        m = 16       m = 64       m = 256       m = 1024
//   bf16    533 : 1177   1347 : 1481  4919 : 5106  19164 : 19087  76676 : 75543
//   f16     640 : 2229   2532 : 3026
//   f32    1085 : 1635   2659 : 2917
//
// Beyond m = 128 oneDNN wins up to 1.5 % for bf16, which is not worth a second
// copy of the weights. With AVX2 alone oneDNN widens bf16 and f16 weights to
// f32, twice the bytes. Nobody has measured a CPU with AMX yet, where oneDNN
// has tiles and the packed kernels do not: force it there for many rows.
constexpr absl::string_view kWhy =
    "auto: measured faster than oneDNN for m <= 128, within 2 % of it beyond";

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
  OneDnnLinearSpec onednn;
  onednn.n = spec.n;
  onednn.k = spec.k;
  onednn.a = spec.a;
  onednn.c = spec.c;
  onednn.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(
      plan.onednn_, OneDnnLinearPlan::Create(onednn, weights, bias, executor));
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
  return onednn_->CheckArgs(a, c);
}

void LinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                         const AnyTensorView& residual, LinearScratch& scratch,
                         Executor& executor) const noexcept {
  if (packed_.has_value()) {
    packed_->Execute(a, c, residual, scratch.workspace(), executor);
  } else {
    QUERN_DCHECK(residual.rank() == 0);
    onednn_->Execute(a, c, scratch.onednn_, executor);
  }
}

absl::Status LinearScratch::Reserve(const LinearPlan& plan, int64_t max_m,
                                    const Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_m", max_m, 0));
  if (!plan.packed_.has_value()) return absl::OkStatus();
  return Grow(plan.packed_->WorkspaceBytes(max_m, executor.num_workers()));
}

}  // namespace quern
