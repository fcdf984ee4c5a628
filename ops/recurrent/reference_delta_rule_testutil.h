#ifndef QUERN_OPS_RECURRENT_REFERENCE_DELTA_RULE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_REFERENCE_DELTA_RULE_TESTUTIL_H_

// The oracle of the delta rule: the recurrence of one value head in double, one
// token after the other, in the four steps of the formula. Beside it runs a
// bound on the error of a computation in f32 whose state is rounded to
// state_dtype after each token.
//
// The bound: an error e in a column of the state becomes, by the next token,
// (I - beta k k^T) diag(a) e, whose norm is at most max(1, |1 - beta |k|^2|)
// times that of e; and each token adds the roundings of its own arithmetic. So
// a norm per column is carried along. Roundings are counted as 2^-23, twice the
// unit roundoff, which covers the terms of second order.
//
// By chunks, only d has errors inside a chunk: let S' be the state that follows
// exactly from the state before the chunk and the computed d. Then d is that of
// the formula with S', but for the roundings of two chains of sums, over dk and
// over the tokens of the chunk, whose terms add up to |k| . Z at most, where Z
// is the sum of the absolute values of all that was added to the state, each
// decayed. Y is that sum with each term times the relative error of its decay.
// So the error of S' obeys the recurrence above, and the state that is computed
// at the end of a chunk is off S' by the roundings of its own sums.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/reference_rounding_testutil.h"

namespace quern {

struct DeltaRuleToken64 {
  std::vector<double> q, k, v;
  std::vector<double> g;  // one, or dk of them
  double beta = 0;
};

class DeltaRuleReference {
 public:
  // state[dk, dv], by rows. chunk: the bound is that of chunks of so many
  // tokens whose last state is rounded to state_dtype; 1: of token by token.
  DeltaRuleReference(size_t dk, size_t dv, std::vector<double> state,
                     DType state_dtype, bool l2, double scale,
                     int64_t chunk = 1)
      : dk_(dk),
        dv_(dv),
        state_(std::move(state)),
        state_dtype_(state_dtype),
        l2_(l2),
        scale_(scale),
        chunk_(chunk),
        state_bound_(dv, 0.0),
        out_(dv),
        out_bound_(dv) {}

  void Step(const DeltaRuleToken64& token) {
    std::vector<double> k = token.k, q = token.q;
    if (l2_) Normalize(k), Normalize(q);
    for (double& x : q) x *= scale_;
    std::vector<double> a(dk_);
    for (size_t i = 0; i < dk_; ++i) {
      a[i] = std::exp(
          std::min(token.g.size() == 1 ? token.g[0] : token.g[i], 0.0));
    }
    if (chunk_ == 1) {
      for (size_t c = 0; c < dv_; ++c) Column(a, k, q, token, c);
      return;
    }
    if (in_chunk_ == 0) {
      mass_.resize(state_.size());
      for (size_t i = 0; i < mass_.size(); ++i) mass_[i] = std::abs(state_[i]);
      decay_error_.assign(state_.size(), 0.0);
    }
    for (size_t c = 0; c < dv_; ++c) ChunkColumn(a, k, q, token, c);
    if (++in_chunk_ == chunk_) EndChunk();
  }
  // After the last token.
  void Finish() {
    if (chunk_ == 1) return;
    if (in_chunk_ > 0) EndChunk();
    for (size_t c = 0; c < dv_; ++c) {
      double sum = 0;
      for (size_t i = 0; i < dk_; ++i) {
        const double e = RoundingBoundOf(
            state_dtype_, std::abs(state_[i * dv_ + c]) + state_bound_[c]);
        sum += e * e;
      }
      state_bound_[c] += std::sqrt(sum);
    }
  }

  const std::vector<double>& state() const { return state_; }
  const std::vector<double>& out() const { return out_; }
  // |computed - state()| <= this, for each element of column c, after Finish.
  double state_bound(size_t c) const { return state_bound_[c]; }
  // |computed - out()[c]| <= this, before out is rounded to its dtype.
  double out_bound(size_t c) const { return out_bound_[c]; }

 private:
  static constexpr double kEps = 0x1p-23;
  static constexpr double kTiny = 0x1p-140;

  static void Normalize(std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    for (double& v : x) v /= std::sqrt(sum + 1e-6);
  }

  void Column(const std::vector<double>& a, const std::vector<double>& k,
              const std::vector<double>& q, const DeltaRuleToken64& token,
              size_t c) {
    const double n = static_cast<double>(dk_);
    const double k_eps = KeyError();
    const double q_eps = k_eps + kEps;
    double kk = 0, kq = 0, kq_error = 0, ak2 = 0, aq2 = 0, a_eps = 0;
    double sum_k = 0, sum_q = 0, abs_k = 0, abs_q = 0;
    for (size_t i = 0; i < dk_; ++i) {
      const double g = token.g.size() == 1 ? token.g[0] : token.g[i];
      // exp-inl.h: 5 + |x| / 20 units of 2^-24.
      a_eps = std::max(a_eps, (6 + std::min(std::abs(g), 128.0) / 20) * kEps);
      const double s = a[i] * state_[i * dv_ + c];
      kk += k[i] * k[i];
      kq += k[i] * q[i];
      kq_error += std::abs(k[i] * q[i]) * (k_eps + q_eps + n * kEps);
      ak2 += a[i] * a[i] * k[i] * k[i];
      aq2 += a[i] * a[i] * q[i] * q[i];
      sum_k += s * k[i], abs_k += std::abs(s * k[i]);
      sum_q += s * q[i], abs_q += std::abs(s * q[i]);
    }
    const double beta = token.beta, v = token.v[c];
    const double delta = beta * (v - sum_k);
    const double gather = a_eps + (n + 3) * kEps;
    const double delta_error =
        std::abs(beta) * abs_k * (gather + k_eps) +
        2 * kEps * std::abs(beta) * (std::abs(v) + std::abs(sum_k)) + kTiny;
    const double carried = state_bound_[c];
    // The formula takes out from the new state; this is the same number.
    double out = 0, local = 0;
    for (size_t i = 0; i < dk_; ++i) {
      double& s = state_[i * dv_ + c];
      const double kept = a[i] * s, added = k[i] * delta;
      const double error = std::abs(kept) * (a_eps + 2 * kEps) +
                           std::abs(k[i]) * delta_error +
                           std::abs(added) * (k_eps + 3 * kEps) + kTiny;
      s = kept + added;
      out += s * q[i];
      const double all =
          error + RoundingBoundOf(state_dtype_, std::abs(s) + error + carried);
      local += all * all;
    }
    out_[c] = out;
    out_bound_[c] = abs_q * (gather + q_eps) + std::sqrt(aq2) * carried +
                    std::abs(kq) * (delta_error +
                                    std::abs(beta) * std::sqrt(ak2) * carried) +
                    kq_error * std::abs(delta) +
                    3 * kEps * (std::abs(sum_q) + std::abs(kq * delta)) + kTiny;
    // Along k; across it nothing changes.
    const double along = (1 - beta * kk) * (1 - beta * kk);
    state_bound_[c] =
        std::sqrt(std::max(1.0, along)) * (1 + 8 * kEps) * carried +
        std::sqrt(local);
  }

  // The norm's sum of squares counts half, by the root.
  double KeyError() const {
    return l2_ ? (static_cast<double>(dk_) / 2 + 4) * kEps : 0;
  }

  void ChunkColumn(const std::vector<double>& a, const std::vector<double>& k,
                   const std::vector<double>& q, const DeltaRuleToken64& token,
                   size_t c) {
    const double k_eps = KeyError(), q_eps = k_eps + kEps;
    // A score is a sum over dk, and the sums that take it go over dk and over
    // the chunk; a dozen factors on the way.
    const double n = static_cast<double>(dk_);
    const double chain = (2 * n + static_cast<double>(chunk_) + 12) * kEps;
    double sum_k = 0, kk = 0, qq = 0, mass_k = 0, error_k = 0;
    for (size_t i = 0; i < dk_; ++i) {
      const double g = token.g.size() == 1 ? token.g[0] : token.g[i];
      double& mass = mass_[i * dv_ + c];
      double& error = decay_error_[i * dv_ + c];
      // The decay's error, as in Column, and the product that takes it.
      error = a[i] * (error +
                      mass * (7 + std::min(std::abs(g), 128.0) / 20) * kEps) +
              kTiny;
      mass *= a[i];
      state_[i * dv_ + c] *= a[i];
      sum_k += state_[i * dv_ + c] * k[i];
      kk += k[i] * k[i];
      qq += q[i] * q[i];
      mass_k += std::abs(k[i]) * mass;
      error_k += std::abs(k[i]) * error;
    }
    const double delta = token.beta * (token.v[c] - sum_k);
    const double local =
        std::abs(token.beta) * (mass_k * (chain + 2 * k_eps) + error_k +
                                std::abs(token.v[c]) * chain) +
        kTiny;
    const double along = (1 - token.beta * kk) * (1 - token.beta * kk);
    double& carried = state_bound_[c];
    carried = std::sqrt(std::max(1.0, along)) * (1 + 8 * kEps) * carried +
              std::sqrt(kk) * local;
    double out = 0, mass_q = 0, error_q = 0;
    for (size_t i = 0; i < dk_; ++i) {
      double& s = state_[i * dv_ + c];
      s += k[i] * delta;
      mass_[i * dv_ + c] += std::abs(k[i] * delta);
      out += s * q[i];
      mass_q += std::abs(q[i]) * mass_[i * dv_ + c];
      error_q += std::abs(q[i]) * decay_error_[i * dv_ + c];
    }
    out_[c] = out;
    out_bound_[c] = mass_q * (chain + k_eps + q_eps) + error_q +
                    std::sqrt(qq) * carried + kTiny;
  }

  void EndChunk() {
    in_chunk_ = 0;
    const double chain = (static_cast<double>(chunk_) + 6) * kEps + KeyError();
    for (size_t c = 0; c < dv_; ++c) {
      double sum = 0;
      for (size_t i = c; i < state_.size(); i += dv_) {
        const double e = mass_[i] * chain + decay_error_[i] + kTiny;
        sum += e * e;
      }
      state_bound_[c] += std::sqrt(sum);
    }
  }

  size_t dk_, dv_;
  std::vector<double> state_;
  DType state_dtype_;
  bool l2_;
  double scale_;
  int64_t chunk_;
  int64_t in_chunk_ = 0;                    // tokens since the last chunk ended
  std::vector<double> mass_, decay_error_;  // Z and Y
  std::vector<double> state_bound_, out_, out_bound_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_REFERENCE_DELTA_RULE_TESTUTIL_H_
