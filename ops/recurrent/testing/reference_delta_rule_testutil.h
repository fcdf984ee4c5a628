#ifndef QUERN_OPS_RECURRENT_TESTING_REFERENCE_DELTA_RULE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_REFERENCE_DELTA_RULE_TESTUTIL_H_

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
//
// Inputs may be off themselves. The recurrence of the inputs that the kernel is
// given then differs from that of the token's, by a norm per column, too: with
// T the decayed column and d = beta (v - k . T), the new column (I - beta k
// k^T) T + beta k v differs by what the matrix leaves of the difference of T,
// by |k| times that of d at the same T, and by |d| times that of k. The bounds
// above hold for the recurrence of the kernel's inputs, so they take magnitudes
// that include these differences.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"

namespace quern {

struct DeltaRuleToken64 {
  std::vector<double> q, k, v;
  std::vector<double> g;  // one, or dk of them
  double beta = 0;
  // How far the numbers above may be off those that the kernel is given; empty:
  // exact.
  std::vector<double> q_error, k_error, v_error, g_error;
  double beta_error = 0;
};

class DeltaRuleReference {
 public:
  // state[dk, dv], by rows. chunk: the bound is that of chunks of so many
  // tokens whose last state is rounded to state_dtype; 1: of token by token.
  DeltaRuleReference(size_t dk, size_t dv, std::vector<double> state,
                     DType state_dtype, bool l2, double scale,
                     int64_t chunk = 1, double norm_eps = 1e-6)
      : dk_(dk),
        dv_(dv),
        state_(std::move(state)),
        state_dtype_(state_dtype),
        l2_(l2),
        scale_(scale),
        chunk_(chunk),
        norm_eps_(norm_eps),
        state_bound_(dv, 0.0),
        moved_(dv, 0.0),
        out_(dv),
        out_bound_(dv) {}

  void Step(const DeltaRuleToken64& token) {
    Inputs in;
    in.k = token.k, in.q = token.q;
    in.k_moved = Moved(token.k, token.k_error);
    in.q_moved = Moved(token.q, token.q_error) * std::abs(scale_);
    if (l2_) Normalize(in.k), Normalize(in.q);
    for (double& x : in.q) x *= scale_;
    in.k_norm = Norm(in.k), in.q_norm = Norm(in.q);
    for (size_t i = 0; i < dk_; ++i) {
      const size_t at = token.g.size() == 1 ? 0 : i;
      const double error = token.g_error.empty() ? 0 : token.g_error[at];
      const double a = std::exp(std::min(token.g[at], 0.0));
      const double moved = std::min(1.0, Times(a, std::expm1(error)));
      in.a.push_back(a);
      in.a_moved.push_back(moved);
      in.a_reach.push_back(std::min(1.0, a + moved));
      in.g_reach.push_back(std::abs(token.g[at]) + error);
    }
    if (chunk_ > 1 && in_chunk_ == 0) BeginChunk();
    for (size_t c = 0; c < dv_; ++c) {
      const Moves moves = MovesOf(in, token, c);
      if (chunk_ == 1) {
        Column(in, moves, token, c);
      } else {
        ChunkColumn(in, moves, token, c);
      }
      moved_[c] = moves.state;
      out_bound_[c] += moves.state == 0 && in.q_moved == 0
                           ? 0
                           : (in.q_norm + in.q_moved) * moves.state +
                                 in.q_moved * ColumnNorm(c);
    }
    if (chunk_ > 1 && ++in_chunk_ == chunk_) EndChunk();
  }
  // After the last token.
  void Finish() {
    if (chunk_ == 1) return;
    if (in_chunk_ > 0) EndChunk();
    for (size_t c = 0; c < dv_; ++c) {
      double sum = 0;
      for (size_t i = 0; i < dk_; ++i) {
        const double e =
            RoundingBoundOf(state_dtype_, std::abs(state_[i * dv_ + c]) +
                                              moved_[c] + state_bound_[c]);
        sum += e * e;
      }
      state_bound_[c] += std::sqrt(sum);
    }
  }

  const std::vector<double>& state() const { return state_; }
  const std::vector<double>& out() const { return out_; }
  // |computed - state()| <= this, for each element of column c, after Finish.
  double state_bound(size_t c) const { return state_bound_[c] + moved_[c]; }
  // |computed - out()[c]| <= this, before out is rounded to its dtype.
  double out_bound(size_t c) const { return out_bound_[c]; }

 private:
  static constexpr double kEps = 0x1p-23;
  static constexpr double kTiny = 0x1p-140;

  void Normalize(std::vector<double>& x) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    for (double& v : x) v /= std::sqrt(sum + norm_eps_);
  }

  // A token's inputs, normalised, and what their errors may make of them.
  struct Inputs {
    std::vector<double> a, k, q;
    std::vector<double> a_moved, a_reach, g_reach;
    double k_norm = 0, q_norm = 0;
    double k_moved = 0, q_moved = 0;  // norms of differences
  };
  // What errors of the inputs make of a column: norms of the difference of the
  // decayed column and of the new one; the difference of d; and the norm of
  // (I - beta k k^T), which every error is multiplied by.
  struct Moves {
    double decayed = 0, state = 0, delta = 0;
    double decayed_norm = 0;  // of the decayed column itself
    double along = 1;
  };

  // 0 where an input is exact and the other factor infinite.
  static double Times(double a, double b) {
    return a == 0 || b == 0 ? 0 : a * b;
  }
  static double Norm(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum);
  }
  double ColumnNorm(size_t c) const {
    double sum = 0;
    for (size_t i = c; i < state_.size(); i += dv_)
      sum += state_[i] * state_[i];
    return std::sqrt(sum);
  }
  // How far a key or a query may be off, once it is normalised: the slope of x
  // / sqrt(|x|^2 + norm_eps) is at most the inverse of the root.
  double Moved(const std::vector<double>& x,
               const std::vector<double>& error) const {
    if (error.empty()) return 0;
    const double size = Norm(error);
    if (!l2_) return size;
    const double least = std::max(0.0, Norm(x) - size);
    return size / std::sqrt(least * least + norm_eps_);
  }

  Moves MovesOf(const Inputs& in, const DeltaRuleToken64& token,
                size_t c) const {
    Moves m;
    double decay = 0, squares = 0, sum = 0, norm = 0;
    for (size_t i = 0; i < dk_; ++i) {
      const double s = state_[i * dv_ + c];
      decay = std::max(decay, in.a_reach[i]);
      const double moved = Times(in.a_moved[i], s);
      squares += moved * moved;
      const double t = in.a[i] * s;
      sum += in.k[i] * t;
      norm += t * t;
    }
    const double kk = in.k_norm * in.k_norm;
    const double k_reach = in.k_norm + in.k_moved;
    const double beta = std::abs(token.beta) + token.beta_error;
    const double v_error = token.v_error.empty() ? 0 : token.v_error[c];
    // The eigenvalue along k; the others are 1.
    const double along = 1 - token.beta * kk;
    m.along = std::max(
        1.0, std::sqrt(along * along) +
                 (beta * k_reach * k_reach - std::abs(token.beta) * kk));
    m.decayed = Times(decay, moved_[c]) + std::sqrt(squares);
    m.decayed_norm = std::sqrt(norm);
    const double rest = token.v[c] - sum;
    const double delta =
        Times(beta, v_error + Times(in.k_moved, m.decayed_norm)) +
        Times(token.beta_error, std::abs(rest));
    m.state = Times(m.along, m.decayed) + Times(k_reach, delta) +
              Times(in.k_moved, std::abs(token.beta * rest));
    m.delta = delta + Times(beta, Times(k_reach, m.decayed));
    return m;
  }

  void Column(const Inputs& in, const Moves& moves,
              const DeltaRuleToken64& token, size_t c) {
    const double n = static_cast<double>(dk_);
    const double k_eps = KeyError();
    const double q_eps = k_eps + kEps;
    double kq = 0, kq_error = 0, ak2 = 0, aq2 = 0, a_eps = 0;
    double sum_k = 0, sum_q = 0, abs_k = 0, abs_q = 0;
    for (size_t i = 0; i < dk_; ++i) {
      // exp-inl.h: 5 + |x| / 20 units of 2^-24.
      a_eps = std::max(a_eps, (6 + std::min(in.g_reach[i], 128.0) / 20) * kEps);
      const double s = in.a[i] * state_[i * dv_ + c];
      const double s_reach = in.a_reach[i] * Reach(c, i);
      const double k = std::abs(in.k[i]) + in.k_moved;
      const double q = std::abs(in.q[i]) + in.q_moved;
      kq += in.k[i] * in.q[i];
      kq_error += k * q * (k_eps + q_eps + n * kEps);
      ak2 += in.a_reach[i] * in.a_reach[i] * k * k;
      aq2 += in.a_reach[i] * in.a_reach[i] * q * q;
      sum_k += s * in.k[i], abs_k += s_reach * k;
      sum_q += s * in.q[i], abs_q += s_reach * q;
    }
    const double k_reach = in.k_norm + in.k_moved;
    const double q_reach = in.q_norm + in.q_moved;
    const double t_reach = moves.decayed_norm + moves.decayed;
    const double kq_reach =
        std::abs(kq) + Excess(k_reach, q_reach, in.k_norm, in.q_norm);
    const double sum_k_reach =
        std::abs(sum_k) +
        Excess(k_reach, t_reach, in.k_norm, moves.decayed_norm);
    const double sum_q_reach =
        std::abs(sum_q) +
        Excess(q_reach, t_reach, in.q_norm, moves.decayed_norm);
    const double beta = std::abs(token.beta) + token.beta_error;
    const double v =
        std::abs(token.v[c]) + (token.v_error.empty() ? 0 : token.v_error[c]);
    const double delta = token.beta * (token.v[c] - sum_k);
    const double delta_reach = std::abs(delta) + moves.delta;
    const double gather = a_eps + (n + 3) * kEps;
    const double delta_error = beta * abs_k * (gather + k_eps) +
                               2 * kEps * beta * (v + sum_k_reach) + kTiny;
    const double carried = state_bound_[c];
    // The formula takes out from the new state; this is the same number.
    double out = 0, local = 0;
    for (size_t i = 0; i < dk_; ++i) {
      const double k = std::abs(in.k[i]) + in.k_moved;
      const double error = in.a_reach[i] * Reach(c, i) * (a_eps + 2 * kEps) +
                           k * delta_error +
                           k * delta_reach * (k_eps + 3 * kEps) + kTiny;
      double& s = state_[i * dv_ + c];
      s = in.a[i] * s + in.k[i] * delta;
      out += s * in.q[i];
      const double all =
          error + RoundingBoundOf(state_dtype_,
                                  std::abs(s) + moves.state + error + carried);
      local += all * all;
    }
    out_[c] = out;
    out_bound_[c] = abs_q * (gather + q_eps) + std::sqrt(aq2) * carried +
                    kq_reach * (delta_error + beta * std::sqrt(ak2) * carried) +
                    kq_error * delta_reach +
                    3 * kEps * (sum_q_reach + kq_reach * delta_reach) + kTiny;
    state_bound_[c] = moves.along * (1 + 8 * kEps) * carried + std::sqrt(local);
  }

  // The largest magnitude that element [i, c] of the kernel's state may have,
  // but for its roundings.
  double Reach(size_t c, size_t i) const {
    return std::abs(state_[i * dv_ + c]) + moved_[c];
  }
  // How much larger than x y a product of reaches is; 0 where both are exact.
  static double Excess(double x_reach, double y_reach, double x, double y) {
    return x_reach == x && y_reach == y ? 0 : x_reach * y_reach - x * y;
  }

  // The norm's sum of squares counts half, by the root.
  double KeyError() const {
    return l2_ ? (static_cast<double>(dk_) / 2 + 4) * kEps : 0;
  }

  void BeginChunk() {
    mass_.resize(state_.size());
    for (size_t i = 0; i < mass_.size(); ++i) {
      mass_[i] = std::abs(state_[i]) + moved_[i % dv_];
    }
    decay_error_.assign(state_.size(), 0.0);
  }

  void ChunkColumn(const Inputs& in, const Moves& moves,
                   const DeltaRuleToken64& token, size_t c) {
    const double k_eps = KeyError(), q_eps = k_eps + kEps;
    // A score is a sum over dk, and the sums that take it go over dk and over
    // the chunk; a dozen factors on the way.
    const double n = static_cast<double>(dk_);
    const double chain = (2 * n + static_cast<double>(chunk_) + 12) * kEps;
    double sum_k = 0, mass_k = 0, error_k = 0;
    for (size_t i = 0; i < dk_; ++i) {
      double& mass = mass_[i * dv_ + c];
      double& error = decay_error_[i * dv_ + c];
      const double k = std::abs(in.k[i]) + in.k_moved;
      // The decay's error, as in Column, and the product that takes it.
      error = in.a_reach[i] *
                  (error +
                   mass * (7 + std::min(in.g_reach[i], 128.0) / 20) * kEps) +
              kTiny;
      mass *= in.a_reach[i];
      state_[i * dv_ + c] *= in.a[i];
      sum_k += state_[i * dv_ + c] * in.k[i];
      mass_k += k * mass;
      error_k += k * error;
    }
    const double beta = std::abs(token.beta) + token.beta_error;
    const double v =
        std::abs(token.v[c]) + (token.v_error.empty() ? 0 : token.v_error[c]);
    const double delta = token.beta * (token.v[c] - sum_k);
    const double delta_reach = std::abs(delta) + moves.delta;
    const double local =
        beta * (mass_k * (chain + 2 * k_eps) + error_k + v * chain) + kTiny;
    double& carried = state_bound_[c];
    carried = moves.along * (1 + 8 * kEps) * carried +
              (in.k_norm + in.k_moved) * local;
    double out = 0, mass_q = 0, error_q = 0;
    for (size_t i = 0; i < dk_; ++i) {
      const double q = std::abs(in.q[i]) + in.q_moved;
      double& s = state_[i * dv_ + c];
      s += in.k[i] * delta;
      mass_[i * dv_ + c] += (std::abs(in.k[i]) + in.k_moved) * delta_reach;
      out += s * in.q[i];
      mass_q += q * mass_[i * dv_ + c];
      error_q += q * decay_error_[i * dv_ + c];
    }
    out_[c] = out;
    out_bound_[c] = mass_q * (chain + k_eps + q_eps) + error_q +
                    (in.q_norm + in.q_moved) * carried + kTiny;
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
  double norm_eps_;
  int64_t in_chunk_ = 0;                    // tokens since the last chunk ended
  std::vector<double> mass_, decay_error_;  // Z and Y
  // A number for each column: bounds, and what errors of the inputs make.
  std::vector<double> state_bound_, moved_, out_, out_bound_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_REFERENCE_DELTA_RULE_TESTUTIL_H_
