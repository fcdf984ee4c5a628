#ifndef QUERN_TESTING_ERRORS_ROUNDING_ERROR_H_
#define QUERN_TESTING_ERRORS_ROUNDING_ERROR_H_

// The verdict on results of many roundings, for which a bound on the worst case
// says nothing.
//
//   RoundingError error;
//   for (...) error.Add(actual, expected, rounding);
//   EXPECT_EQ(error.Complaint(), "");
//
// The worst case adds up all roundings with the same sign. After a dozen steps
// in bf16 it is larger than the results, and passes whatever is computed. But
// independent roundings add up in squares, and how far they get can be seen: an
// oracle computes the formula twice, exactly and with a rounding wherever the
// operator has one. `rounding` is the difference of the two, a sample of the
// error that such roundings make. The operator's error, actual - expected, is
// another sample. In f32 the order of sums makes them independent; in bf16 and
// f16 most roundings are the same in both, which brings the two closer.
//
// Both root mean squares (rms) estimate the same number. The quotient of the
// mean squares of two samples of n independent errors has the F distribution
// with n and n degrees of freedom. The logarithm of its root is nearly normal,
// with mean 0 and variance 1 / n; it exceeds 6 / sqrt(n) once in 10^6 tests for
// n = 9, in 10^7 for 22, and in 10^8 for 75. Errors of one row have causes in
// common, so that fewer of them are independent. The factor is therefore 2 or
// more, which is enough for 75 independent errors: 2 = e^(6 / sqrt(75)). Hence
//
//   rms(actual - expected) <= Factor(n) * rms(rounding)
//   |actual - expected| <= 8 Factor(n) * rms(rounding) for each element, which
//     is 16 deviations or more: errors of one size stay below 8 deviations, and
//     the other half is for rows whose errors differ in size
//
// A verdict that could not tell a wrong operator is refused, too:
//
//   Factor(n) * rms(rounding) <= rms(expected) / 8
//
// so an operator whose results are zeros, of the other sign or off by a fourth
// always fails. An error below that of the roundings does not: in bf16 a factor
// of 1.02 on one of three heads fails nine times in ten, one of 1.01 once.
// Specials fail. RoundingRows judges rows of different size.
// Tested by rounding_error_test.cc.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "quern/testing/errors/largest_difference.h"

namespace quern {

class RoundingError {
 public:
  // The bound is at most this fraction of the rms of the expected numbers.
  static constexpr double kWidest = 0.125;
  // The error of an element is at most so many times the bound.
  static constexpr double kPeak = 8;

  static double Factor(int64_t count) {
    const double n = static_cast<double>(std::max<int64_t>(count, 1));
    return std::max(2.0, std::exp(6 / std::sqrt(n)));
  }

  // An element of the operator; the exact one; what the roundings of an oracle
  // add to that one.
  void Add(double actual, double expected, double rounding) {
    const double error = actual - expected;
    errors_ += error * error;
    roundings_ += rounding * rounding;
    sizes_ += expected * expected;
    worst_.Add(actual, expected);
  }
  void Merge(const RoundingError& other) {
    errors_ += other.errors_;
    roundings_ += other.roundings_;
    sizes_ += other.sizes_;
    worst_.Merge(other.worst_);
  }

  int64_t count() const { return worst_.count(); }
  // The root mean squares.
  double error() const { return Rms(errors_); }
  double size() const { return Rms(sizes_); }
  double bound() const { return Factor(count()) * Rms(roundings_); }
  double largest() const { return worst_.value(); }

  // Says what is wrong; empty if nothing is.
  std::string Complaint() const {
    if (count() == 0) return "no element was compared";
    return FirstOf({WideComplaint(), OffComplaint(), FarComplaint()});
  }

 private:
  friend class RoundingRows;

  static std::string FirstOf(std::initializer_list<std::string> complaints) {
    for (const std::string& complaint : complaints) {
      if (!complaint.empty()) return complaint;
    }
    return "";
  }
  // Comparisons are written so that NaN fails.
  std::string WideComplaint() const {
    if (bound() <= kWidest * size()) return "";
    return absl::StrCat("a bound of ", bound(), " judges nothing of ", count(),
                        " elements whose rms is ", size());
  }
  std::string OffComplaint() const {
    if (error() <= bound()) return "";
    return absl::StrCat("the rms error of ", count(), " elements is ", error(),
                        "; bound ", bound(), ", rms ", size());
  }
  std::string FarComplaint() const {
    if (largest() <= kPeak * bound()) return "";
    return absl::StrCat("the largest error of ", count(), " elements is ",
                        largest(), "; bound ", kPeak * bound(), ", rms ",
                        size());
  }
  double Rms(double squares) const {
    return std::sqrt(squares /
                     static_cast<double>(std::max<int64_t>(count(), 1)));
  }

  double errors_ = 0, roundings_ = 0, sizes_ = 0;  // sums of squares
  LargestDifference worst_;
};

// The verdict on rows whose results, and errors, may differ in size by orders
// of magnitude: each row has its own rms and its own largest error, and only
// all together must be judged by less than their size. A row of few elements
// has a sample that says little of its error, so it counts among all alone.
class RoundingRows {
 public:
  static constexpr int64_t kLeastElements = 9;

  void Add(const RoundingError& row) {
    if (complaint_.empty() && row.count() >= kLeastElements) {
      complaint_ =
          RoundingError::FirstOf({row.OffComplaint(), row.FarComplaint()});
      if (!complaint_.empty()) {
        complaint_ = absl::StrCat("row ", rows_, ": ", complaint_);
      }
    }
    ++rows_;
    all_.Merge(row);
  }

  const RoundingError& all() const { return all_; }
  // Says what is wrong; empty if nothing is.
  std::string Complaint() const {
    if (all_.count() == 0) return "no element was compared";
    return RoundingError::FirstOf(
        {complaint_, all_.WideComplaint(), all_.OffComplaint()});
  }

 private:
  int64_t rows_ = 0;
  std::string complaint_;  // of the first wrong row
  RoundingError all_;
};

}  // namespace quern

#endif  // QUERN_TESTING_ERRORS_ROUNDING_ERROR_H_
