#include "quern/ops/registry/sglang/products/packed_product.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";

// The smallest matrix of the format, all zeros, which shows whether a provider
// can run the dtypes.
absl::StatusOr<LinearWeights> SmallestOf(const SglangWeightSpec& spec) {
  LinearWeightsSpec smallest = spec;
  smallest.n = spec.gated ? 2 : 1;
  smallest.k = spec.format == WeightFormat::kBlocks ? 32 : 1;
  const std::vector<float> zeros(32, 0);
  const auto of = [&](DType dtype, int64_t columns) {
    return AnyTensorView(dtype, static_cast<const void*>(zeros.data()), 2,
                         {smallest.n, columns}, {columns, 1});
  };
  LinearSource source;
  source.codes = of(spec.w.dtype, 1);
  if (spec.format == WeightFormat::kI8Channel) {
    source.scales = DenseVector<const float>(zeros.data(), smallest.n);
  } else if (spec.format == WeightFormat::kE4M3Block) {
    source.scales = DenseMatrix<const float>(zeros.data(), 1, 1);
    source.block_n = 2;
  } else if (spec.format == WeightFormat::kI4Group) {
    source.scales = DenseMatrix<const float>(zeros.data(), 1, smallest.n);
  } else if (spec.format == WeightFormat::kBlocks) {
    source.layout = WeightLayout::kBlocks;
    source.codes = of(DType::kU8, 17);
  }
  InlineExecutor executor;
  return LinearWeights::Pack(smallest, {source}, executor);
}

absl::Status NoWeights() {
  return absl::FailedPreconditionError(
      absl::StrCat(kPlan, ": has no weights; need a call of Prepare before"));
}

}  // namespace

absl::StatusOr<SglangProduct> SglangProduct::Create(
    LinearProvider provider, const LinearSpec& linear,
    const SglangWeightSpec& weights) {
  QUERN_RETURN_IF_ERROR(LinearWeights::MaxPackedBytes(weights).status());
  QUERN_ASSIGN_OR_RETURN(const LinearWeights smallest, SmallestOf(weights));
  QUERN_ASSIGN_OR_RETURN(const LinearPlan probe,
                         LinearPlanOf(kPlan, provider, linear, smallest));
  SglangProduct product(provider, linear, weights);
  if (provider != LinearProvider::kReference) product.target_ = probe.target();
  return product;
}

absl::StatusOr<SglangProduct> SglangProduct::CreateAny(
    bool native, const LinearSpec& linear, const SglangWeightSpec& weights) {
  if (native) return Create(LinearProvider::kReference, linear, weights);
  auto product = Create(LinearProvider::kSimd, linear, weights);
  if (!absl::IsUnimplemented(product.status())) return product;
  auto other = Create(LinearProvider::kOneDnn, linear, weights);
  return other.ok() ? std::move(other) : std::move(product);
}

std::string SglangProduct::Explain(int64_t rows) const {
  if (native_.has_value() || !plan_.has_value()) return target_;
  return plan_->Explain(rows);
}

absl::Status SglangProduct::Prepare(const SglangWeights& given,
                                    Executor& executor) {
  const bool native = provider_ == LinearProvider::kReference;
  plan_.reset();
  QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                         PackSglangWeights(spec_, given, native, executor));
  if (native) {
    QUERN_ASSIGN_OR_RETURN(native_,
                           NativeLinear::Create(weights, linear_.activation));
    kept_ = weights;
  }
  QUERN_ASSIGN_OR_RETURN(plan_,
                         LinearPlanOf(kPlan, provider_, linear_, weights));
  prepared_ = given;
  return absl::OkStatus();
}

absl::Status SglangProduct::CheckWeights(const SglangWeights& given) const {
  if (!plan_.has_value()) return NoWeights();
  if (SameView(given.w, prepared_.w) &&
      SameView(given.scales, prepared_.scales) &&
      SameView(given.zeros, prepared_.zeros) &&
      SameView(given.bias, prepared_.bias)) {
    return absl::OkStatus();
  }
  return InvalidArgument(kPlan, spec_.names.w,
                         " or what goes with it is not what Prepare was given");
}

absl::Status SglangProduct::CheckRows(const AnyTensorView& x) const {
  return plan_.has_value() ? plan_->CheckRows(x) : NoWeights();
}

absl::StatusOr<int64_t> SglangProduct::WorkspaceBytes(int64_t max_rows,
                                                      int max_workers) const {
  if (!plan_.has_value()) return NoWeights();
  if (native_.has_value()) return 0;
  return plan_->WorkspaceBytes(max_rows, max_workers);
}

void SglangProduct::Execute(const LinearArgs& args, const Workspace& workspace,
                            Executor& executor) const noexcept {
  QUERN_DCHECK_OK(plan_->CheckArgs(args));
  if (native_.has_value()) {
    native_->Multiply(args.a, args.residual, args.c);
  } else {
    plan_->Execute(args, workspace, executor);
  }
}

}  // namespace quern
