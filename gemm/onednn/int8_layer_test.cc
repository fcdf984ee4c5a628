// Linear layers of int8 by oneDNN. Runs once for each instruction set that
// ONEDNN_MAX_CPU_ISA can cap oneDNN to: see BUILD.

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers_testutil.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

template <typename T>
class OneDnnInt8Test : public testing::Test {
 protected:
  void ExpectExact(Layer layer, const Rows& rows, Executor& executor,
                   WeightLayout layout = WeightLayout::kNK,
                   int64_t padding = 0) {
    layer.w.layout = layout;
    layer.w.padding = padding;
    layer.a_scale = rows.scales[0];
    if (layer.mode.zero_points) layer.a_zero_point = rows.zero_points[0];
    const LinearPlan plan = PlanOf<T>(layer);
    SCOPED_TRACE(testing::Message()
                 << "m=" << rows.m << " n=" << layer.n() << " k=" << layer.k()
                 << " " << layer.mode << " padding=" << padding << " "
                 << plan.Explain(rows.m));
    // Sums are rounded to f32, then to T: no bit is lost before that.
    const auto f32 = RoundedTo<float>(Reference(layer, rows).values);
    EXPECT_TRUE(AllEqual(RunRows<T>(plan, rows, executor, padding),
                         RoundedTo<T>(ToDoubles(f32))));
  }

  InlineExecutor inline_;
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(OneDnnInt8Test, Types);

TYPED_TEST(OneDnnInt8Test, IsExactOnIntegersAtEveryRemainder) {
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
            variant % 3 == 0 ? WeightLayout::kKN : WeightLayout::kNK,
            variant % 4);
      }
    }
  }
}

TYPED_TEST(OneDnnInt8Test, IsExactAcrossRowBlocks) {
  TestRng rng;
  const auto executor = Workers(2);
  for (const Mode& mode : AllModes()) {
    for (const int64_t m : {255, 256, 257, 513}) {
      Layer layer = RandomLayer(rng, 70, 40, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, m, layer);
      MakeExact(rng, rows);
      this->ExpectExact(layer, rows, *executor, WeightLayout::kNK, 3);
    }
  }
}

// What vpmaddubsw would saturate: sums of two products beyond 2^15.
TYPED_TEST(OneDnnInt8Test, DoesNotSaturateAtTheExtremes) {
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
        layer.w.codes[static_cast<size_t>(i)] = extremes[i / k % 2];
      }
      for (size_t i = 0; i < rows.zero_points.size(); ++i) {
        rows.zero_points[i] = extremes[i / 2 % 2];
      }
      this->ExpectExact(layer, rows, this->inline_);
    }
  }
}

// The terms cancel, so that every bit of the large sums on the way counts.
TYPED_TEST(OneDnnInt8Test, KeepsEveryBitOfLongSums) {
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
        layer.w.codes[static_cast<size_t>(col * k + i)] =
            i < k / 2 ? -128 : 127;
      }
      for (int64_t row = 0; row < 2; ++row) {
        rows.a[static_cast<size_t>(row * k + i)] =
            i % 1000 == 7 ? static_cast<int8_t>(i % 127) : -128;
      }
    }
    this->ExpectExact(layer, rows, this->inline_);
  }
}

TYPED_TEST(OneDnnInt8Test, TakesTheLargestK) {
  for (const Mode& mode : AllModes()) {
    if (mode.bias || mode.per_channel) continue;
    const int64_t k =
        mode.zero_points ? LinearPlan::kMaxKZeroPoint : LinearWeights::kMaxKI8;
    // f16 holds up to 65504.
    Layer layer{EmptyWeights({WeightFormat::kI8Channel}, {0, 2, k}), mode};
    layer.w.scales = {0x1p-10};
    layer.w.codes.assign(static_cast<size_t>(2 * k), -128);
    Rows rows{2, {}, {0x1p-10f}, {}};
    rows.a.assign(static_cast<size_t>(2 * k), -128);
    if (mode.per_token) rows.scales.push_back(0.5f);
    if (mode.zero_points) rows.zero_points.push_back(127);
    if (mode.zero_points && mode.per_token) rows.zero_points.push_back(-128);
    this->ExpectExact(layer, rows, this->inline_);
  }
}

TYPED_TEST(OneDnnInt8Test, NoRowsIsNoWork) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const Layer layer = RandomLayer(rng, 16, 16, mode);
    const LinearPlan plan = PlanOf<TypeParam>(layer);
    EXPECT_EQ(*plan.WorkspaceBytes(0, 1), 0);
    const Rows none = RandomRows(rng, 0, layer);
    EXPECT_TRUE(RunRows<TypeParam>(plan, none, this->inline_).empty());
  }
}

TYPED_TEST(OneDnnInt8Test, UsesNoReferenceKernel) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const LinearPlan plan = PlanOf<TypeParam>(RandomLayer(rng, 256, 128, mode));
    for (const int64_t m : {1, 100, 256}) {
      EXPECT_FALSE(absl::StartsWith(plan.Explain(m), "onednn ref"))
          << plan.Explain(m);
    }
    if (mode.bias && mode.per_channel) {
      std::cout << mode << ": " << plan.Explain(16) << "\n";
    }
  }
}

// The epilogue of sums that oneDNN computes, on every instruction set of ours.
class OneDnnInt8EpilogueTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(OneDnnInt8EpilogueTest);

TEST_P(OneDnnInt8EpilogueTest, IsExactAtEveryRemainder) {
  TestRng rng;
  InlineExecutor executor;
  for (const Mode& mode : AllModes()) {
    if (!mode.per_token) continue;
    for (const int64_t n : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33}) {
      Layer layer = RandomLayer(rng, n, 60, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, 3, layer);
      MakeExact(rng, rows);
      const LinearPlan plan = PlanOf<float>(layer);
      const std::string text = plan.Explain(3);
      const std::string before = ", epilogue ";
      const size_t at = text.find(before) + before.size();
      EXPECT_TRUE(RanOn(text.substr(at, text.find(';') - at))) << text;
      EXPECT_TRUE(AllEqual(RunRows<float>(plan, rows, executor, 1),
                           Reference(layer, rows).values))
          << n;
    }
  }
}

}  // namespace
}  // namespace quern
