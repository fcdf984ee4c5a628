#ifndef QUERN_OPS_MIXER_REFERENCE_MIXERS_TESTUTIL_H_
#define QUERN_OPS_MIXER_REFERENCE_MIXERS_TESTUTIL_H_

// The layers of this folder in double, on the tokens that one call has of a
// sequence, with a bound on the error of each number and a sample of that error
// (ops/mixer/bounded_testutil.h). Bounds of the recurrences are those of
// ops/recurrent, token by token or by chunks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/gated_delta_net.h"
#include "quern/ops/mixer/mamba_mixer.h"
#include "quern/ops/mixer/mamba_mixer2.h"
#include "quern/ops/mixer/rounded_recurrences_testutil.h"
#include "quern/ops/mixer/short_conv.h"
#include "quern/ops/recurrent/testing/reference_delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/reference_state_update_testutil.h"

namespace quern {

using Reals = std::vector<double>;
using BoundedRows = std::vector<BoundedRow>;
// The last inputs of the convolution, rows of channels, the oldest first.
using BoundedWindow = std::vector<BoundedRow>;

// What all layers have: in_proj [projected, hidden], out_proj [hidden, inner],
// conv_weight [channels, width], conv_bias [channels] or empty.
struct ReferenceMixer {
  Reals in_proj, out_proj, conv_weight, conv_bias;
};
// What a state update has for each head, row or element; d and dt_bias may be
// empty: zeros.
struct ReferenceRates {
  Reals a, d, dt_bias;
};
inline double ZeroOr(const Reals& numbers, size_t at) {
  return numbers.empty() ? 0.0 : numbers[at];
}

// One token of a causal convolution over rows of channels; the window moves on.
inline BoundedRow BoundedConv(const ReferenceMixer& m, bool silu, DType dtype,
                              const BoundedRow& x, BoundedWindow& window) {
  const size_t width = window.size() + 1;
  BoundedRow out;
  for (size_t c = 0; c < x.size(); ++c) {
    BoundedRow taps, weights;
    for (size_t j = 0; j < width; ++j) {
      taps.push_back(j + 1 < width ? window[j][c] : x[c]);
      weights.push_back({m.conv_weight[c * width + j], 0});
    }
    const Bounded first = {m.conv_bias.empty() ? 0.0 : m.conv_bias[c], 0};
    const Bounded y = Dot(taps, weights, first);
    out.push_back(Rounded(dtype, silu ? BoundedSilu(y) : y));
  }
  window.erase(window.begin());
  window.push_back(x);
  return out;
}

inline BoundedRows ReferenceShortConv(const ShortConvSpec& s,
                                      const ReferenceMixer& m,
                                      const BoundedRows& x,
                                      BoundedWindow& window) {
  const int64_t n = s.channels;
  BoundedRows out;
  for (const BoundedRow& row : x) {
    const BoundedRow p = BoundedLinear(s.dtype, row, m.in_proj);
    BoundedRow v = Part(p, 2 * n, n);
    for (size_t c = 0; c < v.size(); ++c) v[c] = Rounded(s.dtype, p[c] * v[c]);
    BoundedRow y = BoundedConv(m, /*silu=*/false, s.dtype, v, window);
    for (size_t c = 0; c < y.size(); ++c) {
      y[c] = Rounded(s.dtype, p[c + static_cast<size_t>(n)] * y[c]);
    }
    out.push_back(BoundedLinear(s.dtype, y, m.out_proj));
  }
  return out;
}

// The outputs of one row of a state update, before they are rounded. state:
// [d_state], exact, moves on.
inline BoundedRow ReferenceStateRow(
    const std::vector<StateUpdateTokens>& tokens, DType state_dtype,
    int64_t chunk, Bounded* state) {
  const size_t d_state = tokens.front().bounded.a.size();
  std::vector<double> row, rounded;
  for (size_t i = 0; i < d_state; ++i) {
    row.push_back(state[i].value);
    rounded.push_back(state[i].rounded);
  }
  const std::vector<double> sample =
      RoundedStateRow(tokens, state_dtype, chunk, rounded);
  StateUpdateReference reference(std::move(row), state_dtype, chunk);
  BoundedRow y;
  for (const StateUpdateTokens& token : tokens) {
    reference.Step(token.bounded);
    y.push_back({reference.y(), reference.y_bound(), sample[y.size()]});
  }
  reference.Finish();
  for (size_t i = 0; i < d_state; ++i) {
    state[i] = {reference.row()[i], reference.bound(i), rounded[i]};
  }
  return y;
}

// rms(x) * weight, rounded.
inline BoundedRow BoundedRms(DType dtype, const BoundedRow& x,
                             const Reals& weight, size_t first, double eps) {
  const Bounded inverse =
      BoundedInverseNorm(x, static_cast<double>(x.size()), eps);
  BoundedRow y;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back(Rounded(dtype, x[i] * inverse * Bounded{weight[first + i], 0}));
  }
  return y;
}

// dt_norm, b_norm and c_norm are empty where the layer has no norms.
struct ReferenceMambaNumbers {
  Reals x_proj, dt_proj, dt_norm, b_norm, c_norm;
};
inline BoundedRows ReferenceMamba(const MambaMixerSpec& s,
                                  const ReferenceMixer& m,
                                  const ReferenceMambaNumbers& own,
                                  const ReferenceRates& rates,
                                  const BoundedRows& x, int64_t chunk,
                                  BoundedWindow& window, BoundedRow& state) {
  const bool mamba = s.form == MambaForm::kMamba;
  const int64_t channels = s.channels(), n = s.d_state;
  const auto normed = [&](const BoundedRow& row, const Reals& weight) {
    if (s.norm == MambaNorm::kNone) return row;
    return BoundedRms(s.dtype, row, weight, 0, double{s.eps});
  };
  BoundedRows z, u, b, c, dt;
  for (const BoundedRow& row : x) {
    const BoundedRow p = BoundedLinear(s.dtype, row, m.in_proj);
    z.push_back(Part(p, mamba ? channels : 0, channels));
    u.push_back(BoundedConv(m, /*silu=*/true, s.dtype,
                            Part(p, mamba ? 0 : channels, channels), window));
    const BoundedRow second = BoundedLinear(s.dtype, u.back(), own.x_proj);
    const int64_t b_at = mamba ? s.dt_rank : 0;
    b.push_back(normed(Part(second, b_at, n), own.b_norm));
    c.push_back(normed(Part(second, b_at + n, n), own.c_norm));
    dt.push_back(BoundedLinear(
        s.dtype,
        normed(Part(second, mamba ? 0 : 2 * n, s.dt_rank), own.dt_norm),
        own.dt_proj));
  }
  BoundedRows y(x.size());
  for (int64_t i = 0; i < channels; ++i) {
    // Numbers of a row, or of its head.
    const auto at = static_cast<size_t>(mamba ? i : i / s.head_dim);
    const auto row = static_cast<size_t>(i), size = static_cast<size_t>(n);
    Reals a(size, rates.a[mamba ? 0 : at]);
    if (mamba) std::copy_n(&rates.a[at * size], size, a.begin());
    std::vector<StateUpdateTokens> tokens;
    for (size_t t = 0; t < x.size(); ++t) {
      tokens.emplace_back(u[t][row], dt[t][at], b[t], c[t]);
      tokens.back().SetRates(a, ZeroOr(rates.d, at), ZeroOr(rates.dt_bias, at));
      tokens.back().SetGate(z[t][row]);
    }
    const BoundedRow out =
        ReferenceStateRow(tokens, s.state_dtype, chunk, &state[row * size]);
    for (size_t t = 0; t < x.size(); ++t) {
      y[t].push_back(Rounded(s.dtype, out[t]));
    }
  }
  BoundedRows out;
  for (const BoundedRow& row : y) {
    out.push_back(BoundedLinear(s.dtype, row, m.out_proj));
  }
  return out;
}

// rms(y * silu(z)) * weight, group by group.
inline BoundedRow BoundedGatedNorm(const MambaMixer2Spec& s,
                                   const Reals& weight, const BoundedRow& y,
                                   const BoundedRow& z) {
  const int64_t group = s.channels() / s.groups;
  BoundedRow out;
  for (int64_t first = 0; first < s.channels(); first += group) {
    BoundedRow gated;
    for (int64_t i = first; i < first + group; ++i) {
      const auto at = static_cast<size_t>(i);
      gated.push_back(y[at] * BoundedSilu(z[at]));
    }
    const BoundedRow part =
        BoundedRms(s.dtype, gated, weight, out.size(), double{s.eps});
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

// norm: empty for kNone.
inline BoundedRows ReferenceMamba2(const MambaMixer2Spec& s,
                                   const ReferenceMixer& m,
                                   const ReferenceRates& rates,
                                   const Reals& norm, const BoundedRows& x,
                                   int64_t chunk, BoundedWindow& window,
                                   BoundedRow& state) {
  const int64_t channels = s.channels(), n = s.d_state;
  BoundedRows p, mixed;
  for (const BoundedRow& row : x) {
    p.push_back(BoundedLinear(s.dtype, row, m.in_proj));
    mixed.push_back(BoundedConv(m, /*silu=*/true, s.dtype,
                                Part(p.back(), channels, s.conv_channels()),
                                window));
  }
  BoundedRows y(x.size());
  for (int64_t i = 0; i < channels; ++i) {
    const int64_t group = i / s.head_dim / (s.heads / s.groups);
    const auto head = static_cast<size_t>(i / s.head_dim);
    const auto row = static_cast<size_t>(i), size = static_cast<size_t>(n);
    const auto dt = static_cast<size_t>(channels + s.conv_channels()) + head;
    std::vector<StateUpdateTokens> tokens;
    for (size_t t = 0; t < x.size(); ++t) {
      tokens.emplace_back(mixed[t][row], p[t][dt],
                          Part(mixed[t], channels + group * n, n),
                          Part(mixed[t], channels + (s.groups + group) * n, n));
      tokens.back().SetRates(Reals(size, rates.a[head]), ZeroOr(rates.d, head),
                             ZeroOr(rates.dt_bias, head));
      if (s.norm == Mamba2Norm::kNone) tokens.back().SetGate(p[t][row]);
    }
    const BoundedRow out =
        ReferenceStateRow(tokens, s.state_dtype, chunk, &state[row * size]);
    for (size_t t = 0; t < x.size(); ++t) {
      y[t].push_back(Rounded(s.dtype, out[t]));
    }
  }
  BoundedRows out;
  for (size_t t = 0; t < x.size(); ++t) {
    if (s.norm == Mamba2Norm::kGroups) {
      y[t] = BoundedGatedNorm(s, norm, y[t], Part(p[t], 0, channels));
    }
    out.push_back(BoundedLinear(s.dtype, y[t], m.out_proj));
  }
  return out;
}

// The outputs of one value head, before they are rounded. state: [dk, dv],
// exact, moves on.
inline BoundedRows ReferenceDeltaHead(
    const GatedDeltaNetSpec& s, const std::vector<DeltaRuleTokens>& tokens,
    int64_t chunk, Bounded* state) {
  const auto dk = static_cast<size_t>(s.dk), dv = static_cast<size_t>(s.dv);
  const double scale = 1 / std::sqrt(static_cast<double>(dk));
  std::vector<double> before, rounded;
  for (size_t i = 0; i < dk * dv; ++i) {
    before.push_back(state[i].value);
    rounded.push_back(state[i].rounded);
  }
  const std::vector<Reals> sample =
      RoundedDeltaHead(tokens, dk, dv, scale, s.state_dtype, chunk, rounded);
  DeltaRuleReference reference(dk, dv, std::move(before), s.state_dtype,
                               /*l2=*/true, scale, chunk);
  BoundedRows y;
  for (size_t t = 0; t < tokens.size(); ++t) {
    reference.Step(tokens[t].bounded);
    y.emplace_back();
    for (size_t c = 0; c < dv; ++c) {
      y.back().push_back(
          {reference.out()[c], reference.out_bound(c), sample[t][c]});
    }
  }
  reference.Finish();
  for (size_t i = 0; i < dk * dv; ++i) {
    state[i] = {reference.state()[i], reference.state_bound(i % dv),
                rounded[i]};
  }
  return y;
}

struct ReferenceDeltaNumbers {
  Reals a_log, dt_bias, norm;
};
// What a value head has for a token, of which p and mixed are the rows.
inline DeltaRuleTokens DeltaToken(const GatedDeltaNetSpec& s,
                                  const ReferenceDeltaNumbers& own,
                                  const BoundedRow& p, const BoundedRow& mixed,
                                  int64_t h) {
  const int64_t key = h / (s.value_heads / s.key_heads);
  const auto head = static_cast<size_t>(h);
  const auto b_at = static_cast<size_t>(s.conv_channels() + s.values());
  const auto heads = static_cast<size_t>(s.value_heads);
  const Bounded delta =
      BoundedSoftplus(p[b_at + heads + head] + Bounded{own.dt_bias[head], 0});
  const double rate = -std::exp(own.a_log[head]);
  return DeltaRuleTokens(
      Part(mixed, key * s.dk, s.dk), Part(mixed, s.keys() + key * s.dk, s.dk),
      Part(mixed, 2 * s.keys() + h * s.dv, s.dv),
      RoundedF32(rate, 0, rate) * delta, BoundedSigmoid(p[b_at + head]));
}
inline BoundedRows ReferenceDeltaNet(const GatedDeltaNetSpec& s,
                                     const ReferenceMixer& m,
                                     const ReferenceDeltaNumbers& own,
                                     const BoundedRows& x, int64_t chunk,
                                     BoundedWindow& window, BoundedRow& state) {
  BoundedRows p, mixed;
  for (const BoundedRow& row : x) {
    p.push_back(BoundedLinear(s.dtype, row, m.in_proj));
    mixed.push_back(BoundedConv(m, /*silu=*/true, s.dtype,
                                Part(p.back(), 0, s.conv_channels()), window));
  }
  BoundedRows y(x.size());
  for (int64_t h = 0; h < s.value_heads; ++h) {
    std::vector<DeltaRuleTokens> tokens;
    for (size_t t = 0; t < x.size(); ++t) {
      tokens.push_back(DeltaToken(s, own, p[t], mixed[t], h));
    }
    const BoundedRows out = ReferenceDeltaHead(
        s, tokens, chunk, &state[static_cast<size_t>(h * s.dk * s.dv)]);
    for (size_t t = 0; t < x.size(); ++t) {
      const BoundedRow raw = Rounded(s.dtype, out[t]);
      const Bounded inverse = BoundedInverseNorm(
          raw, static_cast<double>(raw.size()), double{s.eps});
      for (size_t i = 0; i < raw.size(); ++i) {
        const auto z_at = static_cast<size_t>(s.conv_channels() + h * s.dv);
        y[t].push_back(
            Rounded(s.dtype, raw[i] * inverse * Bounded{own.norm[i], 0} *
                                 BoundedSilu(p[t][z_at + i])));
      }
    }
  }
  BoundedRows out;
  for (const BoundedRow& row : y) {
    out.push_back(BoundedLinear(s.dtype, row, m.out_proj));
  }
  return out;
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_REFERENCE_MIXERS_TESTUTIL_H_
