#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_BATCH_PRODUCT_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_BATCH_PRODUCT_H_

// Private: one product for each matrix of a batch.
//
//   out[b, m, n] = round(sum over k of x[b, m, k] * w[b, n, k])
//
// w is [batch, n, k], each matrix as packed_weights.h has it: floats, or f8e4m3
// with one scale f32[1] for all. Where there are as many matrices as workers or
// more, each worker takes whole matrices; else all workers share each.

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"

namespace quern {

struct SglangBatchSpec {
  SglangWeightSpec each;  // of one matrix; its names, packed and Fill's members
  int64_t batch = 0;
  DType dtype = DType::kF32;  // of x and out

  // Fills batch and `each` from the call's tensors of these names.
  absl::Status Fill(const OpCall& call);
};

class SglangBatch {
 public:
  static absl::StatusOr<SglangBatch> Create(bool native,
                                            const SglangBatchSpec& spec);

  const char* target() const { return products_[0].target(); }
  absl::Status Prepare(const AnyTensorView& w, const AnyTensorView& scale,
                       Executor& executor);
  absl::Status CheckWeights(const AnyTensorView& w,
                            const AnyTensorView& scale) const;
  // Whatever the number of rows; after Prepare.
  absl::StatusOr<int64_t> WorkspaceBytes(int max_workers) const;
  // InvalidArgument names x or out, by their names in bmm_cpu.
  absl::Status CheckArgs(const AnyTensorView& x,
                         const AnyTensorView& out) const;
  // x[batch, m, k] and out[batch, m, n], with any strides but the last.
  void Execute(const AnyTensorView& x, const AnyTensorView& out,
               Workspace workspace, Executor& executor) const noexcept;

 private:
  SglangBatch(const SglangBatchSpec& spec, std::vector<SglangProduct> products)
      : spec_(spec), products_(std::move(products)) {}

  SglangWeights WeightsOf(const AnyTensorView& w, const AnyTensorView& scale,
                          int64_t b) const;

  SglangBatchSpec spec_;
  std::vector<SglangProduct> products_;
  bool prepared_ = false;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_BATCH_PRODUCT_H_
