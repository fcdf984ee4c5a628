#ifndef QUERN_OPS_MIXER_BOUNDED_RECURRENCES_TESTUTIL_H_
#define QUERN_OPS_MIXER_BOUNDED_RECURRENCES_TESTUTIL_H_

// The recurrences and gated norms of the layers' oracles, one token at a time,
// by the formulas of ops/recurrent and ops/norm.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/ops/mixer/bounded_testutil.h"

namespace quern {

// One row of a state update: state[d_state] moves on and is rounded; y before
// it is rounded. a: the rate of each element.
inline Bounded BoundedStateRow(Bounded x, Bounded dt, double bias, double d,
                               const BoundedRow& a, const BoundedRow& b,
                               const BoundedRow& c, DType state_dtype,
                               Bounded* state) {
  const Bounded delta = BoundedSoftplus(dt + Bounded{bias, 0});
  BoundedRow fresh;
  for (size_t n = 0; n < b.size(); ++n) {
    fresh.push_back(BoundedDecay(a[n] * delta) * state[n] + b[n] * (delta * x));
    state[n] = Rounded(state_dtype, fresh[n]);
  }
  return Dot(fresh, c, Bounded{d, 0} * x);
}

// One head of the delta rule: state[dk, dv] moves on and is rounded; y[dv]
// before it is rounded. k and q are normalised here.
inline BoundedRow BoundedDeltaHead(BoundedRow q, BoundedRow k,
                                   const BoundedRow& v, Bounded g, Bounded beta,
                                   DType state_dtype, Bounded* state) {
  const auto normalise = [](BoundedRow& row, double scale) {
    const Bounded inverse =
        BoundedInverseNorm(row, 1, 1e-6) * Bounded{scale, 0};
    for (Bounded& x : row) x = x * inverse;
  };
  const size_t dk = k.size(), dv = v.size();
  normalise(k, 1);
  normalise(q, 1 / std::sqrt(static_cast<double>(dk)));
  const Bounded decay = BoundedDecay(g);
  BoundedRow y;
  for (size_t j = 0; j < dv; ++j) {
    BoundedRow column;
    for (size_t i = 0; i < dk; ++i) {
      column.push_back(decay * state[i * dv + j]);
    }
    const Bounded delta = beta * (v[j] - Dot(column, k));
    for (size_t i = 0; i < dk; ++i) {
      column[i] = column[i] + k[i] * delta;
      state[i * dv + j] = Rounded(state_dtype, column[i]);
    }
    // The kernel adds (k . q) delta to a product with the old state: the same
    // number, with as many roundings again.
    const Bounded out = Dot(column, q);
    y.push_back({out.value, 2 * out.error});
  }
  return y;
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_BOUNDED_RECURRENCES_TESTUTIL_H_
