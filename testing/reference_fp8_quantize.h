#ifndef QUERN_TESTING_REFERENCE_FP8_QUANTIZE_H_
#define QUERN_TESTING_REFERENCE_FP8_QUANTIZE_H_

// fp8 e4m3fn quantisation in double. x ~ scale * q:
//
//   q = x / scale, at most 448 in magnitude, before it is rounded to e4m3
//
//   dynamic:  scale = max(max|x| / 448, 1 / (448 * 512))

#include <algorithm>
#include <cmath>
#include <vector>

namespace quern {

inline constexpr double kReferenceFp8Most = 448.0;

// The dynamic scale of a row of finite numbers.
inline double ReferenceFp8Scale(const std::vector<double>& x) {
  double largest = 0.0;
  for (const double v : x) largest = std::max(largest, std::abs(v));
  return std::max(largest / kReferenceFp8Most,
                  1.0 / (kReferenceFp8Most * 512.0));
}

// The number that the code of x is nearest to.
inline double ReferenceFp8Value(double x, double scale) {
  const double q = x / scale;
  if (std::isnan(q)) return q;
  return std::clamp(q, -kReferenceFp8Most, kReferenceFp8Most);
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_FP8_QUANTIZE_H_
