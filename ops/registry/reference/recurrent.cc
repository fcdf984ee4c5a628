#include "quern/ops/registry/reference/recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

double Softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
double Silu(double x) { return x / (1 + std::exp(-x)); }

// exp(min(x, 0)); NaN for NaN.
double Decay(double x) { return std::exp(x > 0 ? 0.0 : x); }

void ZeroRow(const ScalarRow& row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row.Set(i, 0.0f);
}

// do_token(sequence, token, whether the state holds nothing yet) for every
// token of sequences that have a slot; skip(token) for those of sequences that
// have none.
template <typename DoToken, typename Skip>
void ForTokens(const SequenceBatch& batch, int64_t null_slot,
               const DoToken& do_token, const Skip& skip) {
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
      if (batch.state_indices[s] == null_slot) {
        skip(t);
      } else {
        do_token(s, t, batch.fresh(s) && t == batch.begin(s));
      }
    }
  }
}

double InverseNorm(const ScalarRow& x, int64_t n, DeltaNorm norm) {
  if (norm == DeltaNorm::kNone) return 1.0;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * double{x[i]};
  return 1 / std::sqrt(sum + 1e-6);
}

// One head of one token; the rows of its state begin at `first`.
void DeltaHead(const DeltaRuleSpec& spec, const DeltaRuleArgs& args, int64_t t,
               int64_t h, int64_t first, bool fresh) {
  const int64_t at = t * spec.value_heads + h;
  const int64_t key_at =
      t * spec.key_heads + h / (spec.value_heads / spec.key_heads);
  const ScalarRow q(args.q, key_at), k(args.k, key_at), v(args.v, at);
  const bool per_head = spec.decay == DeltaDecay::kPerHead;
  const ScalarRow g(args.g, per_head ? t : at), out(args.out, at);
  const double q_scale =
      InverseNorm(q, spec.dk, spec.norm) * double{spec.scale};
  const double k_scale = InverseNorm(k, spec.dk, spec.norm);
  const double beta = double{ScalarRow(args.beta, t)[h]};
  const auto old = [&](int64_t i, int64_t c) {
    // A NaN decay makes a state of zeros NaN, too.
    return Decay(double{g[per_head ? h : i]}) *
           (fresh ? 0.0 : double{ScalarRow(args.state, first + i)[c]});
  };
  for (int64_t c = 0; c < spec.dv; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < spec.dk; ++i) {
      sum += old(i, c) * double{k[i]} * k_scale;
    }
    const double delta = beta * (double{v[c]} - sum);
    double y = 0;
    for (int64_t i = 0; i < spec.dk; ++i) {
      const double s = old(i, c) + double{k[i]} * k_scale * delta;
      y += s * double{q[i]} * q_scale;
      ScalarRow(args.state, first + i).Set(c, static_cast<float>(s));
    }
    out.Set(c, static_cast<float>(y));
  }
}

// One row of a head of one token.
void StateRow(const StateUpdateSpec& spec, const StateUpdateArgs& args,
              int64_t t, int64_t h, int64_t p, const ScalarRow& state,
              bool fresh) {
  const int64_t at = t * spec.heads + h;
  const int64_t group = t * spec.groups + h / (spec.heads / spec.groups);
  const bool per_row = spec.form == SsmForm::kPerRow;
  const auto number = [&](const AnyTensorView& v) {
    if (v.rank() == 0) return 0.0;
    return double{per_row ? ScalarRow(v, h)[p] : ScalarRow(v, 0)[h]};
  };
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
    const double kept = Decay(a * delta) * (fresh ? 0.0 : double{state[n]});
    const double s = kept + double{b[n]} * delta * x;
    y += s * double{c[n]};
    state.Set(n, static_cast<float>(s));
  }
  if (args.z.rank() != 0) y *= Silu(double{ScalarRow(args.z, at)[p]});
  ScalarRow(args.out, at).Set(p, static_cast<float>(y));
}

}  // namespace

void NativeDeltaRule(const DeltaRuleSpec& spec, const DeltaRuleArgs& args) {
  ForTokens(
      args.batch, spec.null_slot,
      [&](int64_t s, int64_t t, bool fresh) {
        for (int64_t h = 0; h < spec.value_heads; ++h) {
          const int64_t slot = args.batch.state_indices[s];
          DeltaHead(spec, args, t, h, (slot * spec.value_heads + h) * spec.dk,
                    fresh);
        }
      },
      [&](int64_t t) {
        for (int64_t h = 0; h < spec.value_heads; ++h) {
          ZeroRow(ScalarRow(args.out, t * spec.value_heads + h), spec.dv);
        }
      });
}

void NativeCausalConv1d(const CausalConv1dSpec& spec,
                        const CausalConv1dArgs& args) {
  const auto row = [&](int64_t s, int64_t i) {
    return ScalarRow(args.state,
                     args.batch.state_indices[s] * args.state.extent(1) + i);
  };
  const int64_t history = spec.width - 1;
  ForTokens(
      args.batch, spec.null_slot,
      [&](int64_t s, int64_t t, bool fresh) {
        const ScalarRow x(args.x, t), out(args.out, t);
        for (int64_t c = 0; c < spec.channels; ++c) {
          const ScalarRow w(args.weight, c);
          double y = 0;
          if (args.bias.rank() != 0) y = double{ScalarRow(args.bias, 0)[c]};
          for (int64_t i = 0; i < history; ++i) {
            if (fresh) row(s, i).Set(c, 0.0f);
            y += double{w[i]} * double{row(s, i)[c]};
          }
          y += double{w[history]} * double{x[c]};
          for (int64_t i = 0; i + 1 < history; ++i) {
            row(s, i).Set(c, row(s, i + 1)[c]);
          }
          row(s, history - 1).Set(c, x[c]);
          if (spec.activation == ConvActivation::kSilu) y = Silu(y);
          out.Set(c, static_cast<float>(y));
        }
      },
      [&](int64_t t) { ZeroRow(ScalarRow(args.out, t), spec.channels); });
}

void NativeStateUpdate(const StateUpdateSpec& spec,
                       const StateUpdateArgs& args) {
  ForTokens(
      args.batch, spec.null_slot,
      [&](int64_t s, int64_t t, bool fresh) {
        const int64_t slot = args.batch.state_indices[s];
        for (int64_t h = 0; h < spec.heads; ++h) {
          for (int64_t p = 0; p < spec.head_dim; ++p) {
            const ScalarRow state(args.state,
                                  (slot * spec.heads + h) * spec.head_dim + p);
            StateRow(spec, args, t, h, p, state, fresh);
          }
        }
      },
      [&](int64_t t) {
        for (int64_t h = 0; h < spec.heads; ++h) {
          ZeroRow(ScalarRow(args.out, t * spec.heads + h), spec.head_dim);
        }
      });
}

}  // namespace quern
