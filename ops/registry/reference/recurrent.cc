#include "quern/ops/registry/reference/recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

double Softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
double Silu(double x) { return x / (1 + std::exp(-x)); }
double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// exp(min(x, 0)); NaN for NaN.
double Decay(double x) { return std::exp(x > 0 ? 0.0 : x); }

// Numbers of a state between two tokens, rounded to its dtype.
class Kept {
 public:
  Kept(DType dtype, int64_t n)
      : row_(AnyTensorView(dtype, static_cast<void*>(bytes_), 1, {n}, {1}), 0) {
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  double operator[](int64_t i) const { return double{row_[i]}; }
  void Set(int64_t i, double v) { row_.Set(i, static_cast<float>(v)); }

 private:
  static constexpr size_t kMost = 1024;
  static_assert(DeltaRulePlan::kMaxDk <= kMost &&
                StateUpdatePlan::kMaxState <= kMost);
  alignas(8) char bytes_[4 * kMost];
  ScalarRow row_;
};

// Whether sequence s has a state. `zero`(token) for each of its tokens if not.
template <typename Zero>
bool HasState(const SequenceBatch& batch, int64_t s, int64_t null_slot,
              const Zero& zero) {
  if (batch.begin(s) == batch.end(s)) return false;
  if (batch.source(s) != null_slot) return true;
  for (int64_t t = batch.begin(s); t < batch.end(s); ++t) zero(t);
  return false;
}

// Where token t of sequence s leaves its state; null_slot: nowhere.
int64_t SlotAfter(const SequenceBatch& batch, int64_t s, int64_t t,
                  int64_t null_slot) {
  return batch.drafts() ? batch.destination(s, t - batch.begin(s), null_slot)
                        : batch.source(s);
}

double InverseNorm(const ScalarRow& x, const DeltaRuleSpec& spec) {
  if (spec.norm == DeltaNorm::kNone) return 1.0;
  double sum = 0;
  for (int64_t i = 0; i < spec.dk; ++i) sum += double{x[i]} * double{x[i]};
  return 1 / std::sqrt(sum + double{spec.norm_eps});
}

// A column of a head, in all tokens of sequence s. g(t, i): that of row i of
// the head; beta(t).
template <typename Args, typename G, typename Beta>
void DeltaColumn(const DeltaRuleSpec& spec, const Args& args, int64_t s,
                 int64_t h, int64_t c, const G& g, const Beta& beta_of) {
  const SequenceBatch& batch = args.batch;
  const auto state = [&](int64_t slot, int64_t i) {
    return ScalarRow(args.state, (slot * spec.value_heads + h) * spec.dk + i);
  };
  Kept kept(spec.state_dtype, spec.dk);
  for (int64_t i = 0; i < spec.dk; ++i) {
    kept.Set(i, batch.fresh(s) ? 0.0 : double{state(batch.source(s), i)[c]});
  }
  for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
    const int64_t at = t * spec.value_heads + h;
    const int64_t key_at =
        t * spec.key_heads + h / (spec.value_heads / spec.key_heads);
    const ScalarRow q(args.q, key_at), k(args.k, key_at), v(args.v, at);
    const ScalarRow out(args.out, at);
    const double q_scale = InverseNorm(q, spec) * double{spec.scale};
    const double k_scale = InverseNorm(k, spec);
    const double beta = beta_of(t);
    // A NaN decay makes a state of zeros NaN, too.
    const auto old = [&](int64_t i) { return Decay(g(t, i)) * kept[i]; };
    double sum = 0;
    for (int64_t i = 0; i < spec.dk; ++i) {
      sum += old(i) * double{k[i]} * k_scale;
    }
    const double delta = beta * (double{v[c]} - sum);
    double y = 0;
    for (int64_t i = 0; i < spec.dk; ++i) {
      const double next = old(i) + double{k[i]} * k_scale * delta;
      y += next * double{q[i]} * q_scale;
      kept.Set(i, next);
    }
    out.Set(c, static_cast<float>(y));
    const int64_t slot = SlotAfter(batch, s, t, spec.null_slot);
    for (int64_t i = 0; slot != spec.null_slot && i < spec.dk; ++i) {
      state(slot, i).Set(c, static_cast<float>(kept[i]));
    }
  }
}

// A channel, in all tokens of sequence s.
void ConvChannel(const CausalConv1dSpec& spec, const CausalConv1dArgs& args,
                 int64_t s, int64_t c) {
  const SequenceBatch& batch = args.batch;
  const int64_t history = spec.width - 1;
  // The states of several tokens are rows of a slot that overlap.
  const bool windows = !batch.drafts() && batch.num_accepted_tokens.size() > 0;
  // Input i of the channel, in its slot.
  const bool rows = spec.state_layout == ConvStateLayout::kRows;
  const auto row = [&](int64_t slot, int64_t i) {
    return ScalarRow(args.state, slot * args.state.extent(1) + (rows ? i : c));
  };
  const int64_t first =
      windows ? std::max<int64_t>(batch.accepted(s), 1) - 1 : 0;
  Kept kept(spec.dtype, history);
  for (int64_t i = 0; i < history; ++i) {
    kept.Set(i, batch.fresh(s) ? 0.0
                               : double{row(batch.source(s),
                                            first + i)[rows ? c : first + i]});
  }
  const bool pairs = spec.weight_layout == ConvWeightLayout::kPairs;
  const ScalarRow weight(args.weight, pairs ? 0 : c);
  const auto w = [&](int64_t j) {
    return double{weight[pairs ? ConvPairOffset(c, j) : j]};
  };
  for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    double y = args.bias.rank() == 0 ? 0 : double{ScalarRow(args.bias, 0)[c]};
    for (int64_t i = 0; i < history; ++i) y += w(i) * kept[i];
    y += w(history) * double{x[c]};
    for (int64_t i = 0; i + 1 < history; ++i) kept.Set(i, kept[i + 1]);
    kept.Set(history - 1, double{x[c]});
    if (spec.activation == ConvActivation::kSilu) y = Silu(y);
    out.Set(c, static_cast<float>(y));
    const int64_t slot = SlotAfter(batch, s, t, spec.null_slot);
    const int64_t window = windows ? t - batch.begin(s) : 0;
    for (int64_t i = 0; slot != spec.null_slot && i < history; ++i) {
      row(slot, window + i)
          .Set(rows ? c : window + i, static_cast<float>(kept[i]));
    }
  }
}

// A row of a head, in all tokens of sequence s.
void StateRow(const StateUpdateSpec& spec, const StateUpdateArgs& args,
              int64_t s, int64_t h, int64_t p) {
  const SequenceBatch& batch = args.batch;
  const bool per_row = spec.form == SsmForm::kPerRow;
  const auto number = [&](const AnyTensorView& v) {
    if (v.rank() == 0) return 0.0;
    return double{per_row ? ScalarRow(v, h)[p] : ScalarRow(v, 0)[h]};
  };
  const auto state = [&](int64_t slot) {
    return ScalarRow(args.state, (slot * spec.heads + h) * spec.head_dim + p);
  };
  Kept kept(spec.state_dtype, spec.d_state);
  for (int64_t n = 0; n < spec.d_state; ++n) {
    kept.Set(n, batch.fresh(s) ? 0.0 : double{state(batch.source(s))[n]});
  }
  for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
    const int64_t at = t * spec.heads + h;
    const int64_t group = t * spec.groups + h / (spec.heads / spec.groups);
    const double dt =
        double{per_row ? ScalarRow(args.dt, at)[p] : ScalarRow(args.dt, t)[h]} +
        number(args.dt_bias);
    const double delta = spec.delta == SsmDelta::kSoftplus ? Softplus(dt) : dt;
    const double x = double{ScalarRow(args.x, at)[p]};
    const ScalarRow b(args.b, group), c(args.c, group);
    double y = number(args.d) * x;
    for (int64_t n = 0; n < spec.d_state; ++n) {
      const double a =
          double{per_row ? ScalarRow(args.a, h * spec.head_dim + p)[n]
                         : ScalarRow(args.a, 0)[h]};
      const double next = Decay(a * delta) * kept[n] + double{b[n]} * delta * x;
      y += next * double{c[n]};
      kept.Set(n, next);
    }
    if (args.z.rank() != 0) y *= Silu(double{ScalarRow(args.z, at)[p]});
    ScalarRow(args.out, at).Set(p, static_cast<float>(y));
    const int64_t slot = SlotAfter(batch, s, t, spec.null_slot);
    for (int64_t n = 0; slot != spec.null_slot && n < spec.d_state; ++n) {
      state(slot).Set(n, static_cast<float>(kept[n]));
    }
  }
}

// Zeros in `rows` rows of out that token t has.
void ZeroToken(const AnyTensorView& out, int64_t t, int64_t rows) {
  const int64_t n = out.extent(out.rank() - 1);
  for (int64_t r = 0; r < rows; ++r) {
    const ScalarRow row(out, t * rows + r);
    for (int64_t i = 0; i < n; ++i) row.Set(i, 0.0f);
  }
}

// All columns of all sequences. g(h, t, i) and beta(h, t).
template <typename Args, typename G, typename Beta>
void DeltaHeads(const DeltaRuleSpec& spec, const Args& args, const G& g,
                const Beta& beta) {
  const auto zero = [&](int64_t t) {
    ZeroToken(args.out, t, spec.value_heads);
  };
  for (int64_t s = 0; s < args.batch.sequences(); ++s) {
    if (!HasState(args.batch, s, spec.null_slot, zero)) continue;
    for (int64_t h = 0; h < spec.value_heads; ++h) {
      const auto g_of = [&](int64_t t, int64_t i) { return g(h, t, i); };
      const auto beta_of = [&](int64_t t) { return beta(h, t); };
      for (int64_t c = 0; c < spec.dv; ++c) {
        DeltaColumn(spec, args, s, h, c, g_of, beta_of);
      }
    }
  }
}

// g of head h of token t.
double GateOf(const AnyTensorView& a, const AnyTensorView& a_log,
              const AnyTensorView& dt_bias, int64_t t, int64_t h) {
  const double x =
      double{ScalarRow(a, t)[h]} + double{ScalarRow(dt_bias, 0)[h]};
  return -std::exp(double{ScalarRow(a_log, 0)[h]}) * Softplus(x);
}

}  // namespace

void NativeDeltaRule(const DeltaRuleSpec& spec, const DeltaRuleArgs& args) {
  const bool per_head = spec.decay == DeltaDecay::kPerHead;
  DeltaHeads(
      spec, args,
      [&](int64_t h, int64_t t, int64_t i) {
        return double{per_head
                          ? ScalarRow(args.g, t)[h]
                          : ScalarRow(args.g, t * spec.value_heads + h)[i]};
      },
      [&](int64_t h, int64_t t) { return double{ScalarRow(args.beta, t)[h]}; });
}

void NativeDeltaGates(const DeltaGatesSpec& spec, const DeltaGatesArgs& args) {
  for (int64_t t = 0; t < args.a.extent(0); ++t) {
    for (int64_t h = 0; h < spec.heads; ++h) {
      ScalarRow(args.g, t).Set(h, static_cast<float>(GateOf(
                                      args.a, args.a_log, args.dt_bias, t, h)));
      ScalarRow(args.beta, t)
          .Set(h, static_cast<float>(Sigmoid(double{ScalarRow(args.b, t)[h]})));
    }
  }
}

// The gates are rounded to f32, as the plan's are.
void NativeGatedDeltaRule(const GatedDeltaRuleSpec& spec,
                          const GatedDeltaRuleArgs& args) {
  DeltaHeads(
      spec.rule, args,
      [&](int64_t h, int64_t t, int64_t /*i*/) {
        return double{
            static_cast<float>(GateOf(args.a, args.a_log, args.dt_bias, t, h))};
      },
      [&](int64_t h, int64_t t) {
        return double{
            static_cast<float>(Sigmoid(double{ScalarRow(args.b, t)[h]}))};
      });
}

void NativeCausalConv1d(const CausalConv1dSpec& spec,
                        const CausalConv1dArgs& args) {
  const auto zero = [&](int64_t t) { ZeroToken(args.out, t, 1); };
  for (int64_t s = 0; s < args.batch.sequences(); ++s) {
    if (!HasState(args.batch, s, spec.null_slot, zero)) continue;
    for (int64_t c = 0; c < spec.channels; ++c) ConvChannel(spec, args, s, c);
  }
}

void NativeStateUpdate(const StateUpdateSpec& spec,
                       const StateUpdateArgs& args) {
  const auto zero = [&](int64_t t) { ZeroToken(args.out, t, spec.heads); };
  for (int64_t s = 0; s < args.batch.sequences(); ++s) {
    if (!HasState(args.batch, s, spec.null_slot, zero)) continue;
    for (int64_t h = 0; h < spec.heads; ++h) {
      for (int64_t p = 0; p < spec.head_dim; ++p) {
        StateRow(spec, args, s, h, p);
      }
    }
  }
}

}  // namespace quern
