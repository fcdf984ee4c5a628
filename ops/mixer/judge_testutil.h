#ifndef QUERN_OPS_MIXER_JUDGE_TESTUTIL_H_
#define QUERN_OPS_MIXER_JUDGE_TESTUTIL_H_

// The verdict of an oracle that is written in Bounded numbers.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/errors/rounding_error.h"

namespace quern {

// Judges numbers against what the oracle has for them.
inline testing::AssertionResult WithinBounds(const std::vector<double>& got,
                                             const BoundedRow& want) {
  std::vector<double> values;
  for (const Bounded& w : want) values.push_back(w.value);
  return AllWithin(got, values, [&](double y, int64_t i) {
    // Where a NaN is expected there is no distance.
    return std::isnan(y) ? 0.0 : want[static_cast<size_t>(i)].error;
  });
}

// Judges numbers of many roundings by a sample of their error: each row, and
// all. Rows of which nothing is expected are left to WithinBounds.
inline void ExpectRoundings(const std::vector<double>& got,
                            const BoundedRow& want, int64_t row_size) {
  ASSERT_EQ(got.size(), want.size());
  ASSERT_GT(row_size, 0);
  ASSERT_EQ(want.size() % static_cast<size_t>(row_size), 0u);
  RoundingRows rows;
  for (size_t row = 0; row < want.size();
       row += static_cast<size_t>(row_size)) {
    RoundingError error;
    for (size_t i = row; i < row + static_cast<size_t>(row_size); ++i) {
      const Bounded w = want[i];
      if (!std::isnan(w.value)) error.Add(got[i], w.value, w.rounded - w.value);
    }
    if (error.count() > 0) rows.Add(error);
  }
  if (rows.all().count() > 0) {
    EXPECT_EQ(rows.Complaint(), "");
  }
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_JUDGE_TESTUTIL_H_
