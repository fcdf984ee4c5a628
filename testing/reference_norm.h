#ifndef QUERN_TESTING_REFERENCE_NORM_H_
#define QUERN_TESTING_REFERENCE_NORM_H_

// y[r, c] = x[r, c] / sqrt(mean over c of x[r, c]^2 + epsilon) * weight[c]
//
// Gated, x[r, c] * silu(gate[r, c]) takes the place of x[r, c].

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/check.h"
#include "quern/testing/reference_activation.h"

namespace quern {

// x[rows, cols] dense, weight[cols] or empty for ones.
inline std::vector<double> ReferenceRmsNorm(int64_t rows, int64_t cols,
                                            const std::vector<double>& x,
                                            const std::vector<double>& weight,
                                            double epsilon) {
  QUERN_CHECK(static_cast<int64_t>(x.size()) == rows * cols);
  const auto width = static_cast<size_t>(cols);
  std::vector<double> y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    double sum = 0.0;
    for (size_t c = 0; c < width; ++c) sum += x[row + c] * x[row + c];
    const double rms = std::sqrt(sum / static_cast<double>(cols) + epsilon);
    for (size_t c = 0; c < width; ++c) {
      y[row + c] = x[row + c] / rms * (weight.empty() ? 1.0 : weight.at(c));
    }
  }
  return y;
}

// gate[rows, cols] dense; otherwise as above.
inline std::vector<double> ReferenceGatedRmsNorm(
    int64_t rows, int64_t cols, std::vector<double> x,
    const std::vector<double>& gate, const std::vector<double>& weight,
    double epsilon) {
  QUERN_CHECK(gate.size() == x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] *= ReferenceSilu(gate[i]);
  return ReferenceRmsNorm(rows, cols, x, weight, epsilon);
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_NORM_H_
