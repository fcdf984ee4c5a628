#include "quern/gemm/onednn/scaled_linear.h"

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/scaled_linear_testutil.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using Plan = OneDnnScaledLinearPlan;

template <typename T>
class OneDnnScaledLinearTest : public testing::Test {
 protected:
  void ExpectExact(const Layer& layer, const Rows& rows, Executor& executor,
                   WeightOrder order = WeightOrder::kNK, int64_t padding = 0) {
    const OneDnnScaledLinearPlan plan =
        Runner::Create<T>(layer, order, padding);
    SCOPED_TRACE(testing::Message()
                 << "m=" << rows.m << " n=" << layer.n << " k=" << layer.k
                 << " " << layer.mode << " padding=" << padding << " "
                 << plan.Explain(rows.m));
    // Sums are rounded to f32, then to T: no bit is lost before that.
    const auto f32 = RoundedTo<float>(Reference(layer, rows).values);
    EXPECT_TRUE(
        AllEqual(Runner::Run<T>(plan, rows, executor, scratch_, padding,
                                rows.m % 2 == 0 ? Edge::kBegin : Edge::kEnd),
                 RoundedTo<T>(ToDoubles(f32))));
  }

  InlineExecutor inline_;
  OneDnnScratch scratch_;
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(OneDnnScaledLinearTest, Types);

TYPED_TEST(OneDnnScaledLinearTest, IsExactOnIntegersAtEveryRemainder) {
  TestRng rng;
  const auto executor = Workers(2);
  const std::vector<Mode> modes = AllModes();
  size_t next = 0;
  for (const int64_t n : {1, 15, 16, 17, 33, 530}) {
    for (const int64_t k : {1, 3, 4, 67, 129}) {
      for (const int64_t m : {1, 2, 5, 17}) {
        const Mode& mode = modes[next++ % modes.size()];
        Layer layer = RandomLayer(rng, n, k, mode);
        MakeExact(rng, layer);
        Rows rows = RandomRows(rng, m, layer);
        MakeExact(rng, rows);
        const int64_t variant = n + k + m;
        this->ExpectExact(
            layer, rows, *executor,
            variant % 3 == 0 ? WeightOrder::kKN : WeightOrder::kNK,
            variant % 4);
      }
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, IsExactAcrossRowBlocks) {
  TestRng rng;
  const auto executor = Workers(2);
  for (const Mode& mode : AllModes()) {
    for (const int64_t m : {255, 256, 257, 513}) {
      Layer layer = RandomLayer(rng, 70, 40, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, m, layer);
      MakeExact(rng, rows);
      this->ExpectExact(layer, rows, *executor, WeightOrder::kNK, 3);
    }
  }
}

// What vpmaddubsw would saturate: sums of two products beyond 2^15.
TYPED_TEST(OneDnnScaledLinearTest, DoesNotSaturateAtTheExtremes) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias) continue;
    for (const int64_t k : {2, 4, 64, 1023, 1025, 2049}) {
      Layer layer = RandomLayer(rng, 20, k, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, 4, layer);
      MakeExact(rng, rows);
      const int8_t extremes[] = {-128, 127};
      for (int64_t i = 0; i < 4 * k; ++i) {
        rows.a[static_cast<size_t>(i)] = extremes[i / k % 2];
      }
      for (int64_t i = 0; i < 20 * k; ++i) {
        layer.w[static_cast<size_t>(i)] = extremes[i / k % 2];
      }
      for (size_t i = 0; i < rows.zero_points.size(); ++i) {
        rows.zero_points[i] = extremes[i / 2 % 2];
      }
      this->ExpectExact(layer, rows, this->inline_);
    }
  }
}

// Terms that cancel: every bit of the large sums on the way counts.
TYPED_TEST(OneDnnScaledLinearTest, KeepsEveryBitOfLongSums) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias || !mode.per_channel) continue;
    const int64_t k = 65792;
    Layer layer = RandomLayer(rng, 3, k, mode);
    MakeExact(rng, layer);
    Rows rows = RandomRows(rng, 2, layer);
    MakeExact(rng, rows);
    // The first half of k adds 2^29, the second takes all away but a little.
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t col = 0; col < 3; ++col) {
        layer.w[static_cast<size_t>(col * k + i)] = i < k / 2 ? -128 : 127;
      }
      for (int64_t row = 0; row < 2; ++row) {
        rows.a[static_cast<size_t>(row * k + i)] =
            i % 1000 == 7 ? static_cast<int8_t>(i % 127) : -128;
      }
    }
    this->ExpectExact(layer, rows, this->inline_);
  }
}

TYPED_TEST(OneDnnScaledLinearTest, TakesTheLargestK) {
  for (const Mode& mode : AllModes()) {
    if (mode.bias || mode.per_channel) continue;
    const bool bounded =
        mode.zero_points && mode.activation == Activation::kPerTensor;
    const int64_t k = bounded ? Plan::kMaxKZeroPoint : Plan::kMaxK;
    // f16 holds up to 65504.
    Layer layer{2, k, mode, {}, {0x1p-10f}, {}};
    layer.w.assign(static_cast<size_t>(2 * k), -128);
    Rows rows{2, {}, {0x1p-10f}, {}};
    rows.a.assign(static_cast<size_t>(2 * k), -128);
    if (mode.activation == Activation::kPerToken) rows.scales.push_back(0.5f);
    if (mode.zero_points) rows.zero_points.push_back(127);
    if (mode.zero_points && mode.activation == Activation::kPerToken) {
      rows.zero_points.push_back(1 << 28);
    }
    this->ExpectExact(layer, rows, this->inline_);
  }
}

TYPED_TEST(OneDnnScaledLinearTest, NoRowsIsNoWork) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const Layer layer = RandomLayer(rng, 16, 16, mode);
    const Plan plan = Runner::Create<TypeParam>(layer);
    const float scale = 1.0f;
    const int32_t zero = 0;
    const int64_t count = mode.activation == Activation::kPerTensor ? 1 : 0;
    OneDnnScaledLinearArgs args;
    args.a = DenseMatrix<const int8_t>(nullptr, 0, 16);
    args.c = DenseMatrix<TypeParam>(nullptr, 0, 16);
    args.scales = DenseVector<const float>(&scale, count);
    if (mode.zero_points) {
      args.zero_points = DenseVector<const int32_t>(&zero, count);
    }
    EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
    plan.Execute(args, this->scratch_, this->inline_);
    EXPECT_EQ(this->scratch_.bytes(), 0u);
  }
}

TYPED_TEST(OneDnnScaledLinearTest, UsesNoReferenceKernel) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const Plan plan =
        Runner::Create<TypeParam>(RandomLayer(rng, 256, 128, mode));
    for (const int64_t m : {1, 100, 256}) {
      EXPECT_FALSE(absl::StartsWith(plan.Explain(m), "ref")) << plan.Explain(m);
    }
    if (mode.bias && mode.per_channel) {
      std::cout << mode << ": " << plan.Explain(16) << "\n";
    }
  }
}

class ScaledEpilogueTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(ScaledEpilogueTest);

TEST_P(ScaledEpilogueTest, IsExactAtEveryRemainder) {
  TestRng rng;
  InlineExecutor executor;
  OneDnnScratch scratch;
  for (const Mode& mode : AllModes()) {
    if (mode.activation == Activation::kPerTensor) continue;
    for (const int64_t n : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33}) {
      Layer layer = RandomLayer(rng, n, 60, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, 3, layer);
      MakeExact(rng, rows);
      const Plan plan = Runner::Create<float>(layer);
      EXPECT_RAN_ON(plan);
      EXPECT_TRUE(AllEqual(Runner::Run<float>(plan, rows, executor, scratch, 1),
                           Reference(layer, rows).values))
          << n;
    }
  }
}

}  // namespace
}  // namespace quern
