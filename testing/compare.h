#ifndef QUERN_TESTING_COMPARE_H_
#define QUERN_TESTING_COMPARE_H_

// The only place where results are judged. Every element must be close: there
// is no "few percent may differ", and no relative tolerance that a wrong small
// element could hide behind. Tested by compare_test.cc.
//
//   EXPECT_TRUE(AllEqual(actual, expected));           // same value
//   EXPECT_TRUE(AllBitsEqual(actual, expected));       // same bits
//   EXPECT_TRUE(AllClose(actual, expected, DotTolerance(k, 1, 1, ...)));
//   EXPECT_TRUE(AllWithin(actual, expected, bound));   // bound per element
//   EXPECT_TRUE(MeanErrorWithin(actual, expected, UnbiasedMeanBound(b, n)));
//
// `actual` and `expected` are TensorViews of one rank, std::vectors or
// absl::Spans of any element type of core/dtype.h or double, not necessarily
// the same. The shapes must agree; two empty ones are close.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// Bound on |computed - exact| for a length-k dot product with |a| <= max_a and
// |b| <= max_b: k rounded sums of at most k * max_a * max_b, each off by
// eps_acc of that (the epsilon of the accumulator, 2^-23 for f32: twice its
// unit roundoff, which covers the terms of second order while k * eps_acc < 1);
// then one rounding to the output type (UnitRoundoff<Out>()).
inline double DotTolerance(int64_t k, double max_a, double max_b,
                           double eps_acc, double eps_out) {
  const double worst = static_cast<double>(k) * max_a * max_b;
  return worst * (static_cast<double>(k) * eps_acc + eps_out);
}

// Bound on |mean of n errors| when each is independent, has mean zero and is at
// most `bound`: exceeded once in 10^9 runs, by Hoeffding's inequality
// 2 exp(-n t^2 / (2 bound^2)) = 10^-9. Truncation instead of rounding has a
// mean of about `bound`, and fails from n = 50 on.
inline double UnbiasedMeanBound(double bound, int64_t n) {
  return n <= 0
             ? 0.0
             : bound * std::sqrt(2.0 * std::log(2e9) / static_cast<double>(n));
}

namespace compare_internal {

template <typename T, int kRank>
TensorView<const T, kRank> AsView(TensorView<T, kRank> view) {
  return {view.data(), view.extents(), view.strides()};
}
template <typename T, int kRank>
TensorView<const T, kRank> AsView(TensorView<const T, kRank> view) {
  return view;
}
template <typename T>
VectorView<const T> AsView(const std::vector<T>& v) {
  return DenseVector<const T>(v.data(), static_cast<int64_t>(v.size()));
}
template <typename T>
VectorView<const std::remove_const_t<T>> AsView(absl::Span<T> v) {
  return DenseVector<const std::remove_const_t<T>>(
      v.data(), static_cast<int64_t>(v.size()));
}

template <size_t kRank>
testing::Message& operator<<(testing::Message& out,
                             const std::array<int64_t, kRank>& values) {
  const char* separator = "[";
  for (const int64_t value : values)
    out << separator << value, separator = ", ";
  return out << "]";
}

// A verdict on one pair: how wrong it is, or negative if it is not.
constexpr double kFine = -1.0;
constexpr double kHopeless = std::numeric_limits<double>::infinity();

// Visits all index tuples in row-major order; calls judge(a, e, flat index) and
// reports the worst element.
template <typename A, typename E, int kRank, typename Judge>
testing::AssertionResult Compare(TensorView<const A, kRank> actual,
                                 TensorView<const E, kRank> expected,
                                 const char* complaint, const Judge& judge) {
  using Dims = typename TensorView<const A, kRank>::Dims;
  if (actual.extents() != expected.extents()) {
    testing::Message shapes;
    shapes << "shapes differ: expected " << expected.extents() << ", actual "
           << actual.extents();
    return testing::AssertionFailure(shapes);
  }
  const int64_t size = actual.size();
  Dims at{}, worst_at{};
  int64_t failures = 0;
  double worst = kFine, worst_actual = 0, worst_expected = 0;
  for (int64_t flat = 0; flat < size; ++flat) {
    int64_t a_offset = 0, e_offset = 0;
    int64_t rest = flat;
    for (size_t d = kRank; d-- > 0;) {
      at[d] = rest % actual.extents()[d];
      rest /= actual.extents()[d];
      a_offset += at[d] * actual.strides()[d];
      e_offset += at[d] * expected.strides()[d];
    }
    const A a = actual.data()[a_offset];
    const E e = expected.data()[e_offset];
    const double badness = judge(a, e, flat);
    if (badness == kFine) continue;
    ++failures;
    if (badness > worst) {
      worst = badness;
      worst_at = at;
      worst_actual = ToDouble(a);
      worst_expected = ToDouble(e);
    }
  }
  if (failures == 0) return testing::AssertionSuccess();
  testing::Message message;
  // 9 digits tell two floats apart.
  char values[160];
  std::snprintf(values, sizeof(values),
                ": expected %.9g, actual %.9g (difference %.3g)",
                worst_expected, worst_actual, worst_actual - worst_expected);
  message << failures << " of " << size << " elements " << complaint
          << "; worst at " << worst_at << values;
  return testing::AssertionFailure(message);
}

// NaN is close only to NaN, an infinity only to itself, whatever the bound. A
// bound that is no finite number >= 0 is a mistake in the test: nothing passes.
inline double JudgeClose(double actual, double expected, double bound) {
  if (!(bound >= 0.0) || std::isinf(bound)) return kHopeless;
  if (actual == expected) return kFine;
  if (std::isnan(actual) && std::isnan(expected)) return kFine;
  const double difference = std::abs(actual - expected);
  // Written this way, NaN and infinite differences fail.
  if (difference <= bound) return kFine;
  return std::isnan(difference) ? kHopeless : difference;
}

}  // namespace compare_internal

// |actual - expected| <= bound(expected value, flat row-major index).
template <typename A, typename E, typename Bound>
testing::AssertionResult AllWithin(const A& actual, const E& expected,
                                   const Bound& bound) {
  return compare_internal::Compare(
      compare_internal::AsView(actual), compare_internal::AsView(expected),
      "are farther from the expected value than their bound",
      [&bound](auto a, auto e, int64_t flat) {
        const double want = ToDouble(e);
        return compare_internal::JudgeClose(ToDouble(a), want,
                                            bound(want, flat));
      });
}

// |actual - expected| <= tolerance. +0 and -0 are the same value.
template <typename A, typename E>
testing::AssertionResult AllClose(const A& actual, const E& expected,
                                  double tolerance) {
  testing::AssertionResult result = AllWithin(
      actual, expected, [tolerance](double, int64_t) { return tolerance; });
  if (!result) result << "; tolerance " << tolerance;
  return result;
}

// actual == expected as numbers; NaN equals NaN. For integers of at most 53
// bits and for sums that are exact.
template <typename A, typename E>
testing::AssertionResult AllEqual(const A& actual, const E& expected) {
  return compare_internal::Compare(
      compare_internal::AsView(actual), compare_internal::AsView(expected),
      "are not equal", [](auto a, auto e, int64_t) {
        return compare_internal::JudgeClose(ToDouble(a), ToDouble(e), 0.0);
      });
}

// Whether the bits are the same, which tells -0 from +0 and one NaN from
// another. For results that must not depend on the number of threads, and for
// data that is only moved.
template <typename A, typename E>
testing::AssertionResult AllBitsEqual(const A& actual, const E& expected) {
  return compare_internal::Compare(
      compare_internal::AsView(actual), compare_internal::AsView(expected),
      "differ in their bits", [](auto a, auto e, int64_t) {
        static_assert(std::is_same_v<decltype(a), decltype(e)>,
                      "bits of one type");
        if (std::memcmp(&a, &e, sizeof(a)) == 0) return compare_internal::kFine;
        const double difference = std::abs(ToDouble(a) - ToDouble(e));
        return std::isnan(difference) ? compare_internal::kHopeless
                                      : difference;
      });
}

// |mean(actual - expected)| <= bound: finds rounding that leans to one side,
// which a bound per element cannot see. Elements that are equal specials count
// as exact; other specials fail.
template <typename A, typename E>
testing::AssertionResult MeanErrorWithin(const A& actual, const E& expected,
                                         double bound) {
  double sum = 0.0;
  int64_t count = 0;
  testing::AssertionResult shapes = compare_internal::Compare(
      compare_internal::AsView(actual), compare_internal::AsView(expected),
      "are specials where none are expected", [&](auto a, auto e, int64_t) {
        const double got = ToDouble(a), want = ToDouble(e);
        ++count;
        if (got == want || (std::isnan(got) && std::isnan(want))) {
          return compare_internal::kFine;
        }
        sum += got - want;
        return std::isfinite(got - want) ? compare_internal::kFine
                                         : compare_internal::kHopeless;
      });
  if (!shapes || count == 0) return shapes;
  const double mean = sum / static_cast<double>(count);
  if (std::abs(mean) <= bound) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "mean error of " << count << " elements is " << mean << "; bound "
         << bound;
}

}  // namespace quern

#endif  // QUERN_TESTING_COMPARE_H_
