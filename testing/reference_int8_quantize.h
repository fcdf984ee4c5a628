#ifndef QUERN_TESTING_REFERENCE_INT8_QUANTIZE_H_
#define QUERN_TESTING_REFERENCE_INT8_QUANTIZE_H_

// int8 quantisation in double. x ~ scale * (q - zero_point):
//
//   q = clamp(rint(x / scale) + zero_point, -128, 127)
//
//   symmetric:   scale = max|x| / 127
//                zero_point = 0
//   asymmetric:  scale = (max - min) / 255
//                zero_point = -128 - rint(min / scale)
//                max and min of the row and 0
//   zero row:    scale = 1, zero_point = 0

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace quern {

struct ReferenceInt8Terms {
  double scale = 1.0;
  double exact_zero_point = 0.0;  // before it is rounded
  int32_t zero_point = 0;
};

// The terms of a row of finite numbers.
inline ReferenceInt8Terms ReferenceInt8Symmetric(const std::vector<double>& x) {
  double largest = 0.0;
  for (const double v : x) largest = std::max(largest, std::abs(v));
  ReferenceInt8Terms terms;
  if (largest != 0.0) terms.scale = largest / 127.0;
  return terms;
}
inline ReferenceInt8Terms ReferenceInt8Asymmetric(
    const std::vector<double>& x) {
  double min = 0.0, max = 0.0;
  for (const double v : x) {
    min = std::min(min, v);
    max = std::max(max, v);
  }
  ReferenceInt8Terms terms;
  if (max == min) return terms;
  terms.scale = (max - min) / 255.0;
  terms.exact_zero_point = -128.0 - min / terms.scale;
  terms.zero_point =
      static_cast<int32_t>(-128.0 - std::nearbyint(min / terms.scale));
  return terms;
}

// The code of x; NaN is 0 before the zero point.
inline int32_t ReferenceInt8Code(double x, double scale, int32_t zero_point) {
  if (std::isnan(x)) return zero_point;
  return static_cast<int32_t>(
      std::clamp(std::nearbyint(x / scale) + zero_point, -128.0, 127.0));
}

// How many steps q is from x, where x beyond the codes counts as the last one.
// At most 1/2, but for rounding.
inline double Int8StepsOff(double x, double scale, int32_t zero_point,
                           int32_t q) {
  const double steps =
      std::clamp(x / scale, -128.0 - zero_point, 127.0 - zero_point);
  return std::abs(steps - (q - zero_point));
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_INT8_QUANTIZE_H_
