#ifndef QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_
#define QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_

// Numbers of an oracle in double that carry a bound on the error of the same
// computation in f32: |computed - value| <= error. An oracle of a whole layer
// is written in them, and the bounds of its results follow. Roundings to f32
// are counted as 2^-23, twice the unit roundoff.
//
// Beside the bound they carry what a plain computation gives that has the same
// roundings: every step in f32, every sum one term after the other. After many
// steps in bf16 or f16 bounds are larger than the numbers; then
// rounded - value is the sample by which testing/errors/rounding_error.h
// judges.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"

namespace quern {

struct Bounded {
  constexpr Bounded() = default;
  // A plain computation has the value itself.
  constexpr Bounded(double v, double e) : value(v), error(e), rounded(v) {}
  constexpr Bounded(double v, double e, double r)
      : value(v), error(e), rounded(r) {}

  double value = 0;
  double error = 0;
  double rounded = 0;
};
using BoundedRow = std::vector<Bounded>;

inline constexpr double kBoundedEps = 0x1p-23;
inline constexpr double kBoundedTiny = 0x1p-120;

// The largest magnitude that the computed number may have.
inline double Reach(Bounded x) { return std::abs(x.value) + x.error; }

inline double AsF32(double x) {
  return static_cast<double>(static_cast<float>(x));
}

inline Bounded RoundedF32(double value, double error, double rounded) {
  return {value, error + kBoundedEps * (std::abs(value) + error) + kBoundedTiny,
          AsF32(rounded)};
}
inline Bounded operator+(Bounded a, Bounded b) {
  return RoundedF32(a.value + b.value, a.error + b.error,
                    a.rounded + b.rounded);
}
inline Bounded operator-(Bounded a, Bounded b) {
  return RoundedF32(a.value - b.value, a.error + b.error,
                    a.rounded - b.rounded);
}
inline Bounded operator*(Bounded a, Bounded b) {
  return RoundedF32(a.value * b.value,
                    std::abs(a.value) * b.error + std::abs(b.value) * a.error +
                        a.error * b.error,
                    a.rounded * b.rounded);
}
// first + sum of a[i] * b[i], in any order.
inline Bounded Dot(const BoundedRow& a, const BoundedRow& b,
                   Bounded first = {}) {
  double value = first.value, error = first.error, size = Reach(first);
  auto rounded = static_cast<float>(first.rounded);
  for (size_t i = 0; i < a.size(); ++i) {
    value += a[i].value * b[i].value;
    error += std::abs(a[i].value) * b[i].error +
             std::abs(b[i].value) * a[i].error + a[i].error * b[i].error;
    size += Reach(a[i]) * Reach(b[i]);
    rounded +=
        static_cast<float>(a[i].rounded) * static_cast<float>(b[i].rounded);
  }
  const double n = static_cast<double>(a.size()) + 2;
  return {value, error + n * kBoundedEps * size + n * kBoundedTiny,
          static_cast<double>(rounded)};
}
// Rounded to f32, bf16 or f16.
inline Bounded Rounded(DType dtype, Bounded x) {
  return {x.value, x.error + RoundingBoundOf(dtype, Reach(x)),
          NearestOf(dtype, x.rounded)};
}
inline BoundedRow Rounded(DType dtype, BoundedRow row) {
  for (Bounded& x : row) x = Rounded(dtype, x);
  return row;
}

inline double Sigmoid64(double x) { return 1 / (1 + std::exp(-x)); }

// The slope of silu is below 1.1; core/activation-inl.h: 10 units of 2^-24.
inline Bounded BoundedSilu(Bounded x) {
  const double y = x.value * Sigmoid64(x.value);
  const double error = 1.1 * x.error;
  return {y, error + 10 * 0x1p-24 * (std::abs(y) + error) + kBoundedTiny,
          AsF32(x.rounded * Sigmoid64(x.rounded))};
}
inline Bounded BoundedSigmoid(Bounded x) {
  return RoundedF32(Sigmoid64(x.value), x.error / 4, Sigmoid64(x.rounded));
}
inline double Softplus64(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
// ops/recurrent/state_update_simd.cc: 16 + |x| / 20 units of 2^-24.
inline Bounded BoundedSoftplus(Bounded x) {
  const double y = Softplus64(x.value);
  return {y, x.error + (16 + Reach(x) / 20) * 0x1p-24 * (y + x.error),
          AsF32(Softplus64(x.rounded))};
}
// 1 / sqrt(sum of squares / n + eps). The root of the sum is a norm, which an
// error moves by its own norm at most.
inline Bounded BoundedInverseNorm(const BoundedRow& x, double n, double eps) {
  double squares = 0, errors = 0;
  float rounded = 0;
  for (const Bounded& v : x) {
    squares += v.value * v.value;
    errors += v.error * v.error;
    rounded += static_cast<float>(v.rounded) * static_cast<float>(v.rounded);
  }
  const double moved = std::sqrt(errors);
  const double low = std::max(0.0, std::sqrt(squares) - moved);
  const double y = 1 / std::sqrt(squares / n + eps);
  const double most = 1 / std::sqrt(low * low / n + eps);
  // Sums, the quotient, the root and its inverse; errors of a sum count half.
  const double units = static_cast<double>(x.size()) / 2 + 6;
  return {y, most - y + units * kBoundedEps * most,
          AsF32(1 / std::sqrt(static_cast<double>(rounded) / n + eps))};
}

// y[j] = sum over k of x[k] * weights[j * k + ..], rounded to dtype.
inline BoundedRow BoundedLinear(DType dtype, const BoundedRow& x,
                                const std::vector<double>& weights) {
  BoundedRow y;
  for (size_t first = 0; first < weights.size(); first += x.size()) {
    // Dot, of weights that are exact.
    double value = 0, error = 0, size = 0;
    float rounded = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      const double w = weights[first + k];
      value += x[k].value * w;
      error += x[k].error * std::abs(w);
      size += Reach(x[k]) * std::abs(w);
      rounded += static_cast<float>(x[k].rounded) * static_cast<float>(w);
    }
    const double n = static_cast<double>(x.size()) + 2;
    error += n * kBoundedEps * size + n * kBoundedTiny;
    y.push_back(
        Rounded(dtype, Bounded{value, error, static_cast<double>(rounded)}));
  }
  return y;
}

// The part [begin, begin + count) of a row.
inline BoundedRow Part(const BoundedRow& row, int64_t begin, int64_t count) {
  return BoundedRow(row.begin() + begin, row.begin() + begin + count);
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_BOUNDED_TESTUTIL_H_
