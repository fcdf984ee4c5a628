#ifndef QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_
#define QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_

// Numbers of an oracle in double that carry a bound on the error of the same
// computation in f32: |computed - value| <= error. An oracle of a whole layer
// is written in them, and the bounds of its results follow. Roundings to f32
// are counted as 2^-23, twice the unit roundoff.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/reference_rounding_testutil.h"

namespace quern {

struct Bounded {
  double value = 0;
  double error = 0;
};
using BoundedRow = std::vector<Bounded>;

inline constexpr double kBoundedEps = 0x1p-23;
inline constexpr double kBoundedTiny = 0x1p-120;

// The largest magnitude that the computed number may have.
inline double Reach(Bounded x) { return std::abs(x.value) + x.error; }

inline Bounded RoundedF32(double value, double error) {
  return {value,
          error + kBoundedEps * (std::abs(value) + error) + kBoundedTiny};
}
inline Bounded operator+(Bounded a, Bounded b) {
  return RoundedF32(a.value + b.value, a.error + b.error);
}
inline Bounded operator-(Bounded a, Bounded b) {
  return RoundedF32(a.value - b.value, a.error + b.error);
}
inline Bounded operator*(Bounded a, Bounded b) {
  return RoundedF32(a.value * b.value, std::abs(a.value) * b.error +
                                           std::abs(b.value) * a.error +
                                           a.error * b.error);
}
// first + sum of a[i] * b[i], in any order.
inline Bounded Dot(const BoundedRow& a, const BoundedRow& b,
                   Bounded first = {}) {
  double value = first.value, error = first.error, size = Reach(first);
  for (size_t i = 0; i < a.size(); ++i) {
    value += a[i].value * b[i].value;
    error += std::abs(a[i].value) * b[i].error +
             std::abs(b[i].value) * a[i].error + a[i].error * b[i].error;
    size += Reach(a[i]) * Reach(b[i]);
  }
  const double n = static_cast<double>(a.size()) + 2;
  return {value, error + n * kBoundedEps * size + n * kBoundedTiny};
}
// Rounded to f32, bf16 or f16.
inline Bounded Rounded(DType dtype, Bounded x) {
  return {x.value, x.error + RoundingBoundOf(dtype, Reach(x))};
}
inline BoundedRow Rounded(DType dtype, BoundedRow row) {
  for (Bounded& x : row) x = Rounded(dtype, x);
  return row;
}

// The slope of silu is below 1.1; core/activation-inl.h: 10 units of 2^-24.
inline Bounded BoundedSilu(Bounded x) {
  const double y = x.value / (1 + std::exp(-x.value));
  const double error = 1.1 * x.error;
  return {y, error + 10 * 0x1p-24 * (std::abs(y) + error) + kBoundedTiny};
}
inline Bounded BoundedSigmoid(Bounded x) {
  const double y = 1 / (1 + std::exp(-x.value));
  return RoundedF32(y, x.error / 4);
}
// ops/recurrent/state_update_simd.cc: 16 + |x| / 20 units of 2^-24.
inline Bounded BoundedSoftplus(Bounded x) {
  const double y =
      std::max(x.value, 0.0) + std::log1p(std::exp(-std::abs(x.value)));
  return {y, x.error + (16 + Reach(x) / 20) * 0x1p-24 * (y + x.error)};
}
// 1 / sqrt(sum of squares / n + eps). The root of the sum is a norm, which an
// error moves by its own norm at most.
inline Bounded BoundedInverseNorm(const BoundedRow& x, double n, double eps) {
  double squares = 0, errors = 0;
  for (const Bounded& v : x) {
    squares += v.value * v.value;
    errors += v.error * v.error;
  }
  const double moved = std::sqrt(errors);
  const double low = std::max(0.0, std::sqrt(squares) - moved);
  const double y = 1 / std::sqrt(squares / n + eps);
  const double most = 1 / std::sqrt(low * low / n + eps);
  // Sums, the quotient, the root and its inverse; errors of a sum count half.
  const double units = static_cast<double>(x.size()) / 2 + 6;
  return {y, most - y + units * kBoundedEps * most};
}

// y[j] = sum over k of x[k] * weights[j * k + ..], rounded to dtype.
inline BoundedRow BoundedLinear(DType dtype, const BoundedRow& x,
                                const std::vector<double>& weights) {
  BoundedRow y;
  for (size_t first = 0; first < weights.size(); first += x.size()) {
    // Dot, of weights that are exact.
    double value = 0, error = 0, size = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      const double w = weights[first + k];
      value += x[k].value * w;
      error += x[k].error * std::abs(w);
      size += Reach(x[k]) * std::abs(w);
    }
    const double n = static_cast<double>(x.size()) + 2;
    error += n * kBoundedEps * size + n * kBoundedTiny;
    y.push_back(Rounded(dtype, Bounded{value, error}));
  }
  return y;
}

// The part [begin, begin + count) of a row.
inline BoundedRow Part(const BoundedRow& row, int64_t begin, int64_t count) {
  return BoundedRow(row.begin() + begin, row.begin() + begin + count);
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_
