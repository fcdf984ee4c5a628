#ifndef QUERN_OPS_RECURRENT_TESTING_DELTA_RULE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_DELTA_RULE_TESTUTIL_H_

// The arguments of one call of the delta rule, between guard pages and with
// poison between rows, and what the oracle says of them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/testing/reference_delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"

namespace quern {

class DeltaRuleData {
 public:
  // Rows of `pad` more elements than they need.
  struct Values {
    Doubles q, k, v, g, beta, state;
  };
  DeltaRuleData(const DeltaRuleSpec& spec, int64_t tokens, int64_t slots,
                const Values& values, int64_t pad = 3)
      : spec_(spec),
        tokens_(tokens),
        slots_(slots),
        q_(Make(spec.dtype, values.q, tokens, spec.key_heads * spec.dk, pad)),
        k_(Make(spec.dtype, values.k, tokens, spec.key_heads * spec.dk, pad)),
        v_(Make(spec.dtype, values.v, tokens, spec.value_heads * spec.dv, pad)),
        g_(Make(spec.g_dtype, values.g, tokens, spec.value_heads * per_head(),
                pad)),
        beta_(
            Make(spec.beta_dtype, values.beta, tokens, spec.value_heads, pad)),
        state_(Make(spec.state_dtype, values.state,
                    slots * spec.value_heads * spec.dk, spec.dv, pad)),
        out_(spec.dtype, tokens, spec.value_heads * spec.dv,
             spec.value_heads * spec.dv + pad) {}

  // Numbers in [-1, 1), decays in [-1, 0), beta in [0, 1). Keys that are not
  // normalised are no longer than 1, so that states do not grow.
  static Values Random(const DeltaRuleSpec& spec, int64_t tokens, int64_t slots,
                       Rng& rng) {
    const auto reals = [&](int64_t n, double lo, double hi) {
      return ToDoubles(UniformReals(rng, n, lo, hi));
    };
    const int64_t per_head = spec.decay == DeltaDecay::kPerHead ? 1 : spec.dk;
    const double most = spec.norm == DeltaNorm::kL2
                            ? 1
                            : 1 / std::sqrt(static_cast<double>(spec.dk));
    return {reals(tokens * spec.key_heads * spec.dk, -1, 1),
            reals(tokens * spec.key_heads * spec.dk, -most, most),
            reals(tokens * spec.value_heads * spec.dv, -1, 1),
            reals(tokens * spec.value_heads * per_head, -1, 0),
            reals(tokens * spec.value_heads, 0, 1),
            reals(slots * spec.value_heads * spec.dk * spec.dv, -1, 1)};
  }

  DeltaRuleArgs args(const Sequences& sequences) const {
    const DeltaRuleSpec& s = spec_;
    DeltaRuleArgs a;
    a.q = q_.heads(s.key_heads, s.dk, s.dk);
    a.k = k_.heads(s.key_heads, s.dk, s.dk);
    a.v = v_.heads(s.value_heads, s.dv, s.dv);
    a.g = s.decay == DeltaDecay::kPerHead ? g_.view()
                                          : g_.heads(s.value_heads, s.dk, s.dk);
    a.beta = beta_.view();
    const AnyTensorView rows = state_.view();
    const int64_t row = rows.stride(0);
    a.state = AnyTensorView(s.state_dtype, rows.mutable_data(), 4,
                            {slots_, s.value_heads, s.dk, s.dv},
                            {s.value_heads * s.dk * row, s.dk * row, row, 1});
    a.batch = sequences.batch();
    a.out = out_.heads(s.value_heads, s.dv, s.dv);
    return a;
  }

  const AnyMatrix& state() const { return state_; }
  const AnyMatrix& out() const { return out_; }
  const AnyMatrix& v() const { return v_; }

  // What the state and out should be, and how far they may be off. `before`:
  // the state that the call found. Elements that no sequence has keep their
  // state, and NaN, the poison, in out.
  struct Expected {
    Doubles state, state_bounds, out, out_bounds;
  };
  Expected Expect(const Sequences& sequences, const Doubles& before) const {
    const DeltaRuleSpec& s = spec_;
    const double nan = std::nan("");
    const auto count = static_cast<size_t>(tokens_ * s.value_heads * s.dv);
    Expected want = {before, Doubles(before.size(), 0.0), Doubles(count, nan),
                     Doubles(count, 0.0)};
    const SequenceBatch batch = sequences.batch();
    for (int64_t i = 0; i < batch.sequences(); ++i) {
      for (int64_t h = 0; h < s.value_heads; ++h) {
        ExpectHead(batch, i, h, want);
      }
    }
    return want;
  }

  void ExpectResults(const Sequences& sequences, const Doubles& before) const {
    const Expected want = Expect(sequences, before);
    // Where a NaN is expected there is no distance.
    const auto bound = [](double x, double error) {
      return std::isnan(x) ? 0.0 : error;
    };
    EXPECT_TRUE(AllWithin(out_.doubles(), want.out, [&](double x, int64_t i) {
      const double e = want.out_bounds[static_cast<size_t>(i)];
      return bound(x, e + ResultBound(spec_.dtype, std::abs(x) + e, 0));
    }));
    EXPECT_TRUE(
        AllWithin(state_.doubles(), want.state, [&](double x, int64_t i) {
          return bound(x, want.state_bounds[static_cast<size_t>(i)]);
        }));
  }

 private:
  int64_t per_head() const {
    return spec_.decay == DeltaDecay::kPerHead ? 1 : spec_.dk;
  }
  static AnyMatrix Make(DType dtype, const Doubles& values, int64_t rows,
                        int64_t cols, int64_t pad) {
    return AnyMatrix(dtype, values, rows, cols, cols + pad);
  }
  static Doubles Part(const Doubles& all, int64_t at, int64_t n) {
    return Doubles(all.begin() + at, all.begin() + at + n);
  }

  // Tokens of a chunk of a sequence, 1 where it goes token by token.
  int64_t Chunk(int64_t tokens) const {
    if (tokens < DeltaRulePlan::kChunkedFrom) return 1;
    return spec_.chunk == 0 ? DeltaRulePlan::kChunk : spec_.chunk;
  }

  void ExpectHead(const SequenceBatch& batch, int64_t sequence, int64_t h,
                  Expected& want) const {
    const DeltaRuleSpec& s = spec_;
    const int64_t slot = batch.state_indices[sequence];
    const int64_t begin = batch.begin(sequence), end = batch.end(sequence);
    const int64_t row = s.value_heads * s.dv;
    if (slot == s.null_slot) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t c = 0; c < s.dv; ++c) {
          want.out[static_cast<size_t>(t * row + h * s.dv + c)] = 0;
        }
      }
      return;
    }
    if (begin == end) return;
    const int64_t size = s.dk * s.dv;
    const int64_t at = (slot * s.value_heads + h) * size;
    DeltaRuleReference reference(
        static_cast<size_t>(s.dk), static_cast<size_t>(s.dv),
        batch.fresh(sequence) ? Doubles(static_cast<size_t>(size))
                              : Part(want.state, at, size),
        s.state_dtype, s.norm == DeltaNorm::kL2,
        s.scale == 0 ? 1 / std::sqrt(static_cast<double>(s.dk))
                     : double{s.scale},
        Chunk(end - begin), double{s.norm_eps});
    const Doubles q = q_.doubles(), k = k_.doubles(), v = v_.doubles();
    const Doubles g = g_.doubles(), beta = beta_.doubles();
    const int64_t key = h / (s.value_heads / s.key_heads);
    for (int64_t t = begin; t < end; ++t) {
      DeltaRuleToken64 token;
      token.q = Part(q, (t * s.key_heads + key) * s.dk, s.dk);
      token.k = Part(k, (t * s.key_heads + key) * s.dk, s.dk);
      token.v = Part(v, t * row + h * s.dv, s.dv);
      token.g = Part(g, (t * s.value_heads + h) * per_head(), per_head());
      token.beta = beta[static_cast<size_t>(t * s.value_heads + h)];
      reference.Step(token);
      for (int64_t c = 0; c < s.dv; ++c) {
        const auto o = static_cast<size_t>(t * row + h * s.dv + c);
        want.out[o] = reference.out()[static_cast<size_t>(c)];
        want.out_bounds[o] = reference.out_bound(static_cast<size_t>(c));
      }
    }
    reference.Finish();
    for (int64_t i = 0; i < size; ++i) {
      const auto e = static_cast<size_t>(at + i);
      want.state[e] = reference.state()[static_cast<size_t>(i)];
      want.state_bounds[e] =
          reference.state_bound(static_cast<size_t>(i % s.dv));
    }
  }

  DeltaRuleSpec spec_;
  int64_t tokens_, slots_;
  AnyMatrix q_, k_, v_, g_, beta_, state_, out_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_DELTA_RULE_TESTUTIL_H_
