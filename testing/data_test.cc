#include "quern/testing/data.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

TEST(RngTest, IsTheSameOnEveryPlatform) {
  Rng rng(1234567);  // the published sequence of SplitMix64
  EXPECT_EQ(rng.Next(), 6457827717110365317u);
  EXPECT_EQ(rng.Next(), 3203168211198807973u);
  EXPECT_EQ(rng.Next(), 9817491932198370423u);
}

TEST(RngTest, KeepsItsRanges) {
  Rng rng(1);
  int64_t seen[7] = {};
  double sum = 0.0;
  for (int i = 0; i < 70000; ++i) {
    const double x = rng.Uniform(-2, 3);
    ASSERT_LE(-2, x);
    ASSERT_LT(x, 3);
    sum += x;
    const int64_t n = rng.Integer(-3, 3);
    ASSERT_LE(-3, n);
    ASSERT_LE(n, 3);
    ++seen[n + 3];
  }
  EXPECT_NEAR(sum / 70000, 0.5, UnbiasedMeanBound(2.5, 70000));
  for (const int64_t count : seen) EXPECT_NEAR(count, 10000, 700);
  rng.Integer(std::numeric_limits<int64_t>::min(),
              std::numeric_limits<int64_t>::max());
  EXPECT_EQ(rng.Integer(5, 5), 5);
}

TEST(RngTest, ShufflesWithoutLoss) {
  Rng rng(2);
  std::vector<int> v = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int> shuffled = v;
  rng.Shuffle(shuffled);
  EXPECT_NE(shuffled, v);
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, v);
}

TEST(TestRngTest, DependsOnTheTestTheSeedAndTheStream) {
  if (std::getenv("QUERN_TEST_SEED") != nullptr) GTEST_SKIP() << "seed is set";
  EXPECT_EQ(TestName(), "TestRngTest.DependsOnTheTestTheSeedAndTheStream");
  const uint64_t here = TestRng().Next();
  EXPECT_EQ(here, TestRng().Next());
  EXPECT_NE(here, TestRng(1).Next());
  EXPECT_EQ(here, Rng(HashOf(TestName()) ^ BaseSeed()).Next());
  setenv("QUERN_TEST_SEED", "0x10", 1);
  EXPECT_EQ(BaseSeed(), 16u);
  EXPECT_NE(here, TestRng().Next());
  unsetenv("QUERN_TEST_SEED");
  EXPECT_NE(HashOf("A.B"), HashOf("B.A"));
}

TEST(TestRngTest, AFailureTellsHowToReplay) {
  EXPECT_NONFATAL_FAILURE(
      {
        TestRng rng;
        EXPECT_EQ(rng.Next(), 0u);
      },
      "--gtest_filter=TestRngTest.AFailureTellsHowToReplay");
}

TEST(DataTest, RealsAreValuesOfTheType) {
  TestRng rng;
  const auto reals = UniformReals<BFloat16>(rng, 1000, -4, 4);
  ASSERT_EQ(reals.size(), 1000u);
  EXPECT_TRUE(AllBitsEqual(RoundedTo<BFloat16>(ToDoubles(reals)), reals));
  for (const BFloat16 x : reals) EXPECT_LE(std::abs(ToDouble(x)), 4.0);
}

TEST(DataTest, SmallIntegersAreExactInEveryType) {
  TestRng a, b, c;
  const auto in_f32 = SmallIntegers<float>(a, 1000);
  EXPECT_TRUE(AllEqual(SmallIntegers<Float8E4M3>(b, 1000), in_f32));
  EXPECT_TRUE(AllEqual(SmallIntegers<int8_t>(c, 1000), in_f32));
  for (const float x : in_f32) EXPECT_EQ(x, std::round(x));
}

TEST(DataTest, ExtremesAreFiniteAndSpecialsAreNot) {
  for (const Float8E4M3 x : Extremes<Float8E4M3>()) {
    EXPECT_TRUE(std::isfinite(ToDouble(x)));
  }
  const auto f32 = ToDoubles(Extremes<float>());
  for (const double x :
       {3.4028234663852886e38, -3.4028234663852886e38, 1.401298464324817e-45,
        1.1754943508222875e-38, 1.0, 0.0}) {
    EXPECT_TRUE(std::find(f32.begin(), f32.end(), x) != f32.end()) << x;
  }
  const auto i8 = Extremes<int8_t>();
  EXPECT_TRUE(std::find(i8.begin(), i8.end(), -128) != i8.end());
  EXPECT_EQ(Specials<Float16>().size(), 4u);
  EXPECT_EQ(Specials<Float8E4M3>().size(), 2u);
  EXPECT_TRUE(Specials<uint8_t>().empty());
  for (const Float16 x : Specials<Float16>()) {
    EXPECT_FALSE(std::isfinite(ToDouble(x)));
  }
}

TEST(DataTest, ChoosesEachOfAFew) {
  TestRng rng;
  const auto v = ChosenFrom<int>(rng, 100, {1, 2, 3});
  for (const int x : {1, 2, 3}) {
    EXPECT_TRUE(std::find(v.begin(), v.end(), x) != v.end());
  }
}

}  // namespace
}  // namespace quern
