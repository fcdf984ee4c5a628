#ifndef QUERN_TESTING_REFERENCE_ACTIVATION_H_
#define QUERN_TESTING_REFERENCE_ACTIVATION_H_

// y[r, c] = act(x[r, c]) * x[r, d + c]     for x[rows, 2 d] -> y[rows, d]

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/check.h"

namespace quern {

inline double ReferenceSilu(double x) { return x / (1.0 + std::exp(-x)); }

inline double ReferenceGelu(double x) {
  return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
}

inline double ReferenceGeluTanh(double x) {
  const double inner =
      std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1.0 + std::tanh(inner));
}

template <typename Activation>
std::vector<double> ReferenceActAndMul(int64_t rows, int64_t d,
                                       const std::vector<double>& x,
                                       const Activation& act) {
  QUERN_CHECK(static_cast<int64_t>(x.size()) == rows * 2 * d);
  std::vector<double> y;
  for (int64_t r = 0; r < rows; ++r) {
    const double* gate = x.data() + r * 2 * d;
    for (int64_t c = 0; c < d; ++c) y.push_back(act(gate[c]) * gate[d + c]);
  }
  return y;
}

inline std::vector<double> ReferenceSiluAndMul(int64_t rows, int64_t d,
                                               const std::vector<double>& x) {
  return ReferenceActAndMul(rows, d, x, ReferenceSilu);
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_ACTIVATION_H_
