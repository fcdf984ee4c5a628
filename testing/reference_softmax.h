#ifndef QUERN_TESTING_REFERENCE_SOFTMAX_H_
#define QUERN_TESTING_REFERENCE_SOFTMAX_H_

// p[i] = exp(x[i] - max x) / sum over j of exp(x[j] - max x)
// lse  = log(sum over j of exp(x[j]))
//
// For no scores, and for -infinity everywhere, p is 0 and lse is -infinity.

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace quern {

inline double LogSumExp(const std::vector<double>& x) {
  double max = -std::numeric_limits<double>::infinity();
  for (const double v : x) max = std::isnan(v) || v > max ? v : max;
  if (max == -std::numeric_limits<double>::infinity()) return max;
  double sum = 0.0;
  for (const double v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

inline std::vector<double> ReferenceSoftmax(const std::vector<double>& x) {
  const double lse = LogSumExp(x);
  std::vector<double> p(x.size(), 0.0);
  if (lse == -std::numeric_limits<double>::infinity()) return p;
  for (size_t i = 0; i < x.size(); ++i) p[i] = std::exp(x[i] - lse);
  return p;
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_SOFTMAX_H_
