// quant/int8_quantize.h, of what is not an ordinary number.

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/quant/int8_quantize.h"
#include "quern/quant/int8_quantize_testutil.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_int8_quantize.h"

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

namespace quern {
namespace {

class Int8QuantizeSpecialsTest : public Int8QuantizeTest {};
QUERN_INSTANTIATE_ISA_TEST(Int8QuantizeSpecialsTest);

TEST_P(Int8QuantizeSpecialsTest, ZeroHasACodeAndZeroRowsAreExact) {
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

TEST_P(Int8QuantizeSpecialsTest, ConstantRowsComeBack) {
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

TEST_P(Int8QuantizeSpecialsTest, RangesBeyondF32DoNotOverflow) {
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
TEST_P(Int8QuantizeSpecialsTest, TinyRowsHaveTheSmallestScale) {
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

TEST_P(Int8QuantizeSpecialsTest, ARowThatIsNotFiniteIsNanAloneAndAtAnyPlace) {
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

TEST_P(Int8QuantizeSpecialsTest, AScaleOfTheSpecSaturates) {
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
TEST_P(Int8QuantizeSpecialsTest, DoesNotDependOnFlushToZero) {
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

}  // namespace
}  // namespace quern
