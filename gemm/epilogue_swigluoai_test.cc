// kSwigluOaiAndMul of gemm/epilogue.h, whose clamps the other activations do
// not have.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_activation.h"

namespace quern {
namespace {

class SwigluOaiTest : public IsaTest {
 protected:
  // c of one row of a times these gates and ups: a is 1 and so is k.
  std::vector<float> Run(const std::vector<float>& gate,
                         const std::vector<float>& up) {
    const auto d = static_cast<int64_t>(gate.size());
    LinearWeightsSpec weights_spec;
    weights_spec.n = 2 * d;
    weights_spec.k = 1;
    weights_spec.format = WeightFormat::kF32;
    weights_spec.gated = true;
    // Files have rows of gate and of up by turns.
    std::vector<float> rows;
    for (size_t i = 0; i < gate.size(); ++i) {
      rows.push_back(gate[i]);
      rows.push_back(up[i]);
    }
    LinearSource sources[2];
    sources[0].codes = MatrixView<const float>(rows.data(), {d, 1}, {2, 1});
    sources[1].codes = MatrixView<const float>(rows.data() + 1, {d, 1}, {2, 1});
    const auto weights = LinearWeights::Pack(weights_spec, sources, executor_);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    LinearSpec spec;
    spec.a = spec.c = DType::kF32;
    spec.activation = LinearActivation::kSwigluOaiAndMul;
    spec.kernels = "packed";
    const auto plan = LinearPlan::Create(spec, *weights, executor_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_RAN_ON(*plan);
    std::vector<float> c(gate.size());
    const float one = 1;
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(1, 1));
    LinearArgs args;
    args.a = DenseMatrix(&one, 1, 1);
    args.c = DenseMatrix(c.data(), 1, d);
    plan->Execute(args, Workspace(*memory), executor_);
    return c;
  }

  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(SwigluOaiTest);

// 12 + 1.3 |1.702 g| units of the activation, one of the sum with 1, one of the
// product.
TEST_P(SwigluOaiTest, IsWithinItsBound) {
  TestRng rng;
  std::vector<float> gate, up;
  for (const float g :
       {-1e30f, -80.0f, -7.5f, -1.0f, 0.0f, 6.99f, 7.0f, 7.01f, 90.0f, 1e30f}) {
    for (const float u : {-1e30f, -7.01f, -7.0f, -1.0f, 0.5f, 7.0f, 8.0f}) {
      gate.push_back(g);
      up.push_back(u);
    }
  }
  for (int i = 0; i < 5000; ++i) {
    gate.push_back(static_cast<float>(rng.Uniform(-50, 12)));
    up.push_back(static_cast<float>(rng.Uniform(-12, 12)));
  }
  std::vector<double> want;
  for (size_t i = 0; i < gate.size(); ++i) {
    want.push_back(ReferenceSwigluOai(gate[i], up[i], 1.702, 7));
  }
  EXPECT_TRUE(AllWithin(Run(gate, up), want, [&](double v, int64_t i) {
    const double g = std::min(double{gate[static_cast<size_t>(i)]}, 7.0);
    const double units = 15 + 1.3 * std::min(std::abs(1.702 * g), 128.0);
    return units * 0x1p-24 * std::abs(v) + 0x1p-140;
  }));
}

TEST_P(SwigluOaiTest, ClampsDoNotHideNaN) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto c = Run({kNaN, 1, kNaN, 2}, {1, kNaN, kNaN, 3});
  EXPECT_TRUE(std::isnan(c[0]) && std::isnan(c[1]) && std::isnan(c[2]));
  EXPECT_FALSE(std::isnan(c[3]));
}

TEST_P(SwigluOaiTest, InfinityIsClamped) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto c = Run({kInf, 7, -kInf, 1}, {kInf, 7, 1, -kInf});
  EXPECT_EQ(c[0], c[1]);
  EXPECT_EQ(c[2], 0);
  EXPECT_EQ(c[3], Run({1}, {-7})[0]);
}

}  // namespace
}  // namespace quern
