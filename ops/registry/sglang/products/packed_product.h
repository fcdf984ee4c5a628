#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_PRODUCT_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_PRODUCT_H_

// Private: products with one matrix of packed_weights.h.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"

namespace quern {

// Products with a matrix that Prepare packs. Where `provider` is the reference
// it computes in double (reference/linear.h).
class SglangProduct {
 public:
  // The spec is complete. Unimplemented if the provider cannot run the dtypes.
  static absl::StatusOr<SglangProduct> Create(LinearProvider provider,
                                              const LinearSpec& linear,
                                              const SglangWeightSpec& weights);
  // The reference where `native`, else the first of kSimd and kOneDnn that has
  // it. For operators of several products, which need not agree.
  static absl::StatusOr<SglangProduct> CreateAny(
      bool native, const LinearSpec& linear, const SglangWeightSpec& weights);

  const SglangWeightSpec& weights() const { return spec_; }
  const char* target() const { return target_; }
  std::string Explain(int64_t rows) const;
  // Null unless the provider is the reference and Prepare was called.
  const NativeLinear* native() const { return native_ ? &*native_ : nullptr; }
  // The packed weights, which the reference alone keeps.
  const LinearWeights& kept() const { return kept_; }

  // Packs, after which the tensors are not read again.
  absl::Status Prepare(const SglangWeights& given, Executor& executor);
  // FailedPrecondition before Prepare; InvalidArgument unless these are the
  // views that it was given.
  absl::Status CheckWeights(const SglangWeights& given) const;
  // InvalidArgument for rows that the product cannot read; after Prepare.
  absl::Status CheckRows(const AnyTensorView& x) const;
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const;
  // args as LinearPlan::Execute wants them.
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept;

 private:
  SglangProduct(LinearProvider provider, const LinearSpec& linear,
                const SglangWeightSpec& spec)
      : provider_(provider), linear_(linear), spec_(spec) {}

  LinearProvider provider_;
  LinearSpec linear_;
  SglangWeightSpec spec_;
  const char* target_ = "scalar";
  std::optional<LinearPlan> plan_;
  std::optional<NativeLinear> native_;
  LinearWeights kept_;
  SglangWeights prepared_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_PRODUCT_H_
