#ifndef QUERN_TESTING_REFERENCE_ACTIVATION_H_
#define QUERN_TESTING_REFERENCE_ACTIVATION_H_

// y[r, c] = act(x[r, c]) * x[r, d + c]     for x[rows, 2 d] -> y[rows, d]

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "quern/core/check.h"

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

inline double ReferenceQuickGelu(double x) {
  return x / (1.0 + std::exp(-1.702 * x));
}

inline double ReferenceRelu2(double x) { return x < 0 ? 0 : x * x; }

inline double ReferenceFatrelu(double x, double threshold) {
  return x <= threshold ? 0 : x;
}

inline double ReferenceXielu(double x, double alpha_p, double alpha_n,
                             double beta, double eps) {
  if (x > 0) return alpha_p * x * x + beta * x;
  return (std::expm1(std::min(x, eps)) - x) * alpha_n + beta * x;
}

// g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u is up,
// limited to [-limit, limit].
inline double ReferenceSwigluOai(double gate, double up, double alpha,
                                 double limit) {
  const double g = std::min(gate, limit);
  const double u = std::max(std::min(up, limit), -limit);
  return g / (1.0 + std::exp(-alpha * g)) * (u + 1.0);
}

// max(gate - (mean + deviations * standard deviation), 0)
inline std::vector<double> ReferenceExcess(const std::vector<double>& gate,
                                           double deviations) {
  const auto n = static_cast<double>(gate.size());
  double mean = 0, variance = 0;
  for (const double v : gate) mean += v / n;
  for (const double v : gate) variance += (v - mean) * (v - mean) / n;
  const double cutoff = mean + deviations * std::sqrt(variance);
  std::vector<double> excess;
  for (const double v : gate) excess.push_back(std::max(v - cutoff, 0.0));
  return excess;
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
