#ifndef QUERN_MODELS_TESTING_REFERENCE_RECURRENT_TESTUTIL_H_
#define QUERN_MODELS_TESTING_REFERENCE_RECURRENT_TESTUTIL_H_

// Oracles of recurrent layers between their projections, in double, token after
// token from the start of a sequence.

#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

namespace quern {

using DoubleRows = std::vector<std::vector<double>>;

// LFM2. projected[t] is three parts of as many channels, which are B, C and u
// by `parts`; v = B * u; y[t, c] = C[t, c] * sum over the last `taps` tokens of
// w[c, j] * v. w[c] ends with the weight of the token itself.
inline DoubleRows ReferenceShortConv(const DoubleRows& projected,
                                     const DoubleRows& w,
                                     const std::array<size_t, 3>& parts,
                                     size_t taps) {
  const size_t channels = w.size(), width = w[0].size();
  const auto part = [&](size_t t, size_t which, size_t c) {
    return projected[t][parts[which] * channels + c];
  };
  DoubleRows y(projected.size(), std::vector<double>(channels));
  for (size_t t = 0; t < projected.size(); ++t) {
    for (size_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (size_t back = 0; back < taps && back <= t; ++back) {
        sum += w[c][width - 1 - back] * part(t - back, 0, c) *
               part(t - back, 2, c);
      }
      y[t][c] = part(t, 1, c) * sum;
    }
  }
  return y;
}

struct ReferenceMamba2Weights {
  DoubleRows conv;                          // [channels, width]
  std::vector<double> conv_bias;            // [channels]
  std::vector<double> a, d, dt_bias, norm;  // [heads] thrice, [inner]
  size_t groups = 1;
  double eps = 0;
};

// Mamba-2. projected[t] is z, u, B, C and dt; u, B, C = silu(conv + bias) over
// the last `taps` tokens, and for each head and row p of its channels
//
//   s[p, n] <- exp(a delta) s[p, n] + delta u[p] B[n]; delta = softplus(dt + b)
//   g[p] = (sum over n of s[p, n] C[n] + d u[p]) * silu(z[p])
//
// and the result is g, divided by its root mean square over each group's
// channels, times the norm's weights.
inline DoubleRows ReferenceMamba2(const DoubleRows& projected,
                                  const ReferenceMamba2Weights& w,
                                  size_t taps) {
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  const size_t heads = w.a.size(), inner = w.norm.size(), dim = inner / heads;
  const size_t width = w.conv[0].size(), channels = w.conv.size();
  const size_t states = (channels - inner) / (2 * w.groups);
  const size_t group_cols = inner / w.groups;
  DoubleRows memory(inner, std::vector<double>(states));
  DoubleRows y(projected.size(), std::vector<double>(inner));
  for (size_t t = 0; t < projected.size(); ++t) {
    std::vector<double> v = w.conv_bias;
    for (size_t c = 0; c < channels; ++c) {
      for (size_t back = 0; back < taps && back <= t; ++back) {
        v[c] += w.conv[c][width - 1 - back] * projected[t - back][inner + c];
      }
      v[c] = silu(v[c]);
    }
    for (size_t i = 0; i < inner; ++i) {
      const size_t head = i / dim, group = i / group_cols;
      const double* b = &v[inner + group * states];
      const double* c = b + w.groups * states;
      const double delta = std::log1p(
          std::exp(projected[t][inner + channels + head] + w.dt_bias[head]));
      double sum = w.d[head] * v[i];
      for (size_t n = 0; n < states; ++n) {
        double& s = memory[i][n];
        s = std::exp(w.a[head] * delta) * s + delta * v[i] * b[n];
        sum += s * c[n];
      }
      y[t][i] = sum * silu(projected[t][i]);
    }
    for (size_t first = 0; first < inner; first += group_cols) {
      double squares = 0;
      for (size_t i = first; i < first + group_cols; ++i) {
        squares += y[t][i] * y[t][i];
      }
      const double rms =
          std::sqrt(squares / static_cast<double>(group_cols) + w.eps);
      for (size_t i = first; i < first + group_cols; ++i) {
        y[t][i] *= w.norm[i] / rms;
      }
    }
  }
  return y;
}

struct ReferenceDeltaNetWeights {
  DoubleRows conv;                 // [channels, width]
  std::vector<double> a, dt_bias;  // [value heads] each; a < 0
  std::vector<double> norm;        // [dv]
  size_t key_heads = 1;
  bool by_turns = true;
  double eps = 0;
};

// A gated delta net. qkv[t] is q and k of all key heads and v of all value
// heads, z[t] the gates of the result. ba[t] is for each key head the b and
// then the a of its value heads, or without by_turns the b and then the a of
// all. q, k, v = silu(conv) over the last `taps` tokens; q and k are divided by
// sqrt(sum of squares + 1e-6), and q by sqrt(dk) besides. For each value head,
// s[dk, dv]
//
//   s <- exp(a softplus(alpha + dt_bias)) s
//   s <- s + k (sigmoid(beta) (v - s^T k))^T
//   o = s^T q;  result = o / rms(o) * norm * silu(z)
inline DoubleRows ReferenceDeltaNet(const DoubleRows& qkv, const DoubleRows& z,
                                    const DoubleRows& ba,
                                    const ReferenceDeltaNetWeights& w,
                                    size_t taps) {
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  const size_t heads = w.a.size(), dv = w.norm.size();
  const size_t ratio = heads / w.key_heads;
  const size_t channels = w.conv.size(), width = w.conv[0].size();
  const size_t keys = (channels - heads * dv) / 2, dk = keys / w.key_heads;
  std::vector<DoubleRows> memory(heads,
                                 DoubleRows(dk, std::vector<double>(dv)));
  DoubleRows y(qkv.size(), std::vector<double>(heads * dv));
  for (size_t t = 0; t < qkv.size(); ++t) {
    std::vector<double> c(channels);
    for (size_t i = 0; i < channels; ++i) {
      for (size_t back = 0; back < taps && back <= t; ++back) {
        c[i] += w.conv[i][width - 1 - back] * qkv[t - back][i];
      }
      c[i] = silu(c[i]);
    }
    for (size_t h = 0; h < heads; ++h) {
      const size_t key_head = h / ratio;
      const double* q = &c[key_head * dk];
      const double* k = q + keys;
      const double* v = &c[2 * keys + h * dv];
      double q_squares = 1e-6, k_squares = 1e-6;
      for (size_t i = 0; i < dk; ++i) {
        q_squares += q[i] * q[i];
        k_squares += k[i] * k[i];
      }
      const double q_norm = std::sqrt(q_squares * static_cast<double>(dk));
      const double k_norm = std::sqrt(k_squares);
      const size_t b_at = w.by_turns ? 2 * ratio * key_head + h % ratio : h;
      const double alpha = ba[t][b_at + (w.by_turns ? ratio : heads)];
      const double beta = 1 / (1 + std::exp(-ba[t][b_at]));
      const double decay =
          std::exp(w.a[h] * std::log1p(std::exp(alpha + w.dt_bias[h])));
      double squares = 0;
      for (size_t j = 0; j < dv; ++j) {
        double predicted = 0, sum = 0;
        for (size_t i = 0; i < dk; ++i) {
          memory[h][i][j] *= decay;
          predicted += memory[h][i][j] * k[i] / k_norm;
        }
        const double d = beta * (v[j] - predicted);
        for (size_t i = 0; i < dk; ++i) {
          memory[h][i][j] += k[i] / k_norm * d;
          sum += memory[h][i][j] * q[i] / q_norm;
        }
        y[t][h * dv + j] = sum;
        squares += sum * sum;
      }
      const double rms = std::sqrt(squares / static_cast<double>(dv) + w.eps);
      for (size_t j = 0; j < dv; ++j) {
        y[t][h * dv + j] *= w.norm[j] / rms * silu(z[t][h * dv + j]);
      }
    }
  }
  return y;
}

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_REFERENCE_RECURRENT_TESTUTIL_H_
