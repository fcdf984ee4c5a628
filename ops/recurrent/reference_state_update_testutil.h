#ifndef QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_

// The oracle of the selective state update: the recurrence of one row of a head
// in double, one token after the other. Beside it runs a bound on the error of
// a computation in f32 whose state is rounded to state_dtype after each token:
// a decay never makes an error grow, and each token adds the roundings of its
// own arithmetic. Roundings are counted as 2^-23, twice the unit roundoff,
// which covers the terms of second order.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/reference_rounding_testutil.h"

namespace quern {

// What one row has for a token.
struct StateUpdateToken64 {
  double x = 0, dt = 0, bias = 0, d = 0;
  std::vector<double> a, b, c;  // d_state numbers
  bool softplus = false;
  bool gated = false;
  double z = 0;
};

class StateUpdateReference {
 public:
  StateUpdateReference(std::vector<double> row, DType state_dtype)
      : row_(std::move(row)),
        bounds_(row_.size(), 0.0),
        state_dtype_(state_dtype) {}

  void Step(const StateUpdateToken64& t) {
    const double argument = t.dt + t.bias;
    double delta = argument;
    double delta_error = kEps * (std::abs(t.dt) + std::abs(t.bias));
    if (t.softplus) {
      delta =
          std::max(argument, 0.0) + std::log1p(std::exp(-std::abs(argument)));
      // state_update_simd.cc: 16 + |x| / 20 units of 2^-24.
      delta_error += delta * (16 + std::abs(argument) / 20) * 0x1p-24;
    }
    const double n = static_cast<double>(row_.size());
    double y = 0, error = 0;
    for (size_t i = 0; i < row_.size(); ++i) {
      const double power = std::min(t.a[i] * delta, 0.0);
      const double decay = std::exp(power);
      const double decay_error =
          decay * (std::abs(t.a[i]) * delta_error + kEps * std::abs(power) +
                   (6 + std::min(-power, 128.0) / 20) * kEps) +
          kTiny;
      const double kept = decay * row_[i], added = t.b[i] * delta * t.x;
      const double computed = bounds_[i] + decay_error * std::abs(row_[i]) +
                              delta_error * std::abs(t.b[i] * t.x) +
                              3 * kEps * (std::abs(kept) + std::abs(added)) +
                              kTiny;
      row_[i] = kept + added;
      bounds_[i] = computed +
                   RoundingBoundOf(state_dtype_, std::abs(row_[i]) + computed);
      y += row_[i] * t.c[i];
      error += computed * std::abs(t.c[i]) +
               (n + 2) * kEps * std::abs(row_[i] * t.c[i]);
    }
    error += kEps * (std::abs(y) + 2 * std::abs(t.d * t.x)) + kTiny;
    y += t.d * t.x;
    if (t.gated) {
      const double gate = t.z / (1 + std::exp(-t.z));
      error = error * std::abs(gate) + 6 * kEps * std::abs(y * gate) + kTiny;
      y *= gate;
    }
    y_ = y;
    y_bound_ = error;
  }

  const std::vector<double>& row() const { return row_; }
  // |computed - row()[i]| <= this.
  double bound(size_t i) const { return bounds_[i]; }
  double y() const { return y_; }
  // |computed - y()| <= this, before y is rounded to its dtype.
  double y_bound() const { return y_bound_; }

 private:
  static constexpr double kEps = 0x1p-23;
  static constexpr double kTiny = 0x1p-140;

  std::vector<double> row_, bounds_;
  DType state_dtype_;
  double y_ = 0, y_bound_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_
