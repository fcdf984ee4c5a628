// Linear layers of int8 by oneDNN: how close results are to real arithmetic,
// and what does not change them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/sanitized.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using Plan = LinearPlan;

template <typename T>
class OneDnnInt8BoundsTest : public testing::Test {
 protected:
  // f32 roundings of the sum, the scales' product, the product and the result,
  // then one to T.
  void ExpectClose(const Plan& plan, const Layer& layer, const Rows& rows,
                   const Product& product, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << "m=" << rows.m << " n=" << layer.n() << " k=" << layer.k()
                 << " " << layer.mode << " " << plan.Explain(rows.m));
    const Exact want = Reference(layer, rows, product);
    const double u = UnitRoundoff<float>();
    EXPECT_TRUE(AllWithin(
        RunRows<T>(plan, rows, executor), want.values,
        [&](double value, int64_t flat) {
          const double product =
              std::abs(want.products[static_cast<size_t>(flat)]);
          const double f32 = 1.0001 * u * (3 * product + std::abs(value));
          return f32 + UnitRoundoff<T>() * (std::abs(value) + f32) +
                 RoundingBound<T>(0);
        }));
  }

  InlineExecutor inline_;
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(OneDnnInt8BoundsTest, Types);

// The shapes of vLLM's test_onednn, and its sequences of m on one plan.
TYPED_TEST(OneDnnInt8BoundsTest, RealScalesStayWithinTheDerivedBound) {
  TestRng rng;
  const auto executor = Workers(2);
  const int64_t shapes[][2] = {{256, 128}, {1023, 491}, {1001, 15}};
  for (const auto& shape : shapes) {
    const Layer codes = RandomLayer(rng, shape[0], shape[1], {});
    std::vector<Layer> layers;
    std::vector<Plan> plans;
    for (const Mode& mode : AllModes()) {
      layers.push_back(RandomLayer(rng, shape[0], shape[1], mode));
      layers.back().w.codes = codes.w.codes;
      if (mode.bias) layers.back().w.layout = WeightLayout::kKN;
      plans.push_back(PlanOf<TypeParam>(layers.back()));
    }
    for (const int64_t m : {16, 1, 32, 128, 64, 1, 17, 1, 31, 17}) {
      if (QuickTests() && m > 17) continue;
      // All modes share one product, because it is most of the time.
      const Rows some = RandomRows(rng, m, codes);
      const Product product = ProductOf(codes, some);
      for (size_t i = 0; i < plans.size(); ++i) {
        Rows rows = RandomRows(rng, m, layers[i]);
        rows.a = some.a;
        this->ExpectClose(plans[i], layers[i], rows, product, *executor);
      }
    }
  }
}

TYPED_TEST(OneDnnInt8BoundsTest, TheSameForALayerOfAModel) {
  if (QuickTests()) GTEST_SKIP() << "large";
  TestRng rng;
  const auto executor = Workers(2);
  const int64_t n = 4096, k = kSanitized ? 512 : 4096;
  for (const bool per_token : {true, false}) {
    const Layer layer = RandomLayer(rng, n, k, {per_token, true, true, true});
    const Plan plan = PlanOf<TypeParam>(layer);
    for (const int64_t m : {16, 1}) {
      const Rows rows = RandomRows(rng, m, layer);
      this->ExpectClose(plan, layer, rows, ProductOf(layer, rows), *executor);
    }
  }
}

TYPED_TEST(OneDnnInt8BoundsTest, ThreadsAndNeighboursChangeNoBit) {
  TestRng rng;
  const int64_t n = 1100, k = 1300, m = 300;
  for (const Mode& mode : AllModes()) {
    if (mode.bias != mode.zero_points || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, n, k, mode);
    const Plan plan = PlanOf<TypeParam>(layer);
    Rows rows = RandomRows(rng, m, layer);
    const auto want = RunRows<TypeParam>(plan, rows, this->inline_);
    for (const int workers : {2, 3, 5}) {
      const auto executor = Workers(workers);
      EXPECT_TRUE(AllBitsEqual(RunRows<TypeParam>(plan, rows, *executor), want))
          << workers;
    }
    for (const int64_t fewer : {257, 200, 33, 17, 8, 3, 2, 1}) {
      rows.m = fewer;
      rows.a.resize(static_cast<size_t>(fewer * k));
      if (mode.per_token) {
        rows.scales.resize(static_cast<size_t>(fewer));
        if (mode.zero_points) {
          rows.zero_points.resize(static_cast<size_t>(fewer));
        }
      }
      const std::vector<TypeParam> first(want.begin(),
                                         want.begin() + fewer * n);
      EXPECT_TRUE(
          AllBitsEqual(RunRows<TypeParam>(plan, rows, this->inline_), first))
          << fewer;
    }
  }
}

TYPED_TEST(OneDnnInt8BoundsTest, EightThreadsMayExecuteAtOnce) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (!mode.bias || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, 96, 130, mode);
    const Plan plan = PlanOf<TypeParam>(layer);
    std::vector<Rows> rows;
    std::vector<std::vector<TypeParam>> want;
    // Another plan: the threads below find no kernel ready.
    const Plan first = PlanOf<TypeParam>(layer);
    for (int64_t m = 1; m <= 80; m += 3) {
      rows.push_back(RandomRows(rng, m, layer));
      want.push_back(RunRows<TypeParam>(first, rows.back(), this->inline_));
    }
    std::vector<std::vector<std::vector<TypeParam>>> got(8);
    std::vector<std::thread> threads;
    for (auto& mine : got) {
      threads.emplace_back([&] {
        InlineExecutor executor;
        for (const Rows& some : rows) {
          mine.push_back(RunRows<TypeParam>(plan, some, executor));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& mine : got) {
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(AllBitsEqual(mine[i], want[i])) << rows[i].m;
      }
    }
  }
}

}  // namespace
}  // namespace quern
