#include "quern/testing/compare.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

bool Close(std::vector<float> actual, std::vector<float> expected, double tol) {
  const auto n = static_cast<int64_t>(actual.size());
  const bool flat = static_cast<bool>(AllClose(actual, expected, tol));
  const bool matrix = static_cast<bool>(
      AllClose(DenseMatrix(actual.data(), 1, n),
               DenseMatrix<const float>(expected.data(), 1, n), tol));
  EXPECT_EQ(flat, matrix);
  return flat;
}

// Each of these slipped past a comparator in a well-known kernel library.
TEST(AllCloseTest, RejectsNan) { EXPECT_FALSE(Close({NAN}, {1}, 0.1)); }
TEST(AllCloseTest, RejectsFiniteWhereNanIsExpected) {
  EXPECT_FALSE(Close({1}, {NAN}, 0.1));
}
TEST(AllCloseTest, RejectsAWrongNegative) {
  EXPECT_FALSE(Close({-5}, {-10}, 0.1));
}
TEST(AllCloseTest, RejectsTheWrongSign) {
  EXPECT_FALSE(Close({-0.25f}, {0.25f}, 0.1));
}
TEST(AllCloseTest, RejectsNonzeroWhereZeroIsExpected) {
  EXPECT_FALSE(Close({3}, {0}, 0.1));
}
TEST(AllCloseTest, RejectsZeroWhereNonzeroIsExpected) {
  EXPECT_FALSE(Close({0}, {3}, 0.1));
}
TEST(AllCloseTest, RejectsOneWrongTailElement) {
  std::vector<float> actual(1000, 1.0f), expected(1000, 1.0f);
  actual.back() = 2.0f;
  EXPECT_FALSE(Close(actual, expected, 0.1));
}
TEST(AllCloseTest, RejectsOneWrongFirstElement) {
  std::vector<float> actual(1000, 1.0f), expected(1000, 1.0f);
  actual.front() = 2.0f;
  EXPECT_FALSE(Close(actual, expected, 0.1));
}
TEST(AllCloseTest, RejectsOppositeInfinities) {
  EXPECT_FALSE(Close({INFINITY}, {-INFINITY}, 1e30));
}
TEST(AllCloseTest, RejectsAnInfinityForALargeNumber) {
  EXPECT_FALSE(Close({INFINITY}, {3e38f}, 1e300));
  EXPECT_FALSE(Close({3e38f}, {INFINITY}, 1e300));
}
TEST(AllCloseTest, RejectsABoundThatIsNoNumber) {
  EXPECT_FALSE(Close({1}, {1}, NAN));
  EXPECT_FALSE(Close({1}, {1}, INFINITY));
  EXPECT_FALSE(Close({1}, {1}, -1.0));
}
TEST(AllCloseTest, AcceptsEqualSpecials) {
  EXPECT_TRUE(Close({NAN, INFINITY, -0.0f}, {NAN, INFINITY, 0.0f}, 0));
}
TEST(AllCloseTest, AcceptsTheBoundItself) {
  EXPECT_TRUE(Close({1.5f}, {1.0f}, 0.5));
  EXPECT_FALSE(Close({1.5f}, {1.0f}, 0.49999));
}
TEST(AllCloseTest, AcceptsTwoEmptyOnes) {
  EXPECT_TRUE(Close({}, {}, 0));
  EXPECT_TRUE(AllClose(DenseMatrix<const float>(nullptr, 0, 5),
                       DenseMatrix<const float>(nullptr, 0, 5), 0.0));
}

TEST(AllCloseTest, RejectsOtherShapesOfTheSameSize) {
  const std::vector<float> v(6, 1.0f);
  const auto result =
      AllClose(DenseMatrix(v.data(), 2, 3), DenseMatrix(v.data(), 3, 2), 1.0);
  EXPECT_FALSE(result);
  EXPECT_STREQ(result.message(),
               "shapes differ: expected [3, 2], actual [2, 3]; tolerance 1");
  EXPECT_FALSE(AllClose(v, std::vector<float>(5, 1.0f), 1.0));
}

TEST(AllCloseTest, HonoursTheStridesOfBoth) {
  const std::vector<float> padded = {1, 2, NAN, 3, 4, NAN};
  const std::vector<double> dense = {1, 2, 3, 4};
  EXPECT_TRUE(AllClose(MatrixView<const float>(padded.data(), {2, 2}, {3, 1}),
                       DenseMatrix(dense.data(), 2, 2), 0.0));
}

TEST(AllCloseTest, NamesTheWorstElement) {
  std::vector<float> actual(12, 1.0f);
  actual[5] = 1.5f;
  actual[7] = -3.0f;
  const std::vector<float> expected(12, 1.0f);
  const auto result = AllClose(DenseMatrix(actual.data(), 3, 4),
                               DenseMatrix(expected.data(), 3, 4), 0.25);
  EXPECT_STREQ(result.message(),
               "2 of 12 elements are farther from the expected value than "
               "their bound; worst at [1, 3]: expected 1, actual -3 "
               "(difference -4); tolerance 0.25");
}

TEST(AllCloseTest, NanIsWorseThanAnyNumber) {
  const auto result =
      AllClose(std::vector<float>{9, NAN, 7}, std::vector<float>{0, 0, 0}, 0.0);
  EXPECT_NE(std::string(result.message()).find("worst at [1]"),
            std::string::npos);
}

TEST(AllCloseTest, ReadsSixteenAndEightBitFloats) {
  const std::vector<double> want = {1.0, -0.5, INFINITY};
  std::vector<BFloat16> bf16;
  std::vector<Float16> f16;
  std::vector<Float8E5M2> f8;
  for (const double x : want) {
    bf16.push_back(FromDouble<BFloat16>(x));
    f16.push_back(FromDouble<Float16>(x));
    f8.push_back(FromDouble<Float8E5M2>(x));
  }
  EXPECT_TRUE(AllClose(bf16, want, 0.0));
  EXPECT_TRUE(AllClose(f16, want, 0.0));
  EXPECT_TRUE(AllClose(f8, want, 0.0));
  bf16[1] = FromDouble<BFloat16>(0.5);
  f16[2] = FromDouble<Float16>(-INFINITY);
  f8[0] = FromDouble<Float8E5M2>(NAN);
  EXPECT_FALSE(AllClose(bf16, want, 0.5));
  EXPECT_FALSE(AllClose(f16, want, 0.5));
  EXPECT_FALSE(AllClose(f8, want, 0.5));
}

TEST(AllWithinTest, AppliesTheBoundOfEachElement) {
  const std::vector<float> actual = {1.1f, 100.0f}, expected = {1.0f, 101.0f};
  const auto relative = [](double e, int64_t) { return 0.02 * std::abs(e); };
  EXPECT_FALSE(AllWithin(actual, expected, relative));
  const auto by_index = [](double, int64_t i) { return i == 0 ? 0.2 : 1.0; };
  EXPECT_TRUE(AllWithin(actual, expected, by_index));
}

TEST(AllEqualTest, RejectsSaturation) {
  // 2 * 127 * 127: what a saturating 16-bit step makes of it differs.
  const std::vector<int32_t> expected = {32258};
  EXPECT_FALSE(AllEqual(std::vector<int32_t>{255}, expected));
  EXPECT_FALSE(AllEqual(std::vector<int32_t>{32257}, expected));
  EXPECT_TRUE(AllEqual(std::vector<int32_t>{32258}, expected));
}
TEST(AllEqualTest, SeesTheLowBitOfTheLargestIntegers) {
  const int32_t max = std::numeric_limits<int32_t>::max();
  EXPECT_FALSE(AllEqual(std::vector<int32_t>{max - 1}, std::vector{max}));
  EXPECT_FALSE(AllEqual(std::vector<int32_t>{-max - 1}, std::vector{max}));
}
TEST(AllEqualTest, PrintsTheWorstInteger) {
  const auto result =
      AllEqual(std::vector<int8_t>{1, 2, -128}, std::vector<int8_t>{1, 3, 127});
  EXPECT_STREQ(result.message(),
               "2 of 3 elements are not equal; worst at [2]: expected 127, "
               "actual -128 (difference -255)");
}
TEST(AllEqualTest, TakesSpans) {
  const std::vector<uint8_t> v = {1, 2, 3};
  EXPECT_TRUE(AllEqual(absl::MakeConstSpan(v).subspan(1), std::vector{2, 3}));
}

TEST(AllBitsEqualTest, TellsZerosAndNansApart) {
  EXPECT_FALSE(
      AllBitsEqual(std::vector<float>{-0.0f}, std::vector<float>{0.0f}));
  EXPECT_FALSE(AllBitsEqual(std::vector{FromBits<float>(0x7fc00001u)},
                            std::vector{FromBits<float>(0x7fc00000u)}));
  EXPECT_TRUE(AllBitsEqual(std::vector{FromBits<float>(0x7fc00001u)},
                           std::vector{FromBits<float>(0x7fc00001u)}));
}

TEST(MeanErrorTest, RejectsTruncationThatEveryBoundPerElementAllows) {
  std::vector<double> exact;
  std::vector<BFloat16> rounded, truncated;
  for (int i = 0; i < 1000; ++i) {
    const double x = 1.0 + i / 1000.0;
    exact.push_back(x);
    rounded.push_back(FromDouble<BFloat16>(x));
    truncated.push_back(
        FromBits<BFloat16>(BitsOf(static_cast<float>(x)) >> 16));
  }
  const double ulp = 2 * RoundingBound<BFloat16>(1.0);
  EXPECT_TRUE(AllClose(truncated, exact, ulp));
  const double bound = UnbiasedMeanBound(ulp / 2, 1000);
  EXPECT_TRUE(MeanErrorWithin(rounded, exact, bound));
  EXPECT_FALSE(MeanErrorWithin(truncated, exact, bound));
}
TEST(MeanErrorTest, RejectsSpecialsAndOtherShapes) {
  EXPECT_FALSE(MeanErrorWithin(std::vector<float>{NAN, 1},
                               std::vector<float>{1, 1}, 1e30));
  EXPECT_FALSE(
      MeanErrorWithin(std::vector<float>{1}, std::vector<float>{1, 1}, 1e30));
  EXPECT_TRUE(MeanErrorWithin(std::vector<float>{NAN, INFINITY},
                              std::vector<float>{NAN, INFINITY}, 0));
}

TEST(DotToleranceTest, GrowsWithTheSquareOfTheLength) {
  EXPECT_DOUBLE_EQ(DotTolerance(10, 2, 3, 0.5, 0.25), 60 * (5 + 0.25));
  EXPECT_EQ(DotTolerance(0, 2, 3, 0.5, 0.25), 0);
}

}  // namespace
}  // namespace quern
