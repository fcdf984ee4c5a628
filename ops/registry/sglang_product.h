#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCT_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCT_H_

// Private: a product with weights that Prepare packs, for the operators of
// RegisterSglangLinearOps.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What an operator was asked for.
struct SglangProduct {
  absl::string_view op;  // points to a literal
  TensorMeta x, w, out;
  std::optional<TensorMeta> x_scales, w_scales, bias;
  LinearWeightsSpec weights;
  int64_t block_n = 0;
  bool packed = false;  // is_vnni
  // Whether mat2 is f32[k, n], as SGLang has n < 16.
  bool transposed = false;
};

// Sets what follows from mat1 and mat2: out, the extents of the weights, and
// `transposed`. InvalidArgument names what does not fit. An empty out_dtype
// means that of mat1.
absl::Status CompleteProduct(SglangProduct& product,
                             const std::string& out_dtype);

// The operator, whose tensors are mat1, mat2, scales1 and scales2 where there
// are any, bias (or nothing), out.
absl::StatusOr<std::unique_ptr<BoundOp>> BindSglangProduct(
    const SglangProduct& product, LinearProvider provider);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCT_H_
