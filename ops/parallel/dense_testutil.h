#ifndef QUERN_OPS_PARALLEL_DENSE_TESTUTIL_H_
#define QUERN_OPS_PARALLEL_DENSE_TESTUTIL_H_

// Test utility for operators that are divided over ranks: dense matrices as
// doubles, and the parts of them that a rank has.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/testing/data.h"

namespace quern {

using Doubles = std::vector<double>;

// Random small integers. They, and sums of 60 products of two of them, are
// exact in every dtype.
inline Doubles Integers(Rng& rng, int64_t count) {
  Doubles v;
  while (count-- > 0) v.push_back(static_cast<double>(rng.Integer(-2, 2)));
  return v;
}

// The columns [begin, begin + count) of a matrix.
inline Doubles Columns(const Doubles& x, int64_t cols, int64_t begin,
                       int64_t count) {
  Doubles part;
  for (size_t i = 0; i < x.size(); i += static_cast<size_t>(cols)) {
    for (int64_t j = begin; j < begin + count; ++j) {
      part.push_back(x[i + static_cast<size_t>(j)]);
    }
  }
  return part;
}
inline Doubles Rows(const Doubles& x, int64_t cols, int64_t begin,
                    int64_t count) {
  return Doubles(x.begin() + begin * cols, x.begin() + (begin + count) * cols);
}

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_DENSE_TESTUTIL_H_
