#ifndef QUERN_OPS_RECURRENT_TESTING_REFERENCE_STATE_UPDATE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_REFERENCE_STATE_UPDATE_TESTUTIL_H_

// The oracle of the selective state update: the recurrence of one row of a head
// in double, one token after the other. Beside it runs a bound on the error of
// a computation in f32 whose state is rounded to state_dtype after each token:
// a decay never makes an error grow, and each token adds the roundings of its
// own arithmetic. Roundings are counted as 2^-23, twice the unit roundoff,
// which covers the terms of second order.
//
// By chunks, what a chunk has added to an element is a sum over its tokens,
// whose terms have an absolute value of Z in all, each decayed; Y is Z with
// each term times the relative error of its factors. y is made of two chains of
// such sums, over d_state and over the tokens of the chunk.
//
// Inputs may be off themselves. The recurrence of the inputs that the kernel is
// given then differs from that of the token's, element by element: a decay by
// its slope, a product by what its factors may reach. The bounds above hold for
// the former, so they take magnitudes that include that difference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"

namespace quern {

// What one row has for a token.
struct StateUpdateToken64 {
  double x = 0, dt = 0, bias = 0, d = 0;
  std::vector<double> a, b, c;  // d_state numbers
  bool softplus = false;
  bool gated = false;
  double z = 0;
  // How far the numbers above may be off those that the kernel is given.
  double x_error = 0, dt_error = 0, z_error = 0;
  std::vector<double> b_error, c_error;  // empty: exact
};

class StateUpdateReference {
 public:
  // chunk: the bound is that of chunks of so many tokens whose last state is
  // rounded to state_dtype; 1: of token by token.
  StateUpdateReference(std::vector<double> row, DType state_dtype,
                       int64_t chunk = 1)
      : row_(std::move(row)),
        bounds_(row_.size(), 0.0),
        moved_(row_.size(), 0.0),
        mass_(row_.size(), 0.0),
        factor_error_(row_.size(), 0.0),
        state_dtype_(state_dtype),
        chunk_(chunk) {}

  void Step(const StateUpdateToken64& t) {
    const double argument = t.dt + t.bias;
    double delta = argument;
    double delta_error =
        kEps * (std::abs(t.dt) + t.dt_error + std::abs(t.bias));
    if (t.softplus) {
      delta =
          std::max(argument, 0.0) + std::log1p(std::exp(-std::abs(argument)));
      // state_update_simd.cc: 16 + |x| / 20 units of 2^-24.
      delta_error += (delta + t.dt_error) *
                     (16 + (std::abs(argument) + t.dt_error) / 20) * 0x1p-24;
    }
    y_ = y_moved_ = y_error_ = 0;
    if (chunk_ > 1 && in_chunk_ == 0) BeginChunk();
    for (size_t i = 0; i < row_.size(); ++i) {
      Element(t, i, delta, delta_error);
    }
    y_error_ += kEps * (std::abs(y_) + y_moved_ + y_error_ +
                        2 * std::abs(t.d) * (std::abs(t.x) + t.x_error)) +
                kTiny;
    y_ += t.d * t.x;
    y_moved_ += std::abs(t.d) * t.x_error;
    if (t.gated) {
      const double gate = t.z / (1 + std::exp(-t.z));
      // The slope of silu is below 1.1.
      const double reach = std::abs(gate) + 1.1 * t.z_error;
      y_error_ = y_error_ * reach +
                 6 * kEps * (std::abs(y_) + y_moved_ + y_error_) * reach +
                 kTiny;
      y_moved_ = Times(y_moved_, reach) + Times(std::abs(y_), 1.1 * t.z_error);
      y_ *= gate;
    }
    if (chunk_ > 1 && ++in_chunk_ == chunk_) EndChunk();
  }
  // After the last token.
  void Finish() {
    if (chunk_ == 1) return;
    if (in_chunk_ > 0) EndChunk();
    for (size_t i = 0; i < row_.size(); ++i) {
      bounds_[i] += RoundingBoundOf(state_dtype_,
                                    std::abs(row_[i]) + moved_[i] + bounds_[i]);
    }
  }

  const std::vector<double>& row() const { return row_; }
  // |computed - row()[i]| <= this, after Finish.
  double bound(size_t i) const { return bounds_[i] + moved_[i]; }
  double y() const { return y_; }
  // |computed - y()| <= this, before y is rounded to its dtype.
  double y_bound() const { return y_error_ + y_moved_; }

 private:
  static constexpr double kEps = 0x1p-23;
  static constexpr double kTiny = 0x1p-140;

  // 0 where an input is exact and the other factor infinite.
  static double Times(double a, double b) {
    return a == 0 || b == 0 ? 0 : a * b;
  }

  // Moves element i on, and adds its part to y.
  void Element(const StateUpdateToken64& t, size_t i, double delta,
               double delta_error) {
    const double n = static_cast<double>(row_.size());
    const double b_error = t.b_error.empty() ? 0 : t.b_error[i];
    const double c_error = t.c_error.empty() ? 0 : t.c_error[i];
    const double c_reach = std::abs(t.c[i]) + c_error;
    const double bx_reach =
        (std::abs(t.b[i]) + b_error) * (std::abs(t.x) + t.x_error);
    const double added = t.b[i] * delta * t.x;
    const double added_reach = bx_reach * (std::abs(delta) + t.dt_error);
    const double moved_power = std::abs(t.a[i]) * t.dt_error;
    const double power = std::min(t.a[i] * delta, 0.0);
    const double decay = std::exp(power);
    const double decay_moved = std::min(1.0, decay * std::expm1(moved_power));
    const double decay_reach = std::min(1.0, decay + decay_moved);
    const double power_reach = moved_power - power;
    const double decay_error =
        decay_reach * (std::abs(t.a[i]) * delta_error + kEps * power_reach +
                       (6 + std::min(power_reach, 128.0) / 20) * kEps) +
        kTiny;
    const double old_reach = std::abs(row_[i]) + moved_[i];
    moved_[i] =
        Times(decay_reach, moved_[i]) + Times(decay_moved, std::abs(row_[i])) +
        (added_reach == std::abs(added) ? 0 : added_reach - std::abs(added));
    row_[i] = decay * row_[i] + added;
    const double reach = std::abs(row_[i]) + moved_[i];
    y_ += row_[i] * t.c[i];
    y_moved_ += Times(moved_[i], c_reach) + Times(std::abs(row_[i]), c_error);
    if (chunk_ > 1) {
      // A decay's error, and the product that takes it.
      factor_error_[i] = decay_reach * factor_error_[i] +
                         (decay_error + kEps * decay_reach) * mass_[i] +
                         delta_error * bx_reach + 3 * kEps * added_reach +
                         kTiny;
      mass_[i] = decay_reach * mass_[i] + added_reach;
      bounds_[i] *= decay_reach;
      y_error_ += c_reach * (bounds_[i] + factor_error_[i] +
                             (2 * n + static_cast<double>(chunk_) + 12) * kEps *
                                 mass_[i]);
      return;
    }
    const double computed =
        bounds_[i] + decay_error * old_reach + delta_error * bx_reach +
        3 * kEps * (decay_reach * old_reach + added_reach) + kTiny;
    bounds_[i] = computed + RoundingBoundOf(state_dtype_, reach + computed);
    y_error_ +=
        computed * c_reach + (n + 2) * kEps * (reach + computed) * c_reach;
  }

  void BeginChunk() {
    for (size_t i = 0; i < row_.size(); ++i) {
      mass_[i] = std::abs(row_[i]) + moved_[i];
      factor_error_[i] = 0;
    }
  }
  void EndChunk() {
    in_chunk_ = 0;
    for (size_t i = 0; i < row_.size(); ++i) {
      bounds_[i] += factor_error_[i] + kTiny +
                    (static_cast<double>(chunk_) + 6) * kEps * mass_[i];
    }
  }

  std::vector<double> row_, bounds_;
  std::vector<double> moved_;                // what errors of the inputs make
  std::vector<double> mass_, factor_error_;  // Z and Y
  DType state_dtype_;
  int64_t chunk_;
  int64_t in_chunk_ = 0;  // tokens since the last chunk ended
  double y_ = 0, y_moved_ = 0, y_error_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_REFERENCE_STATE_UPDATE_TESTUTIL_H_
