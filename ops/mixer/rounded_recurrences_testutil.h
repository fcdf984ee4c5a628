#ifndef QUERN_OPS_MIXER_ROUNDED_RECURRENCES_TESTUTIL_H_
#define QUERN_OPS_MIXER_ROUNDED_RECURRENCES_TESTUTIL_H_

// The recurrences of ops/recurrent on rounded inputs, in double, with a state
// that is rounded as the operators round theirs: what Bounded::rounded
// (ops/mixer/bounded_testutil.h) is after a recurrence.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/recurrent/testing/reference_delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"
#include "quern/ops/recurrent/testing/reference_state_update_testutil.h"

namespace quern {

// The parts of some numbers.
struct SplitRow {
  explicit SplitRow(const BoundedRow& row) {
    for (const Bounded& x : row) {
      values.push_back(x.value);
      errors.push_back(x.error);
      rounded.push_back(x.rounded);
    }
  }
  std::vector<double> values, errors, rounded;
};

// What one row of a state update has for a token, with bounds, and rounded.
struct StateUpdateTokens {
  // All but the rates.
  StateUpdateTokens(Bounded x, Bounded dt, const BoundedRow& b,
                    const BoundedRow& c) {
    const SplitRow bs(b), cs(c);
    bounded.x = x.value, bounded.x_error = x.error, rounded.x = x.rounded;
    bounded.dt = dt.value, bounded.dt_error = dt.error;
    rounded.dt = dt.rounded;
    bounded.b = bs.values, bounded.b_error = bs.errors, rounded.b = bs.rounded;
    bounded.c = cs.values, bounded.c_error = cs.errors, rounded.c = cs.rounded;
    bounded.softplus = rounded.softplus = true;
  }
  void SetRates(const std::vector<double>& a, double d, double bias) {
    bounded.a = rounded.a = a;
    bounded.d = rounded.d = d;
    bounded.bias = rounded.bias = bias;
  }
  void SetGate(Bounded z) {
    bounded.gated = rounded.gated = true;
    bounded.z = z.value, bounded.z_error = z.error, rounded.z = z.rounded;
  }

  StateUpdateToken64 bounded, rounded;
};

// What a value head of the delta rule has for a token.
struct DeltaRuleTokens {
  DeltaRuleTokens(const BoundedRow& q, const BoundedRow& k, const BoundedRow& v,
                  Bounded g, Bounded beta) {
    const SplitRow qs(q), ks(k), vs(v);
    bounded.q = qs.values, bounded.q_error = qs.errors, rounded.q = qs.rounded;
    bounded.k = ks.values, bounded.k_error = ks.errors, rounded.k = ks.rounded;
    bounded.v = vs.values, bounded.v_error = vs.errors, rounded.v = vs.rounded;
    bounded.g = {g.value}, bounded.g_error = {g.error}, rounded.g = {g.rounded};
    bounded.beta = beta.value, bounded.beta_error = beta.error;
    rounded.beta = beta.rounded;
  }

  DeltaRuleToken64 bounded, rounded;
};

// The type of a state after token t: between the tokens of chunks it is f32.
inline DType StateTypeAfter(size_t t, size_t tokens, DType state_dtype,
                            int64_t chunk) {
  return chunk == 1 || t + 1 == tokens ? state_dtype : DType::kF32;
}
inline std::vector<double> NearestTo(DType dtype, std::vector<double> numbers) {
  for (double& x : numbers) x = NearestOf(dtype, x);
  return numbers;
}

// The outputs of one row of a state update. state: [d_state], moves on.
inline std::vector<double> RoundedStateRow(
    const std::vector<StateUpdateTokens>& tokens, DType state_dtype,
    int64_t chunk, std::vector<double>& state) {
  std::vector<double> y;
  for (size_t t = 0; t < tokens.size(); ++t) {
    StateUpdateReference reference(state, DType::kF32);
    reference.Step(tokens[t].rounded);
    y.push_back(reference.y());
    state = NearestTo(StateTypeAfter(t, tokens.size(), state_dtype, chunk),
                      reference.row());
  }
  return y;
}

// The outputs of one value head. state: [dk, dv], moves on.
inline std::vector<std::vector<double>> RoundedDeltaHead(
    const std::vector<DeltaRuleTokens>& tokens, size_t dk, size_t dv,
    double scale, DType state_dtype, int64_t chunk,
    std::vector<double>& state) {
  std::vector<std::vector<double>> y;
  for (size_t t = 0; t < tokens.size(); ++t) {
    DeltaRuleReference reference(dk, dv, state, DType::kF32, /*l2=*/true,
                                 scale);
    reference.Step(tokens[t].rounded);
    y.push_back(reference.out());
    state = NearestTo(StateTypeAfter(t, tokens.size(), state_dtype, chunk),
                      reference.state());
  }
  return y;
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_ROUNDED_RECURRENCES_TESTUTIL_H_
