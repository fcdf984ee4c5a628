// What ExpertsPlan refuses, and in what words.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

class ExpertsRefusalTest : public testing::Test {
 protected:
  LinearWeights Weights(int64_t n, int64_t k, Act act = Act::kNone) {
    Shape s{0, n, k};
    s.act = act;
    return RealWeights(rng_, {WeightFormat::kBF16}, s).Pack(executor_);
  }
  // Three experts of 32 x 16.
  ExpertWeights Good() {
    ExpertWeights weights;
    for (int e = 0; e < 3; ++e) {
      weights.gate_up.push_back(Weights(32, 32, Act::kSiluAndMul));
      weights.down.push_back(Weights(32, 16));
    }
    return weights;
  }

  TestRng rng_;
  InlineExecutor executor_;
};

TEST_F(ExpertsRefusalTest, SpecsAndWeights) {
  const ExpertWeights good = Good();
  ExpertsSpec spec;
  spec.top_k = 2;
  const auto refused = [&](const ExpertsSpec& s, const ExpertWeights& weights,
                           const std::string& words) {
    ExpectRefusal(ExpertsPlan::Create(s, weights).status(), words);
  };
  ExpertsSpec bad = spec;
  bad.top_k = 0;
  refused(bad, good, "experts: top_k=0");
  bad.top_k = 65;
  refused(bad, good, "experts: top_k=65");
  bad = spec;
  bad.weight_on_input = true;
  refused(bad, good, "top_k=2; need 1, as the weight is on the input");
  bad = spec;
  bad.x = DType::kI8;
  ExpectRefusal(ExpertsPlan::Create(bad, good).status(),
                absl::StatusCode::kUnimplemented, "experts: x");
  bad = spec;
  bad.out = DType::kI32;
  ExpectRefusal(ExpertsPlan::Create(bad, good).status(),
                absl::StatusCode::kUnimplemented, "experts: out");
  bad = spec;
  bad.activation = Act::kSilu;
  refused(bad, good, "activation is silu");
  refused(spec, {}, "experts=0");
  ExpertWeights weights = good;
  weights.down.pop_back();
  refused(spec, weights, "number of down=2; need 3");
  weights = good;
  for (auto& w : weights.down) w = Weights(32, 17);
  refused(spec, weights, "k of down=17; need 16");
  for (auto& w : weights.down) w = Weights(33, 16);
  refused(spec, weights, "n of down=33; need 32");
  weights.down[1] = Weights(32, 16);
  refused(spec, weights, "n of weights[1] is 32; need 33");
}

TEST_F(ExpertsRefusalTest, Arguments) {
  ExpertsSpec spec;
  spec.top_k = 2;
  const auto plan = ExpertsPlan::Create(spec, Good());
  ASSERT_EQ(plan.status(), absl::OkStatus());
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_tokens=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  std::vector<BF> x(size_t{4 * 32}), out(size_t{4 * 32});
  std::vector<int32_t> ids = {0, 1, 2, 0, 1, 1, -1, 2}, map = {0, 2, -1};
  std::vector<float> weights(8);
  ExpertsArgs good;
  good.x = DenseMatrix(x.data(), 4, 32);
  good.out = DenseMatrix(out.data(), 4, 32);
  good.ids = DenseMatrix<const int32_t>(ids.data(), 4, 2);
  good.weights = DenseMatrix<const float>(weights.data(), 4, 2);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  const auto refused = [&](const std::string& words, const auto& change) {
    ExpertsArgs args = good;
    change(args);
    ExpectRefusal(plan->CheckArgs(args), words);
  };
  refused("x", [&](auto& a) { a.x = DenseMatrix(x.data(), 4, 31); });
  refused("out", [&](auto& a) { a.out = DenseMatrix(out.data(), 3, 32); });
  refused("out", [&](auto& a) { a.out = DenseMatrix(x.data(), 4, 32); });
  refused("ids", [&](auto& a) {
    a.ids = DenseMatrix<const int32_t>(ids.data(), 4, 1);
  });
  refused("weights", [&](auto& a) {
    a.weights = DenseMatrix<const float>(weights.data(), 3, 2);
  });
  refused("out overlaps weights", [&](auto& a) {
    a.weights = DenseMatrix(reinterpret_cast<const float*>(out.data()), 4, 2);
  });
  refused("add", [&](auto& a) { a.add = DenseMatrix(x.data(), 3, 32); });
  refused("add", [&](auto& a) { a.add = DenseMatrix(out.data() + 1, 3, 32); });
  refused("ids[2][0]=5; need 0 <= id < 3", [&](auto&) { ids[4] = 5; });
  ids[4] = -2;
  refused("ids[2][0]=-2", [](auto&) {});
  ids[4] = 1;
  map[1] = 3;
  refused("map[1]=3",
          [&](auto& a) { a.map = DenseVector<const int32_t>(map.data(), 3); });
}

}  // namespace
}  // namespace quern
