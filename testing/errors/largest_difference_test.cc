#include "quern/testing/errors/largest_difference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

TEST(LargestDifferenceTest, IsThatOfTheWorstElementWhereverItIs) {
  EXPECT_EQ(LargestDifferenceOf(Floats{1, 2, 3}, Doubles{1, 2, 3}), 0);
  EXPECT_EQ(LargestDifferenceOf(Floats{5, 2, 3}, Doubles{1, 2, 3}), 4);
  EXPECT_EQ(LargestDifferenceOf(Floats{1, -2, 3}, Doubles{1, 2, 2}), 4);
  EXPECT_EQ(LargestDifferenceOf(Floats{1, 2, 3}, Doubles{2, 2, -1}), 4);
  EXPECT_EQ(LargestDifferenceOf(Floats{-0.0f}, Doubles{0.0}), 0);
}

// The loops that this class replaced returned 0 for each of the first three,
// and std::max for all of them.
TEST(LargestDifferenceTest, NanAnywhereOnEitherSideIsInfinite) {
  const Doubles want = {1, 2, 3, 4};
  for (size_t at = 0; at < want.size(); ++at) {
    Doubles poisoned = want;
    poisoned[at] = NAN;
    EXPECT_EQ(LargestDifferenceOf(poisoned, want), kInfinite) << at;
    EXPECT_EQ(LargestDifferenceOf(want, poisoned), kInfinite) << at;
    EXPECT_EQ(LargestDifferenceOf(poisoned, poisoned), kInfinite) << at;
  }
  const Doubles all(4, NAN);
  EXPECT_EQ(LargestDifferenceOf(all, want), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(want, all), kInfinite);
}

TEST(LargestDifferenceTest, AnInfinityAnywhereOnEitherSideIsInfinite) {
  const Doubles want = {1, 2, 3};
  for (const double special : {kInfinite, -kInfinite}) {
    for (size_t at = 0; at < want.size(); ++at) {
      Doubles poisoned = want;
      poisoned[at] = special;
      EXPECT_EQ(LargestDifferenceOf(poisoned, want), kInfinite) << at;
      EXPECT_EQ(LargestDifferenceOf(want, poisoned), kInfinite) << at;
      EXPECT_EQ(LargestDifferenceOf(poisoned, poisoned), kInfinite) << at;
    }
  }
}

TEST(LargestDifferenceTest, OtherLengthsAreInfinite) {
  const Floats two = {1, 2}, three = {1, 2, 3}, none;
  EXPECT_EQ(LargestDifferenceOf(two, three), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(three, two), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(none, two), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(two, none), kInfinite);
  using Rows = std::vector<Floats>;
  EXPECT_EQ(LargestDifferenceOf(Rows{two, three}, Rows{three, two}), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Rows{two}, Rows{two, two}), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Rows{two, two}, Rows{two}), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Rows{two, none}, Rows{two, three}), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Rows{two, none}, Rows{two, none}), 0);
}

// A file of expected values that could not be read is not a success.
TEST(LargestDifferenceTest, NothingComparedIsInfinite) {
  EXPECT_EQ(LargestDifference().value(), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Floats(), Doubles()), kInfinite);
  using Rows = std::vector<Floats>;
  EXPECT_EQ(LargestDifferenceOf(Rows(), Rows()), kInfinite);
  EXPECT_EQ(LargestDifferenceOf(Rows(3), Rows(3)), kInfinite);
}

TEST(LargestDifferenceTest, MergedPartsAreAsOne) {
  const auto one = [](double actual, double expected) {
    LargestDifference worst;
    worst.Add(actual, expected);
    return worst;
  };
  LargestDifference worst;
  worst.Merge(LargestDifference());
  EXPECT_EQ(worst.value(), kInfinite);
  worst.Merge(one(1, 3));
  worst.Merge(one(2, 1));
  worst.Merge(LargestDifference());
  EXPECT_EQ(worst.count(), 2);
  EXPECT_EQ(worst.value(), 2);
  worst.Merge(one(NAN, 1));
  worst.Merge(one(1, 1));
  EXPECT_EQ(worst.value(), kInfinite);
}

TEST(LargestDifferenceTest, ReadsSixteenBitFloats) {
  const std::vector<BFloat16> half = {FromDouble<BFloat16>(0.5)};
  const std::vector<Float16> nan = {FromDouble<Float16>(NAN)};
  EXPECT_EQ(LargestDifferenceOf(half, Doubles{0.25}), 0.25);
  EXPECT_EQ(
      LargestDifferenceOf(absl::MakeConstSpan(nan), absl::MakeConstSpan(half)),
      kInfinite);
}

}  // namespace
}  // namespace quern
