#ifndef QUERN_TESTING_ERRORS_LARGEST_DIFFERENCE_H_
#define QUERN_TESTING_ERRORS_LARGEST_DIFFERENCE_H_

// The largest |actual - expected| of many elements, as one number: for programs
// that print or report it. A test that only wants a verdict takes compare.h.
//
//   EXPECT_LE(LargestDifferenceOf(logits, oracle), bound);
//
//   LargestDifference worst;
//   for (...) worst.Add(actual, expected);
//   if (worst.value() <= bound) ...
//
// The value is infinite, so that no bound holds, if
//   - an element of either side is NaN or infinite, two equal infinities
//     included: an oracle that overflows proves nothing;
//   - two lengths differ;
//   - nothing was compared.
//
// A loop of one's own that keeps a maximum gets the first of these wrong in
// most spellings: std::max(worst, NaN) is worst, and a NaN that was kept by
// `if (!(d <= worst)) worst = d` is replaced by the next element's difference.
// tools/check_comparators.sh refuses such loops outside testing/.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "quern/testing/reference_convert.h"

namespace quern {

class LargestDifference {
 public:
  void Add(double actual, double expected) {
    ++count_;
    const double difference = std::abs(actual - expected);
    if (difference <= largest_) return;
    largest_ = std::isnan(difference) ? kInfinite : difference;
  }

  // Every element of two vectors of the same length.
  template <typename A, typename E>
  void AddAll(absl::Span<const A> actual, absl::Span<const E> expected) {
    if (actual.size() != expected.size()) {
      largest_ = kInfinite;
      return;
    }
    for (size_t i = 0; i < actual.size(); ++i) {
      Add(ToDouble(actual[i]), ToDouble(expected[i]));
    }
  }

  void Merge(const LargestDifference& other) {
    count_ += other.count_;
    if (!(other.largest_ <= largest_)) largest_ = other.largest_;
  }

  int64_t count() const { return count_; }
  double value() const { return count_ == 0 ? kInfinite : largest_; }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  double largest_ = 0.0;  // never NaN
  int64_t count_ = 0;
};

template <typename A, typename E>
double LargestDifferenceOf(absl::Span<const A> actual,
                           absl::Span<const E> expected) {
  LargestDifference worst;
  worst.AddAll(actual, expected);
  return worst.value();
}

template <typename A, typename E>
double LargestDifferenceOf(const std::vector<A>& actual,
                           const std::vector<E>& expected) {
  return LargestDifferenceOf(absl::MakeConstSpan(actual),
                             absl::MakeConstSpan(expected));
}

// The largest difference of two lists of rows, which may differ in length.
template <typename A, typename E>
double LargestDifferenceOf(const std::vector<std::vector<A>>& actual,
                           const std::vector<std::vector<E>>& expected) {
  if (actual.size() != expected.size()) {
    return std::numeric_limits<double>::infinity();
  }
  LargestDifference worst;
  for (size_t row = 0; row < actual.size(); ++row) {
    worst.AddAll(absl::MakeConstSpan(actual[row]),
                 absl::MakeConstSpan(expected[row]));
  }
  return worst.value();
}

}  // namespace quern

#endif  // QUERN_TESTING_ERRORS_LARGEST_DIFFERENCE_H_
