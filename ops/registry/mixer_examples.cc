#include "quern/ops/registry/mixer_examples.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace {

using Weights = const LinearWeights*;

// Weights for listings and tests, which live as long as the program.
template <int64_t kN, int64_t kK>
Weights Example() {
  static const LinearWeights* const weights = [] {
    std::vector<float> codes(kN * kK);
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<float>(static_cast<int>(i * 7 % 17) - 8) / 16;
    }
    LinearWeightsSpec spec;
    spec.n = kN;
    spec.k = kK;
    spec.format = WeightFormat::kF32;
    LinearSource source;
    source.codes = DenseMatrix<const float>(codes.data(), kN, kK);
    InlineExecutor executor;
    const auto packed = LinearWeights::Pack(spec, {source}, executor);
    QUERN_CHECK(packed.ok());
    return new LinearWeights(*packed);
  }();
  return weights;
}
TensorMeta F32(std::vector<int64_t> extents) {
  return {DType::kF32, std::move(extents)};
}

// What all layers have: 16 columns of x, and a convolution of `channels`.
NamedArgs WithCommon(DType dtype, Weights in_proj, Weights out_proj,
                     int64_t channels, int64_t width, NamedArgs own) {
  NamedArgs args = {
      {"x", TensorMeta{dtype, {4, 16}}},
      {"in_proj", in_proj},
      {"out_proj", out_proj},
      {"conv_weight", TensorMeta{dtype, {channels, width}}},
      {"conv_state", TensorMeta{dtype, {128, width - 1, channels}}},
      {"state_indices", TensorMeta{DType::kI32, {4}}}};
  args.insert(args.end(), own.begin(), own.end());
  return args;
}

}  // namespace

NamedArgs ShortConvExample(DType dtype) {
  return WithCommon(dtype, Example<36, 16>(), Example<16, 12>(), 12, 3, {});
}
NamedArgs MambaExample(DType dtype) {
  return WithCommon(dtype, Example<24, 16>(), Example<16, 12>(), 12, 4,
                    {{"x_proj", Example<7, 12>()},
                     {"dt_proj", Example<12, 3>()},
                     {"conv_bias", TensorMeta{dtype, {12}}},
                     {"ssm_state", TensorMeta{dtype, {128, 1, 12, 2}}},
                     {"a", F32({1, 12, 2})},
                     {"d", F32({1, 12})},
                     {"dt_bias", F32({1, 12})}});
}
NamedArgs Plamo2Example(DType dtype) {
  return WithCommon(dtype, Example<24, 16>(), Example<16, 12>(), 12, 4,
                    {{"x_proj", Example<7, 12>()},
                     {"dt_proj", Example<3, 3>()},
                     {"ssm_state", TensorMeta{dtype, {128, 3, 4, 2}}},
                     {"a", F32({3})},
                     {"d", F32({3})},
                     {"dt_bias", F32({3})},
                     {"dt_norm", TensorMeta{dtype, {3}}},
                     {"b_norm", TensorMeta{dtype, {2}}},
                     {"c_norm", TensorMeta{dtype, {2}}}});
}
NamedArgs Mamba2Example(DType dtype) {
  return WithCommon(dtype, Example<31, 16>(), Example<16, 12>(), 16, 4,
                    {{"conv_bias", TensorMeta{dtype, {16}}},
                     {"ssm_state", TensorMeta{dtype, {128, 3, 4, 2}}},
                     {"a", F32({3})},
                     {"d", F32({3})},
                     {"dt_bias", F32({3})},
                     {"norm", TensorMeta{dtype, {12}}}});
}
NamedArgs DeltaNetExample(DType dtype) {
  return WithCommon(dtype, Example<28, 16>(), Example<16, 8>(), 16, 4,
                    {{"state", TensorMeta{dtype, {128, 2, 4, 4}}},
                     {"a_log", F32({2})},
                     {"dt_bias", F32({2})},
                     {"norm", TensorMeta{dtype, {4}}},
                     {"num_k_heads", int64_t{1}}});
}

}  // namespace quern
