#include "quant/int8_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gtest/gtest.h"
#include "hwy/base.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"
#include "testing/reference_int8_quantize.h"
#include "testing/workers.h"

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

namespace quern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr auto kPerToken = Int8Granularity::kPerToken;
constexpr auto kPerTensor = Int8Granularity::kPerTensor;
constexpr auto kNone = Int8ZeroPoint::kNone;
constexpr auto kUsed = Int8ZeroPoint::kUsed;

// What quantising a row gives.
struct Row {
  float scale;
  int32_t zero_point;
  std::vector<int8_t> q;
};

bool SameBits(float a, float b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 ||
         (std::isnan(a) && std::isnan(b));
}

// The header's formulas, operation by operation.
Row Formula(const Int8QuantizeSpec& spec, const std::vector<float>& x) {
  Row row = {spec.scale, spec.zero_point, {}};
  if (spec.granularity == kPerToken) {
    float min = 0, max = 0;
    bool finite = true;
    for (float v : x) {
      finite = finite && std::isfinite(v);
      if (std::abs(v) < 0x1p-126f) v = 0;
      if (spec.zero_points == kNone) v = std::abs(v);
      min = std::min(min, v);
      max = std::max(max, v);
    }
    if (!finite) return {kNan, 0, std::vector<int8_t>(x.size(), 0)};
    if (min == 0 && max == 0) return {1, 0, std::vector<int8_t>(x.size(), 0)};
    row.scale =
        spec.zero_points == kNone
            ? max / 127.0f
            : static_cast<float>((static_cast<double>(max) - min) / 255.0);
    row.scale = std::max(row.scale, 0x1p-125f);
    if (spec.zero_points == kUsed) {
      const double steps = static_cast<double>(min) * (1.0f / row.scale);
      row.zero_point = static_cast<int32_t>(-128 - std::nearbyint(steps));
    }
  }
  const float inverse = 1.0f / row.scale;
  for (const float v : x) {
    const double steps = static_cast<double>(v) * inverse;  // exact
    const double code = std::isnan(steps)
                            ? row.zero_point
                            : std::nearbyint(steps) + row.zero_point;
    row.q.push_back(static_cast<int8_t>(std::clamp(code, -128.0, 127.0)));
  }
  return row;
}

// Per token and per tensor, without and with zero points.
std::vector<Int8QuantizeSpec> AllModes(DType dtype) {
  std::vector<Int8QuantizeSpec> specs(4);
  for (Int8QuantizeSpec& spec : specs) spec.dtype = dtype;
  specs[1].zero_points = specs[3].zero_points = kUsed;
  specs[2].granularity = specs[3].granularity = kPerTensor;
  specs[2].scale = 0.0213f;  // clamps some of what RandomValues gives
  specs[3].scale = 0.0371f;
  specs[3].zero_point = -37;
  return specs;
}

std::vector<float> RandomValues(int64_t count, double scale = 1,
                                double shift = 0) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::normal_distribution<double> normal(shift, 1);
  std::vector<float> x;
  for (int64_t i = 0; i < count; ++i) {
    x.push_back(static_cast<float>(normal(random) * scale));
  }
  return x;
}

template <typename T>
std::vector<T> RoundedTo(const std::vector<float>& x) {
  std::vector<T> rounded;
  for (const float v : x) rounded.push_back(FromDouble<T>(v));
  return rounded;
}

class Int8QuantizeTest : public IsaTest {
 protected:
  Int8QuantizePlan Plan(const Int8QuantizeSpec& spec) {
    const auto plan = Int8QuantizePlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }

  // x[m, k] with `slack` between rows, by all three functions, each buffer up
  // to a page that may not be touched; expected to agree with each other.
  template <typename T>
  std::vector<Row> Run(const Int8QuantizeSpec& spec,
                       const std::vector<float>& x, int64_t m, int64_t k,
                       int64_t slack, Executor& executor) {
    const Int8QuantizePlan plan = Plan(spec);
    const bool scaled = spec.granularity == kPerToken;
    const bool shifted = scaled && spec.zero_points == kUsed;
    const StridedMatrix<T> in(RoundedTo<T>(x), m, k, k + slack, Edge::kEnd,
                              slack);
    StridedMatrix<int8_t> out(m, k, k + 2 * slack, Edge::kEnd, 3 * slack);
    GuardBuffer<float> scales(scaled ? m : 0);
    GuardBuffer<int32_t> zeros(shifted ? m : 0);
    const absl::Status status =
        plan.CheckArgs(in.view(), out.view(), scales.view(), zeros.view());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_NO_ALLOCATION(plan.Execute(in.view(), out.view(), scales.view(),
                                      zeros.view(), executor));
    std::vector<Row> rows;
    for (int64_t i = 0; i < m; ++i) {
      const int8_t* q = out.view().Row(i);
      rows.push_back({scaled ? scales[i] : spec.scale,
                      shifted ? zeros[i] : spec.zero_point,
                      std::vector<int8_t>(q, q + k)});
      const GuardBuffer<T> row(
          std::vector<T>(in.view().Row(i), in.view().Row(i) + k), Edge::kBegin,
          slack);
      GuardBuffer<int8_t> row_q(k, Edge::kBegin, slack);
      GuardBuffer<uint8_t> row_u(k, Edge::kEnd, slack);
      float scale = -1, scale_u = -1;
      int32_t zero = 99, zero_u = 99;
      EXPECT_NO_ALLOCATION(
          plan.QuantizeRow(row.data(), k, row_q.data(), &scale, &zero);
          plan.QuantizeRowU8(row.data(), k, row_u.data(), &scale_u, &zero_u));
      EXPECT_EQ(row_q.ToVector(), rows.back().q);
      EXPECT_TRUE(SameBits(scale, rows.back().scale));
      EXPECT_TRUE(SameBits(scale_u, rows.back().scale));
      EXPECT_EQ(zero, rows.back().zero_point);
      EXPECT_EQ(zero_u, rows.back().zero_point);
      for (int64_t j = 0; j < k; ++j) {
        EXPECT_EQ(int{row_u[j]} - 128, int{row_q[j]}) << "column " << j;
      }
    }
    return rows;
  }

  // One row.
  template <typename T = float>
  Row RunRow(const Int8QuantizeSpec& spec, const std::vector<float>& x) {
    return Run<T>(spec, x, 1, static_cast<int64_t>(x.size()), 0,
                  inline_executor_)[0];
  }

  template <typename T>
  void ExpectFormula(const Int8QuantizeSpec& spec, const std::vector<float>& x,
                     int64_t m, int64_t k, int64_t slack, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(spec.dtype) << " m=" << m << " k=" << k
                 << " slack=" << slack << " per token "
                 << (spec.granularity == kPerToken) << " zero points "
                 << (spec.zero_points == kUsed));
    const std::vector<Row> rows = Run<T>(spec, x, m, k, slack, executor);
    for (int64_t i = 0; i < m; ++i) {
      std::vector<float> values;
      for (int64_t j = 0; j < k; ++j) {
        const T rounded = FromDouble<T>(x[static_cast<size_t>(i * k + j)]);
        values.push_back(static_cast<float>(ToDouble(rounded)));
      }
      const Row want = Formula(spec, values);
      const Row& got = rows[static_cast<size_t>(i)];
      ASSERT_TRUE(SameBits(got.scale, want.scale))
          << "row " << i << ": " << got.scale << ", not " << want.scale;
      ASSERT_EQ(got.zero_point, want.zero_point) << "row " << i;
      ASSERT_EQ(got.q, want.q) << "row " << i;
    }
  }

  InlineExecutor inline_executor_;
};
QUERN_INSTANTIATE_ISA_TEST(Int8QuantizeTest);

TEST_P(Int8QuantizeTest, FollowsTheFormulaOnEveryRemainder) {
  int64_t slack = 0;
  for (const int64_t k :
       {1,  2,  3,  5,   8,   15,  16,  17,  31,  33,  47,  63,
        64, 65, 96, 127, 128, 129, 191, 255, 257, 521, 1031}) {
    for (const auto stores :
         {Int8QuantizeStores::kCached, Int8QuantizeStores::kStream}) {
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

TEST_P(Int8QuantizeTest, ZeroHasACodeAndZeroRowsAreExact) {
  for (const Int8ZeroPoint zero_points : {kNone, kUsed}) {
    Int8QuantizeSpec spec;
    spec.dtype = DType::kF32;
    spec.zero_points = zero_points;
    for (const size_t k : {1u, 70u}) {
      for (const float zero : {0.0f, -0.0f, 0x1p-149f, -0x1.fffffcp-127f}) {
        const Row row = RunRow(spec, std::vector<float>(k, zero));
        EXPECT_EQ(row.scale, 1.0f);
        EXPECT_EQ(row.zero_point, 0);
        EXPECT_EQ(row.q, std::vector<int8_t>(k, 0));
      }
    }
    for (const float other : {5.0f, -5.0f, 1e-36f, kMax}) {
      const Row row = RunRow(spec, {-0.0f, other, 0.0f});
      EXPECT_EQ(row.q[0], row.zero_point);
      EXPECT_EQ(row.q[2], row.zero_point);
    }
  }
}

TEST_P(Int8QuantizeTest, ConstantRowsComeBack) {
  for (const Int8ZeroPoint zero_points : {kNone, kUsed}) {
    Int8QuantizeSpec spec;
    spec.dtype = DType::kF32;
    spec.zero_points = zero_points;
    for (const float c : {1.0f, -1.0f, 0.3f, -17.77f, 1e-35f, kMax, -kMax}) {
      for (const size_t k : {1u, 70u}) {
        const Row row = RunRow(spec, std::vector<float>(k, c));
        const int steps = zero_points == kNone ? 127 : 255;
        for (const int8_t q : row.q) {
          ASSERT_EQ(q - row.zero_point, c > 0 ? steps : -steps) << c;
        }
        EXPECT_NEAR(double{row.scale} * steps, std::abs(c),
                    0x1p-23 * std::abs(c));
      }
    }
  }
}

TEST_P(Int8QuantizeTest, RangesBeyondF32DoNotOverflow) {
  Int8QuantizeSpec spec;
  spec.dtype = DType::kF32;
  spec.zero_points = kUsed;
  const Row row = RunRow(spec, {kMax, -kMax, 0});
  EXPECT_EQ(row.scale, static_cast<float>(2.0 * kMax / 255.0));
  EXPECT_EQ(row.q[1], -128);
  EXPECT_EQ(row.q[0], 127);
  EXPECT_EQ(row.q[2], row.zero_point);
}

// Where 1 / s would overflow.
TEST_P(Int8QuantizeTest, TinyRowsHaveTheSmallestScale) {
  for (const Int8ZeroPoint zero_points : {kNone, kUsed}) {
    Int8QuantizeSpec spec;
    spec.dtype = DType::kF32;
    spec.zero_points = zero_points;
    const float step = Int8QuantizePlan::kMinScale;
    const Row row = RunRow(
        spec, {3 * step, -7 * step, 0x1p-126f, 0x1.8p-126f, 0x1p-140f, 0});
    EXPECT_EQ(row.scale, step);
    const int z = row.zero_point;
    EXPECT_EQ(z, zero_points == kNone ? 0 : -121);
    std::vector<int> steps;
    for (const int8_t q : row.q) steps.push_back(q - z);
    EXPECT_EQ(steps, (std::vector<int>{3, -7, 0, 1, 0, 0}));
  }
}

TEST_P(Int8QuantizeTest, ARowThatIsNotFiniteIsNanAloneAndAtAnyPlace) {
  constexpr int64_t kCols = 141;
  for (const Int8ZeroPoint zero_points : {kNone, kUsed}) {
    Int8QuantizeSpec spec;
    spec.dtype = DType::kBF16;
    spec.zero_points = zero_points;
    for (const float bad : {kInf, -kInf, kNan, -kNan}) {
      std::vector<float> x(kCols * (kCols + 1), 1.5f);
      for (size_t i = 0; i < kCols; ++i) x[i * kCols + i] = bad;
      const auto rows =
          Run<BFloat16>(spec, x, kCols + 1, kCols, 0, inline_executor_);
      for (size_t i = 0; i < kCols; ++i) {
        ASSERT_TRUE(std::isnan(rows[i].scale)) << "row " << i;
        ASSERT_EQ(rows[i].zero_point, 0);
        ASSERT_EQ(rows[i].q, std::vector<int8_t>(kCols, 0));
      }
      EXPECT_TRUE(std::isfinite(rows[kCols].scale));
    }
  }
}

TEST_P(Int8QuantizeTest, AScaleOfTheSpecSaturates) {
  for (const int32_t z : {0, -128, 127, 5}) {
    Int8QuantizeSpec spec;
    spec.dtype = DType::kF32;
    spec.granularity = kPerTensor;
    spec.zero_points = z == 0 ? kNone : kUsed;
    spec.scale = 0.5f;
    spec.zero_point = z;
    std::vector<float> x;
    std::vector<int8_t> want;
    // In whole vectors and in the tail.
    for (int i = 0; i < 9; ++i) {
      for (const float v :
           {kInf, -kInf, kNan, -kNan, kMax, -kMax, 1e10f, -1e10f, 3e4f, -3e4f,
            64.0f, -64.0f, 63.5f, 0.25f, 0.75f, -0.25f, 0x1p-149f}) {
        x.push_back(v);
        want.push_back(
            static_cast<int8_t>(ReferenceInt8Code(v, spec.scale, z)));
      }
    }
    EXPECT_EQ(RunRow(spec, x).q, want) << "zero point " << z;
    for (const float scale :
         {Int8QuantizePlan::kMinScale, Int8QuantizePlan::kMaxScale}) {
      spec.scale = scale;
      ExpectFormula<float>(spec, x, 1, static_cast<int64_t>(x.size()), 0,
                           inline_executor_);
    }
  }
}

#if HWY_ARCH_X86
TEST_P(Int8QuantizeTest, DoesNotDependOnFlushToZero) {
  std::vector<float> x = {0x1p-149f, -0x1.fp-127f, 0x1p-126f, 0x1.8p-126f};
  for (const float large : {0.0f, 0x1p-126f, 0x1p-125f, 0x1p-120f, 0x1p-118f}) {
    x.push_back(large);
    for (const Int8QuantizeSpec& spec : AllModes(DType::kF32)) {
      const Int8QuantizePlan plan = Plan(spec);
      const Row want = RunRow(spec, x);
      Row got = {0, 0, std::vector<int8_t>(x.size())};
      const unsigned before = _mm_getcsr();
      _mm_setcsr(before | 0x8040);  // FTZ and DAZ
      plan.QuantizeRow(x.data(), static_cast<int64_t>(x.size()), got.q.data(),
                       &got.scale, &got.zero_point);
      _mm_setcsr(before);
      EXPECT_TRUE(SameBits(got.scale, want.scale)) << large;
      EXPECT_EQ(got.zero_point, want.zero_point) << large;
      EXPECT_EQ(got.q, want.q) << large;
    }
  }
}
#endif  // HWY_ARCH_X86

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
