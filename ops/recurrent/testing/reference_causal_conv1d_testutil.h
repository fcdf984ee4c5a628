#ifndef QUERN_OPS_RECURRENT_TESTING_REFERENCE_CAUSAL_CONV1D_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_REFERENCE_CAUSAL_CONV1D_TESTUTIL_H_

// The oracle of the causal convolution: one output in double, and a bound on
// the error of its computation in f32, before it is rounded to its dtype.

#include <cmath>
#include <cstddef>
#include <vector>

namespace quern {

struct ConvReference {
  double y, bound;
};

// x: the last weights.size() inputs, the oldest first.
inline ConvReference ReferenceConv(const std::vector<double>& weights,
                                   double bias, const std::vector<double>& x,
                                   bool silu) {
  double sum = bias, size = std::abs(bias);
  for (size_t j = 0; j < weights.size(); ++j) {
    sum += weights[j] * x[j];
    size += std::abs(weights[j] * x[j]);
  }
  // A product and a sum for each weight.
  const double error = 2 * static_cast<double>(weights.size()) * 0x1p-24 * size;
  if (!silu) return {sum, error};
  // The slope of silu is below 1.1; activation-inl.h: 10 units of 2^-24.
  const double y = sum / (1 + std::exp(-sum));
  return {y,
          1.1 * error + 10 * 0x1p-24 * (std::abs(y) + 1.1 * error) + 0x1p-140};
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_REFERENCE_CAUSAL_CONV1D_TESTUTIL_H_
