// What oneDNN's layers refuse. Arguments that every implementation refuses are
// in gemm/linear_refusal_test.cc and gemm/linear_arguments_test.cc.

#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers.h"

namespace quern {

const LinearImplementation* LinkedOneDnn();

namespace {

TEST(OneDnnRefusalTest, SaysWhyItCannotRun) {
  LinearSpec plain, silu, residual;
  silu.activation = LinearActivation::kSilu;
  residual.residual = true;
  constexpr int64_t kMost = kMaxOneDnnExtent;
  const std::string large = "takes n and k up to 536870911";
  const struct {
    LinearSpec spec;
    WeightFormat format;
    int64_t n, k;
    std::string why_not;
  } cases[] = {
      {plain, WeightFormat::kF32, kMost, 1, ""},
      {plain, WeightFormat::kBF16, 1, kMost, ""},
      {plain, WeightFormat::kF16, 1, 1, ""},
      {plain, WeightFormat::kI8Channel, kMost, 1, ""},
      {plain, WeightFormat::kF32, kMost + 1, 1, large},
      {plain, WeightFormat::kBF16, 1, kMost + 1, large},
      {plain, WeightFormat::kI8Channel, kMost + 1, 1, large},
      {plain, WeightFormat::kI4Group, 8, 32, "has no kernel for i4_group"},
      {plain, WeightFormat::kE4M3Block, 8, 32, "has no kernel for e4m3_block"},
      {plain, WeightFormat::kI8Group, 8, 32, "has no kernel for i8_group"},
      {silu, WeightFormat::kBF16, 8, 32, "has no activation"},
      {residual, WeightFormat::kBF16, 8, 32, "adds no residual"},
  };
  for (const auto& c : cases) {
    LinearWeightsSpec weights;
    weights.format = c.format;
    weights.n = c.n;
    weights.k = c.k;
    EXPECT_EQ(LinkedOneDnn()->why_not(c.spec, weights), c.why_not);
  }
}

}  // namespace
}  // namespace quern
