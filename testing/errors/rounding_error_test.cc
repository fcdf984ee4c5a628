#include "quern/testing/errors/rounding_error.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

// Results of rms 1 / sqrt(3), and errors of about a hundredth of it.
constexpr int64_t kCount = 400;
constexpr double kError = 0.01;

class RoundingErrorTest : public testing::Test {
 protected:
  RoundingErrorTest()
      : expected_(Reals(1)), rounding_(Reals(kError)), actual_(expected_) {
    const Doubles other = Reals(kError);
    for (size_t i = 0; i < actual_.size(); ++i) actual_[i] += other[i];
  }

  Doubles Reals(double size) {
    return ToDoubles(UniformReals(rng_, kCount, -size, size));
  }
  RoundingError Of(const Doubles& actual) const {
    RoundingError error;
    for (size_t i = 0; i < actual.size(); ++i) {
      error.Add(actual[i], expected_[i], rounding_[i]);
    }
    return error;
  }
  void ExpectComplaint(const Doubles& actual, const std::string& words) const {
    const std::string complaint = Of(actual).Complaint();
    EXPECT_NE(complaint.find(words), std::string::npos) << complaint;
  }

  TestRng rng_;
  Doubles expected_, rounding_, actual_;
};

TEST_F(RoundingErrorTest, PassesAnotherSampleOfTheSameRoundings) {
  EXPECT_EQ(Of(actual_).Complaint(), "");
  EXPECT_EQ(Of(expected_).Complaint(), "");
  EXPECT_EQ(Of(actual_).count(), kCount);
  EXPECT_NEAR(Of(actual_).error(), kError / std::sqrt(3.0), kError / 10);
  EXPECT_NEAR(Of(actual_).size(), 1 / std::sqrt(3.0), 0.1);
}

TEST_F(RoundingErrorTest, ComplainsOfWhatIsWrongAsAWhole) {
  ExpectComplaint(Doubles(kCount, 0.0), "the rms error of 400 elements");
  Doubles wrong = actual_;
  for (double& x : wrong) x = -x;
  ExpectComplaint(wrong, "the rms error");
  // 3 % too large: far below the fourth that the widest bound allows.
  wrong = actual_;
  for (double& x : wrong) x *= 1.03;
  ExpectComplaint(wrong, "the rms error");
  // Shifted by one.
  wrong = actual_;
  wrong.insert(wrong.begin(), wrong.back());
  wrong.pop_back();
  ExpectComplaint(wrong, "the rms error");
  // A tenth is wrong.
  wrong = actual_;
  for (size_t i = 0; i < wrong.size(); i += 10) wrong[i] += 0.05;
  ExpectComplaint(wrong, "the rms error");
}

TEST_F(RoundingErrorTest, ComplainsOfOneElement) {
  for (const size_t at : {size_t{0}, size_t{7}, size_t{kCount - 1}}) {
    Doubles wrong = actual_;
    wrong[at] += 0.12;
    ExpectComplaint(wrong, "the largest error of 400 elements");
    for (const double special : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      wrong[at] = special;
      ExpectComplaint(wrong, "error");
    }
  }
}

TEST_F(RoundingErrorTest, ComplainsOfABoundThatJudgesNothing) {
  for (double& x : rounding_) x *= 10;
  ExpectComplaint(actual_, "judges nothing");
  // Where all is zero, all must be.
  expected_ = rounding_ = Doubles(kCount, 0.0);
  EXPECT_EQ(Of(Doubles(kCount, 0.0)).Complaint(), "");
  ExpectComplaint(actual_, "the rms error");
  rounding_[3] = 1e-30;
  ExpectComplaint(Doubles(kCount, 0.0), "judges nothing");
}

TEST_F(RoundingErrorTest, SpecialsOfTheOracleFail) {
  for (const double special : {std::nan(""), HUGE_VAL}) {
    const Doubles expected = expected_, rounding = rounding_;
    expected_[5] = special;
    EXPECT_NE(Of(actual_).Complaint(), "");
    EXPECT_NE(Of(expected_).Complaint(), "");
    expected_ = expected;
    rounding_[5] = special;
    EXPECT_NE(Of(actual_).Complaint(), "");
    rounding_ = rounding;
  }
}

TEST_F(RoundingErrorTest, MergesAsIfAddedInOne) {
  RoundingError whole, first, second;
  EXPECT_EQ(whole.Complaint(), "no element was compared");
  for (size_t i = 0; i < actual_.size(); ++i) {
    RoundingError& part = i < 150 ? first : second;
    part.Add(actual_[i], expected_[i], rounding_[i]);
    whole.Add(actual_[i], expected_[i], rounding_[i]);
  }
  first.Merge(second);
  EXPECT_EQ(first.count(), whole.count());
  EXPECT_NEAR(first.error(), whole.error(), 1e-12);
  EXPECT_NEAR(first.bound(), whole.bound(), 1e-12);
  EXPECT_NEAR(first.size(), whole.size(), 1e-12);
  EXPECT_EQ(first.largest(), whole.largest());
}

TEST_F(RoundingErrorTest, RowsAreJudgedByTheirOwnSize) {
  // Rows of 20 elements, each a tenth of the one before, and one of 2.
  const auto rows_of = [&](size_t wrong_row, double by) {
    RoundingRows rows;
    double size = 1;
    for (size_t row = 0; row < 5; ++row, size /= 10) {
      RoundingError error;
      const size_t first = 20 * row, count = row == 4 ? 2 : 20;
      for (size_t i = first; i < first + count; ++i) {
        double actual = actual_[i] * size;
        if (row == wrong_row) actual += by * size;
        error.Add(actual, expected_[i] * size, rounding_[i] * size);
      }
      rows.Add(error);
    }
    return rows.Complaint();
  };
  EXPECT_EQ(RoundingRows().Complaint(), "no element was compared");
  EXPECT_EQ(rows_of(5, 0), "");
  EXPECT_EQ(rows_of(0, 0.05).rfind("row 0: the rms error of 20", 0), 0u);
  // A thousandth of the first row's size.
  EXPECT_EQ(rows_of(3, 0.05).rfind("row 3: the rms error of 20", 0), 0u);
  EXPECT_EQ(rows_of(4, 0.05), "");
  EXPECT_NE(rows_of(4, 3e4), "");
  for (double& x : rounding_) x *= 20;
  EXPECT_NE(rows_of(5, 0).find("judges nothing"), std::string::npos);
}

TEST(RoundingErrorFactorTest, FallsToTwo) {
  EXPECT_NEAR(RoundingError::Factor(9), std::exp(2), 1e-12);
  EXPECT_NEAR(RoundingError::Factor(36), std::exp(1), 1e-12);
  EXPECT_EQ(RoundingError::Factor(75), 2);
  EXPECT_EQ(RoundingError::Factor(std::numeric_limits<int64_t>::max()), 2);
  EXPECT_EQ(RoundingError::Factor(0), RoundingError::Factor(1));
}

}  // namespace
}  // namespace quern
