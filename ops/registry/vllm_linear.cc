#include "quern/ops/registry/vllm_linear.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

AnyTensorView EachRow(const AnyTensorView& bias, int64_t m) {
  if (bias.rank() == 0) return bias;
  return AnyTensorView(bias.dtype(), bias.data(), 2, {m, bias.extent(0)},
                       {0, 1});
}

absl::Status CheckBiasMeta(absl::string_view op,
                           const std::optional<TensorMeta>& bias,
                           const TensorMeta& c) {
  if (!bias.has_value() || *bias == TensorMeta{c.dtype, {c.extents.back()}}) {
    return absl::OkStatus();
  }
  return InvalidArgument(op, "bias is not ", DTypeName(c.dtype), "[",
                         c.extents.back(), "], as c is");
}

absl::Status CheckProduct(absl::string_view op, const OneDnnHandler& handler,
                          bool scaled, const TensorMeta& a,
                          const TensorMeta& c) {
  const LinearWeightsSpec& w = handler.weights.spec();
  if (w.n == 0 || (w.format == WeightFormat::kI8Channel) != scaled) {
    return InvalidArgument(
        op, w.n == 0 ? "handler has no weights" : "handler has other weights",
        "; need those that Prepare of ",
        scaled ? "create_onednn_scaled_mm" : "create_onednn_mm", " packs");
  }
  if (a.extents.size() != 2 || a.extents[1] != w.k) {
    return InvalidArgument(op, "a is not [m, ", w.k, "], as b is [", w.k, ", ",
                           w.n, "]");
  }
  if (c.extents == std::vector<int64_t>{a.extents[0], w.n}) {
    return absl::OkStatus();
  }
  return InvalidArgument(op, "c is not [", a.extents[0], ", ", w.n, "]");
}

LinearWeights OnesForExamples(WeightFormat format) {
  constexpr int64_t kN = 48, kK = 64;
  const std::vector<float> floats(kN * kK, 1);
  const std::vector<int8_t> codes(kN * kK, 1);
  const float scale = 1;
  LinearWeightsSpec spec;
  spec.n = kN;
  spec.k = kK;
  spec.format = format;
  LinearSource source;
  if (format == WeightFormat::kI8Channel) {
    source.codes = DenseMatrix<const int8_t>(codes.data(), kN, kK);
    source.scales = DenseVector<const float>(&scale, 1);
  } else {
    source.codes = DenseMatrix<const float>(floats.data(), kN, kK);
  }
  InlineExecutor executor;
  const auto packed = LinearWeights::Pack(spec, {source}, executor);
  QUERN_CHECK(packed.ok());
  return *packed;
}

}  // namespace quern
