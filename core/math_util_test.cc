#include "quern/core/math_util.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace quern {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(MathUtilTest, DividesUp) {
  EXPECT_EQ(DivCeil(0, 16), 0);
  EXPECT_EQ(DivCeil(1, 16), 1);
  EXPECT_EQ(DivCeil(16, 16), 1);
  EXPECT_EQ(DivCeil(17, 16), 2);
  EXPECT_EQ(DivCeil(kMax, 1), kMax);
  EXPECT_EQ(DivCeil(kMax, 2), kMax / 2 + 1);  // kMax is odd
  EXPECT_EQ(DivCeil(kMax - 1, kMax), 1);
}

TEST(MathUtilTest, RoundsUp) {
  EXPECT_EQ(RoundUp(0, 64), 0);
  EXPECT_EQ(RoundUp(1, 64), 64);
  EXPECT_EQ(RoundUp(64, 64), 64);
  EXPECT_EQ(RoundUp(65, 3), 66);
}

TEST(MathUtilTest, ReportsOverflow) {
  int64_t result = 0;
  EXPECT_TRUE(CheckedMul(1 << 20, 1 << 20, &result));
  EXPECT_EQ(result, int64_t{1} << 40);
  EXPECT_TRUE(CheckedMul(-3, 7, &result));
  EXPECT_EQ(result, -21);
  EXPECT_FALSE(CheckedMul(int64_t{1} << 32, int64_t{1} << 31, &result));
  EXPECT_FALSE(CheckedMul(std::numeric_limits<int64_t>::min(), -1, &result));
  EXPECT_TRUE(CheckedAdd(kMax - 1, 1, &result));
  EXPECT_EQ(result, kMax);
  EXPECT_FALSE(CheckedAdd(kMax, 1, &result));
}

}  // namespace
}  // namespace quern
