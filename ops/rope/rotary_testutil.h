#ifndef QUERN_OPS_ROPE_ROTARY_TESTUTIL_H_
#define QUERN_OPS_ROPE_ROTARY_TESTUTIL_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

// Rotates pair j of each head of x[.., rot_dim] by cosine(head, j) and
// sine(head, j), in double.
template <typename Cosine, typename Sine>
std::vector<double> Turned(std::vector<double> x, RotaryStyle style,
                           int64_t rot_dim, const Cosine& cosine,
                           const Sine& sine) {
  const bool halves = style == RotaryStyle::kHalves;
  const size_t n = static_cast<size_t>(rot_dim), half = n / 2;
  for (size_t head = 0; head * n < x.size(); ++head) {
    for (size_t j = 0; j < half; ++j) {
      double& a = x[head * n + (halves ? j : 2 * j)];
      double& b = x[head * n + (halves ? j + half : 2 * j + 1)];
      const double c = cosine(head, j), s = sine(head, j), old = a;
      a = a * c - b * s;
      b = b * c + old * s;
    }
  }
  return x;
}

// Like Turned, with the cosine and sine of angle(head, j).
template <typename Angle>
std::vector<double> TurnedBy(std::vector<double> x, RotaryStyle style,
                             int64_t rot_dim, const Angle& angle) {
  return Turned(
      std::move(x), style, rot_dim,
      [&](size_t head, size_t j) { return std::cos(angle(head, j)); },
      [&](size_t head, size_t j) { return std::sin(angle(head, j)); });
}

// Bound on the error for pairs of elements below 3: a cosine, a sine, two
// products and a sum of less than 4.3 in f32, then the rounding of the result.
inline double TurnedBound(DType dtype, double value) {
  constexpr double kF32 = 5 * 4.3 * 0x1p-24;
  return kF32 + ResultBound(dtype, std::abs(value) + kF32, 0.0);
}

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_TESTUTIL_H_
