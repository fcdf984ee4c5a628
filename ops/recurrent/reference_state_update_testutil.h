#ifndef QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_

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

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
  // chunk: the bound is that of chunks of so many tokens whose last state is
  // rounded to state_dtype; 1: of token by token.
  StateUpdateReference(std::vector<double> row, DType state_dtype,
                       int64_t chunk = 1)
      : row_(std::move(row)),
        bounds_(row_.size(), 0.0),
        mass_(row_.size(), 0.0),
        factor_error_(row_.size(), 0.0),
        state_dtype_(state_dtype),
        chunk_(chunk) {}

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
    if (chunk_ > 1 && in_chunk_ == 0) BeginChunk();
    for (size_t i = 0; i < row_.size(); ++i) {
      const double power = std::min(t.a[i] * delta, 0.0);
      const double decay = std::exp(power);
      const double decay_error =
          decay * (std::abs(t.a[i]) * delta_error + kEps * std::abs(power) +
                   (6 + std::min(-power, 128.0) / 20) * kEps) +
          kTiny;
      const double kept = decay * row_[i], added = t.b[i] * delta * t.x;
      if (chunk_ > 1) {
        // A decay's error, and the product that takes it.
        factor_error_[i] = decay * factor_error_[i] +
                           (decay_error + kEps * decay) * mass_[i] +
                           delta_error * std::abs(t.b[i] * t.x) +
                           3 * kEps * std::abs(added) + kTiny;
        mass_[i] = decay * mass_[i] + std::abs(added);
        bounds_[i] *= decay;
        row_[i] = kept + added;
        y += row_[i] * t.c[i];
        error += std::abs(t.c[i]) *
                 (bounds_[i] + factor_error_[i] +
                  (2 * n + static_cast<double>(chunk_) + 12) * kEps * mass_[i]);
        continue;
      }
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
    if (chunk_ > 1 && ++in_chunk_ == chunk_) EndChunk();
  }
  // After the last token.
  void Finish() {
    if (chunk_ == 1) return;
    if (in_chunk_ > 0) EndChunk();
    for (size_t i = 0; i < row_.size(); ++i) {
      bounds_[i] +=
          RoundingBoundOf(state_dtype_, std::abs(row_[i]) + bounds_[i]);
    }
  }

  const std::vector<double>& row() const { return row_; }
  // |computed - row()[i]| <= this, after Finish.
  double bound(size_t i) const { return bounds_[i]; }
  double y() const { return y_; }
  // |computed - y()| <= this, before y is rounded to its dtype.
  double y_bound() const { return y_bound_; }

 private:
  static constexpr double kEps = 0x1p-23;
  static constexpr double kTiny = 0x1p-140;

  void BeginChunk() {
    for (size_t i = 0; i < row_.size(); ++i) {
      mass_[i] = std::abs(row_[i]);
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
  std::vector<double> mass_, factor_error_;  // Z and Y
  DType state_dtype_;
  int64_t chunk_;
  int64_t in_chunk_ = 0;  // tokens since the last chunk ended
  double y_ = 0, y_bound_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_REFERENCE_STATE_UPDATE_TESTUTIL_H_
