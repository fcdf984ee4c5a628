#ifndef QUERN_OPS_REGISTRY_VLLM_LINEAR_H_
#define QUERN_OPS_REGISTRY_VLLM_LINEAR_H_

// Private: what the operators of vllm_linear_ops.h have in common.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/vllm_linear_ops.h"

namespace quern {

// Defines onednn_scaled_mm.
absl::Status RegisterVllmScaledMm(OpRegistry& registry);

// bias[n] as a residual of m rows, which are one row in memory. No bias is no
// residual.
AnyTensorView EachRow(const AnyTensorView& bias, int64_t m);

// InvalidArgument unless bias has the dtype and the columns of c.
absl::Status CheckBiasMeta(absl::string_view op,
                           const std::optional<TensorMeta>& bias,
                           const TensorMeta& c);

// InvalidArgument unless the handler has weights of the kind, and a[m, k] and
// c[m, n] fit them.
absl::Status CheckProduct(absl::string_view op, const OneDnnHandler& handler,
                          bool scaled, const TensorMeta& a,
                          const TensorMeta& c);

// Weights of 64 x 48 ones, kF32 or kI8Channel, for listings and tests.
LinearWeights OnesForExamples(WeightFormat format);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_LINEAR_H_
