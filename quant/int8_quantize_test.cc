#include "quern/quant/int8_quantize.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/int8_quantize_testutil.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_int8_quantize.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

QUERN_INSTANTIATE_ISA_TEST(Int8QuantizeTest);

TEST_P(Int8QuantizeTest, FollowsTheFormulaOnEveryRemainder) {
  int64_t slack = 0;
  for (const int64_t k :
       {1,  2,  3,  5,   8,   15,  16,  17,  31,  33,  47,  63,
        64, 65, 96, 127, 128, 129, 191, 255, 257, 521, 1031}) {
    for (const auto stores : {Stores::kCached, Stores::kStream}) {
      slack = (slack + 1) % 7;
      const auto x = RandomValues(3 * k);
      for (Int8QuantizeSpec spec : AllModes(DType::kF32)) {
        spec.stores = stores;
        ExpectFormula<float>(spec, x, 3, k, slack, inline_executor_);
        spec.dtype = DType::kBF16;
        ExpectFormula<BFloat16>(spec, x, 3, k, slack, inline_executor_);
        spec.dtype = DType::kF16;
        ExpectFormula<Float16>(spec, x, 3, k, slack, inline_executor_);
      }
    }
  }
}

// The largest and the smallest element, wherever they are, decide.
TEST_P(Int8QuantizeTest, SeesEveryElement) {
  constexpr int64_t kCols = 300;
  for (const Int8QuantizeSpec& spec : AllModes(DType::kBF16)) {
    if (spec.granularity == kPerTensor) continue;
    std::vector<float> x(kCols * kCols, 0.25f);
    for (int64_t i = 0; i < kCols; ++i) {
      x[static_cast<size_t>(i * kCols + i)] = i % 2 == 0 ? 3.0f : -3.0f;
    }
    ExpectFormula<BFloat16>(spec, x, kCols, kCols, 0, inline_executor_);
  }
}

// Scales that are powers of two: codes are known without arithmetic.
TEST_P(Int8QuantizeTest, IsExactAndTiesGoToEven) {
  std::vector<float> halves;  // -127, -126.5, ... 127
  std::vector<int8_t> want;
  for (int n = -254; n <= 254; ++n) {
    halves.push_back(static_cast<float>(n) / 2);
    const int down = (n - (n & 1)) / 2;  // floor
    want.push_back(static_cast<int8_t>((n & 1) == 0    ? n / 2
                                       : down % 2 == 0 ? down
                                                       : down + 1));
  }
  Int8QuantizeSpec symmetric, asymmetric;
  symmetric.dtype = asymmetric.dtype = DType::kF32;
  asymmetric.zero_points = kUsed;
  for (const int exponent : {-120, -20, 0, 3, 120}) {
    std::vector<float> x, y;
    std::vector<int8_t> want_y;
    for (size_t i = 0; i < halves.size(); ++i) {
      x.push_back(std::ldexp(halves[i], exponent));
      // [-100, 155] in steps of 1/2: 28 more codes above than below 0.
      y.push_back(std::ldexp(halves[i] + 28, exponent));
      want_y.push_back(want[i]);
    }
    y.push_back(std::ldexp(-100.0f, exponent));
    want_y.push_back(-128);
    const Row row = RunRow(symmetric, x);
    EXPECT_EQ(row.scale, std::ldexp(1.0f, exponent));
    EXPECT_EQ(row.q, want);
    const Row other = RunRow(asymmetric, y);
    EXPECT_EQ(other.scale, std::ldexp(1.0f, exponent));
    EXPECT_EQ(other.zero_point, -28);
    EXPECT_EQ(other.q, want_y);
  }
}

// Against real arithmetic, from the smallest scales to the largest.
TEST_P(Int8QuantizeTest, StaysWithinTheBoundsOfTheHeader) {
  for (const double scale : {1e-34, 1e-20, 1e-3, 1.0, 7e4, 1e20, 6e37}) {
    for (const double shift : {0.0, 0.7, -4.0}) {
      const std::vector<float> x = RandomValues(777, scale / 8, shift);
      const std::vector<double> reals(x.begin(), x.end());
      Int8QuantizeSpec spec;
      spec.dtype = DType::kF32;
      const Row row = RunRow(spec, x);
      const auto want = ReferenceInt8Symmetric(reals);
      EXPECT_LE(std::abs(row.scale - want.scale), 0x1p-24 * want.scale);
      spec.zero_points = kUsed;
      const Row shifted = RunRow(spec, x);
      const auto want_shifted = ReferenceInt8Asymmetric(reals);
      EXPECT_LE(std::abs(shifted.scale - want_shifted.scale),
                0x1.01p-24 * want_shifted.scale);
      EXPECT_LE(std::abs(shifted.zero_point - want_shifted.exact_zero_point),
                0.5 + 0x1p-15);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_LE(std::abs(reals[i] / row.scale - row.q[i]), 0.5 + 0x1p-16);
        ASSERT_GE(row.q[i], -127);
        ASSERT_LE(std::abs(reals[i] / shifted.scale -
                           (shifted.q[i] - shifted.zero_point)),
                  0.5 + 0x1p-15);
      }
    }
  }
}

TEST_P(Int8QuantizeTest, DoesNotDependOnTheWorkers) {
  const auto executor = Workers(3);
  const std::vector<float> x = RandomValues(301 * 1000);
  for (const Int8QuantizeSpec& spec : AllModes(DType::kBF16)) {
    ExpectFormula<BFloat16>(spec, x, 301, 1000, 3, *executor);
  }
}

// A row that is alone has no next one: its stride is not used, not even in a
// product that would overflow.
TEST_P(Int8QuantizeTest, IgnoresTheRowStrideOfOneRow) {
  const std::vector<float> x = RandomValues(40);
  for (const Int8QuantizeSpec& spec : AllModes(DType::kF32)) {
    const Int8QuantizePlan plan = Plan(spec);
    const bool per_token = spec.granularity == kPerToken;
    const bool zeros = per_token && spec.zero_points == kUsed;
    const Row want = Formula(spec, x);
    Row got = {0, 0, std::vector<int8_t>(x.size())};
    constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
    const MatrixView<const float> in(x.data(), {1, 40}, {kHuge, 1});
    const MatrixView<int8_t> q(got.q.data(), {1, 40}, {-kHuge, 1});
    const auto scales = DenseVector(&got.scale, per_token ? 1 : 0);
    const auto zero_points = DenseVector(&got.zero_point, zeros ? 1 : 0);
    ASSERT_TRUE(plan.CheckArgs(in, q, scales, zero_points).ok());
    plan.Execute(in, q, scales, zero_points, inline_executor_);
    EXPECT_EQ(got.q, want.q);
  }
}

TEST_P(Int8QuantizeTest, OfNothingIsNothing) {
  for (const Int8QuantizeSpec& spec : AllModes(DType::kF32)) {
    ExpectFormula<float>(spec, {}, 0, 7, 0, inline_executor_);
    ExpectFormula<float>(spec, {}, 0, 0, 0, inline_executor_);
    ExpectFormula<float>(spec, {}, 3, 0, 2, inline_executor_);
  }
}

}  // namespace
}  // namespace quern
