#include "quern/ops/registry/families/linear/example_weights.h"

#include <cstdint>
#include <vector>

#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

std::vector<float> ExampleValues(int64_t n, int64_t k, float unit,
                                 int64_t step) {
  std::vector<float> values;
  for (int64_t i = 0; i < n * k; ++i) {
    values.push_back(unit * static_cast<float>(i * step % 17 - 8));
  }
  return values;
}

LinearWeights ExampleWeights(int64_t n, int64_t k, float unit, int64_t step,
                             bool gated) {
  const std::vector<float> values = ExampleValues(n, k, unit, step);
  LinearWeightsSpec spec;
  spec.n = n;
  spec.k = k;
  spec.format = WeightFormat::kF32;
  spec.gated = gated;
  LinearSource source;
  source.codes = DenseMatrix(values.data(), n, k);
  InlineExecutor executor;
  const auto packed = LinearWeights::Pack(spec, {source}, executor);
  QUERN_CHECK(packed.ok());
  return *packed;
}

}  // namespace quern
