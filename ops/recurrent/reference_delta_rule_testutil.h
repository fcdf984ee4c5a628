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
  // state[dk, dv], by rows.
  DeltaRuleReference(size_t dk, size_t dv, std::vector<double> state,
                     DType state_dtype, bool l2, double scale)
      : dk_(dk),
        dv_(dv),
        state_(std::move(state)),
        state_dtype_(state_dtype),
        l2_(l2),
        scale_(scale),
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
    for (size_t c = 0; c < dv_; ++c) Column(a, k, q, token, c);
  }

  const std::vector<double>& state() const { return state_; }
  const std::vector<double>& out() const { return out_; }
  // |computed - state()| <= this, for each element of column c.
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
    // The norm's sum of squares counts half, by the root.
    const double n = static_cast<double>(dk_);
    const double k_eps = l2_ ? (n / 2 + 4) * kEps : 0;
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

  size_t dk_, dv_;
  std::vector<double> state_;
  DType state_dtype_;
  bool l2_;
  double scale_;
  std::vector<double> state_bound_, out_, out_bound_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_REFERENCE_DELTA_RULE_TESTUTIL_H_
