#ifndef QUERN_MODELS_TESTING_REFERENCE_DECODER_TESTUTIL_H_
#define QUERN_MODELS_TESTING_REFERENCE_DECODER_TESTUTIL_H_

// An oracle of the forward pass, in double with plain loops. It reads the
// architecture's differences from the file itself, not from the config that it
// checks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/reference_form_testutil.h"
#include "quern/models/testing/reference_recurrent_testutil.h"
#include "quern/quant/block_format.h"

namespace quern {

class ReferenceDecoder {
 public:
  ReferenceDecoder(const GgufFile& file, const DecoderConfig& config)
      : ReferenceDecoder(file, config, ReferenceForm::Of(file, config)) {}
  ReferenceDecoder(const GgufFile& file, const DecoderConfig& config,
                   const ReferenceForm& form)
      : file_(file), c_(config), form_(form) {}

  // logits[token][vocab] of one sequence from its start.
  DoubleRows Logits(const std::vector<int32_t>& tokens) const {
    const DoubleRows embedding = Matrix("token_embd.weight");
    DoubleRows x;
    for (const int32_t token : tokens) {
      x.push_back(embedding[static_cast<size_t>(token)]);
      for (double& v : x.back()) v *= form_.embedding_scale;
    }
    for (int64_t layer = 0; layer < c_.layers; ++layer) {
      const std::string blk = absl::StrCat("blk.", layer, ".");
      const DoubleRows mixed =
          Mixed(layer, form_.pre_norms ? Norm(blk + "attn_norm.weight", x) : x);
      Add(x,
          form_.post_attention_norm
              ? Norm(blk + "post_attention_norm.weight", mixed)
              : mixed,
          form_.residual_scale);
      const std::string ffn_norm = blk + "ffn_norm.weight";
      const DoubleRows h = form_.pre_norms
                               ? Norm(file_.HasTensor(ffn_norm)
                                          ? ffn_norm
                                          : blk + "post_attention_norm.weight",
                                      x)
                               : x;
      const DoubleRows down =
          form_.experts_used > 0 && layer >= form_.leading_dense
              ? Mixture(blk, h)
              : FeedForward(h, GateOrUp(blk, 0), GateOrUp(blk, 1),
                            WeightsOf(blk + "ffn_down.weight"));
      Add(x,
          form_.post_ffw_norm ? Norm(blk + "post_ffw_norm.weight", down) : down,
          form_.residual_scale);
    }
    const char* last_norm = file_.HasTensor("output_norm.weight")
                                ? "output_norm.weight"
                                : "token_embd_norm.weight";
    DoubleRows logits =
        Times(Norm(last_norm, x), file_.HasTensor("output.weight")
                                      ? "output.weight"
                                      : "token_embd.weight");
    for (std::vector<double>& row : logits) {
      for (double& v : row) {
        v = Capped(v, form_.logit_cap) / form_.logit_divisor;
      }
    }
    return logits;
  }

 private:
  static double Capped(double v, double cap) {
    return cap > 0 ? cap * std::tanh(v / cap) : v;
  }

  double Activation(double v) const {
    if (!form_.gelu) return v / (1 + std::exp(-v));
    constexpr double kSqrt2OverPi = 0.79788456080286535588;
    return v / 2 * (1 + std::tanh(kSqrt2OverPi * (v + 0.044715 * v * v * v)));
  }

  DoubleRows Matrix(const std::string& name) const {
    const GgufTensor& tensor = **file_.FindTensor(name);
    std::vector<float> values(static_cast<size_t>(tensor.elements));
    EXPECT_TRUE(file_.ReadRows(tensor, 0, absl::MakeSpan(values)).ok());
    DoubleRows rows;
    for (auto it = values.begin(); it != values.end(); it += tensor.cols()) {
      rows.emplace_back(it, it + tensor.cols());
    }
    return rows;
  }

  struct Weights {
    DoubleRows rows;
    bool int8_rows;  // of what it multiplies
    std::vector<double> bias = {};
  };
  Weights WeightsOf(const std::string& name) const {
    const auto type = static_cast<uint32_t>((**file_.FindTensor(name)).type);
    return {Matrix(name), form_.int8_rows && FindBlockFormat(type) != nullptr};
  }
  // `count` rows of a matrix that has several's, from row `begin` on.
  Weights RowsOf(const std::string& name, int64_t begin, int64_t count) const {
    const Weights all = WeightsOf(name);
    const auto first = all.rows.begin() + begin;
    return {DoubleRows(first, first + count), all.int8_rows};
  }
  // The gate (0) or what it gates (1), in a matrix of its own or in half of
  // ffn_up.
  Weights GateOrUp(const std::string& blk, int64_t which) const {
    const std::string up = blk + "ffn_up.weight";
    if (!file_.HasTensor(blk + "ffn_gate.weight")) {
      return RowsOf(up, which * c_.ffn, c_.ffn);
    }
    return WeightsOf(which == 0 ? blk + "ffn_gate.weight" : up);
  }
  // Each 32 numbers become multiples, from -127 to 127, of one of their own.
  static void RoundInBlocks(std::vector<double>& row) {
    for (size_t at = 0; at < row.size(); at += 32) {
      double step = 0;
      for (size_t i = at; i < at + 32; ++i) {
        step = std::max(step, std::abs(row[i]) / 127);
      }
      for (size_t i = at; i < at + 32 && step > 0; ++i) {
        row[i] = std::nearbyint(row[i] / step) * step;
      }
    }
  }

  // What the layer's mixer makes of h, by the tensors that the layer has.
  DoubleRows Mixed(int64_t layer, const DoubleRows& h) const {
    const std::string blk = absl::StrCat("blk.", layer, ".");
    if (file_.HasTensor(blk + "attn_output.weight")) {
      DoubleRows y = Times(Attention(layer, h), blk + "attn_output.weight");
      const std::string bias = blk + "attn_output.bias";
      if (form_.output_bias && file_.HasTensor(bias)) AddToEach(y, bias);
      return y;
    }
    if (form_.key_heads > 0) {
      return Times(DeltaNet(blk, h), blk + "ssm_out.weight");
    }
    if (form_.ssm_groups > 0) {
      return Times(Mamba2(blk, Times(h, blk + "ssm_in.weight")),
                   blk + "ssm_out.weight");
    }
    return Times(ReferenceShortConv(Times(h, blk + "shortconv.in_proj.weight"),
                                    Matrix(blk + "shortconv.conv.weight"),
                                    form_.gates, form_.conv_taps),
                 blk + "shortconv.out_proj.weight");
  }

  // A tensor's numbers, whatever its dimensions.
  std::vector<double> Flat(const std::string& name) const {
    std::vector<double> all;
    for (const std::vector<double>& row : Matrix(name)) {
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }

  DoubleRows DeltaNet(const std::string& blk, const DoubleRows& h) const {
    ReferenceDeltaNetWeights w;
    w.conv = Matrix(blk + "ssm_conv1d.weight");
    w.a = Flat(blk + "ssm_a");
    w.dt_bias = Flat(blk + "ssm_dt.bias");
    w.norm = Flat(blk + "ssm_norm.weight");
    w.key_heads = form_.key_heads;
    w.by_turns = form_.betas_by_turns;
    w.eps = form_.eps;
    return ReferenceDeltaNet(
        Times(h, blk + "attn_qkv.weight"), Times(h, blk + "attn_gate.weight"),
        Times(h, blk + "ssm_ba.weight"), w, form_.conv_taps);
  }

  DoubleRows Mamba2(const std::string& blk, const DoubleRows& projected) const {
    const auto flat = [&](const char* name) { return Flat(blk + name); };
    ReferenceMamba2Weights w;
    w.conv = Matrix(blk + "ssm_conv1d.weight");
    w.conv_bias = flat("ssm_conv1d.bias");
    w.a = flat("ssm_a");
    w.d = flat("ssm_d");
    if (!form_.ssm_skip) w.d.assign(w.d.size(), 0);
    w.dt_bias = flat("ssm_dt.bias");
    w.norm = flat("ssm_norm.weight");
    w.groups = form_.ssm_groups;
    w.eps = form_.eps;
    return ReferenceMamba2(projected, w, form_.conv_taps);
  }

  DoubleRows FeedForward(const DoubleRows& x, const Weights& w_gate,
                         const Weights& w_up, const Weights& w_down) const {
    DoubleRows h = TimesAndBias(x, w_gate);
    const DoubleRows up = TimesAndBias(x, w_up);
    for (size_t t = 0; t < h.size(); ++t) {
      for (size_t i = 0; i < h[t].size(); ++i) {
        h[t][i] = form_.swiglu_oai ? SwigluOai(h[t][i], up[t][i])
                                   : Activation(h[t][i]) * up[t][i];
      }
    }
    return TimesAndBias(h, w_down);
  }
  static double SwigluOai(double gate, double up) {
    gate = std::min(gate, 7.0);
    up = std::clamp(up, -7.0, 7.0);
    return gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
  }
  static DoubleRows TimesAndBias(const DoubleRows& x, const Weights& w) {
    DoubleRows y = Times(x, w);
    if (!w.bias.empty()) Add(y, DoubleRows(y.size(), w.bias));
    return y;
  }

  DoubleRows Mixture(const std::string& blk, const DoubleRows& x) const {
    DoubleRows logits = Times(x, blk + "ffn_gate_inp.weight");
    if (form_.logit_bias && file_.HasTensor(blk + "ffn_gate_inp.bias")) {
      AddToEach(logits, blk + "ffn_gate_inp.bias");
    }
    const size_t experts = logits[0].size();
    const std::string bias_name = blk + "exp_probs_b.bias";
    const std::vector<double> bias =
        form_.router_bias && file_.HasTensor(bias_name)
            ? Matrix(bias_name)[0]
            : std::vector<double>(experts);
    // The matrix of an expert, in a tensor of all.
    const auto of = [&](const char* name, size_t expert) {
      const Weights all = WeightsOf(absl::StrCat(blk, name, ".weight"));
      const auto rows = static_cast<int64_t>(all.rows.size() / experts);
      const auto first = all.rows.begin() + static_cast<int64_t>(expert) * rows;
      Weights one = {DoubleRows(first, first + rows), all.int8_rows};
      const std::string biases = absl::StrCat(blk, name, ".bias");
      if (form_.expert_bias && file_.HasTensor(biases))
        one.bias = Matrix(biases)[expert];
      return one;
    };
    DoubleRows y(x.size(), std::vector<double>(x[0].size()));
    for (size_t e = 0; e < experts; ++e) {
      const DoubleRows part =
          FeedForward(x, of("ffn_gate_exps", e), of("ffn_up_exps", e),
                      of("ffn_down_exps", e));
      for (size_t t = 0; t < x.size(); ++t) {
        const double weight =
            form_.expert_scale * (form_.sigmoid_scores
                                      ? SigmoidWeight(logits[t], bias, e)
                                      : ExpertWeight(logits[t], e));
        for (size_t i = 0; i < y[t].size(); ++i) y[t][i] += weight * part[t][i];
      }
    }
    if (form_.shared_expert) {
      DoubleRows shared =
          FeedForward(x, WeightsOf(blk + "ffn_gate_shexp.weight"),
                      WeightsOf(blk + "ffn_up_shexp.weight"),
                      WeightsOf(blk + "ffn_down_shexp.weight"));
      if (form_.shared_gate) {
        const DoubleRows gates = Times(x, blk + "ffn_gate_inp_shexp.weight");
        for (size_t t = 0; t < x.size(); ++t) {
          for (double& v : shared[t]) v /= 1 + std::exp(-gates[t][0]);
        }
      }
      Add(y, shared);
    }
    return y;
  }

  // The share of expert e: its softmax among the largest, or 0.
  double ExpertWeight(const std::vector<double>& logits, size_t e) const {
    std::vector<double> largest = logits;
    std::sort(largest.begin(), largest.end(), std::greater<>());
    if (logits[e] < largest[form_.experts_used - 1]) return 0;
    double sum = 0;
    for (size_t i = 0; i < largest.size(); ++i) {
      if (form_.renormalize && i >= form_.experts_used) break;
      sum += std::exp(largest[i]);
    }
    return std::exp(logits[e]) / sum;
  }

  // The share of expert e in the scores of those whose biased scores are the
  // largest, or 0.
  double SigmoidWeight(const std::vector<double>& logits,
                       const std::vector<double>& bias, size_t e) const {
    std::vector<double> scores, biased;
    for (size_t i = 0; i < logits.size(); ++i) {
      scores.push_back(1 / (1 + std::exp(-logits[i])));
      biased.push_back(scores[i] + bias[i]);
    }
    std::vector<double> largest = biased;
    std::sort(largest.begin(), largest.end(), std::greater<>());
    const double least = largest[form_.experts_used - 1];
    double sum = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (biased[i] >= least) sum += scores[i];
    }
    if (biased[e] < least) return 0;
    return form_.renormalize ? scores[e] / sum : scores[e];
  }

  DoubleRows Times(const DoubleRows& x, const std::string& name) const {
    return Times(x, WeightsOf(name));
  }
  static DoubleRows Times(const DoubleRows& x, const Weights& w) {
    DoubleRows y;
    for (std::vector<double> row : x) {
      if (w.int8_rows) RoundInBlocks(row);
      y.emplace_back();
      for (const std::vector<double>& weights : w.rows) {
        double sum = 0;
        for (size_t i = 0; i < row.size(); ++i) sum += row[i] * weights[i];
        y.back().push_back(sum);
      }
    }
    return y;
  }

  DoubleRows Norm(const std::string& name, DoubleRows x) const {
    const std::vector<double> weight = Matrix(name)[0];
    for (std::vector<double>& row : x) {
      double squares = 0;
      for (const double v : row) squares += v * v;
      const double rms =
          std::sqrt(squares / static_cast<double>(row.size()) + form_.eps);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= weight[i] / rms;
    }
    return x;
  }

  static void Add(DoubleRows& x, const DoubleRows& y, double scale = 1) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += scale * y[t][i];
    }
  }

  void AddToEach(DoubleRows& x, const std::string& name) const {
    Add(x, DoubleRows(x.size(), Matrix(name)[0]));
  }

  // Applies rms_norm to each piece of each row that is as long as the weights:
  // a head, or all.
  DoubleRows NormHeads(const std::string& name, const DoubleRows& x) const {
    const int64_t dim = (**file_.FindTensor(name)).elements;
    DoubleRows y;
    for (const std::vector<double>& row : x) {
      DoubleRows heads;
      for (auto it = row.begin(); it != row.end(); it += dim) {
        heads.emplace_back(it, it + dim);
      }
      y.emplace_back();
      for (const std::vector<double>& head : Norm(name, heads)) {
        y.back().insert(y.back().end(), head.begin(), head.end());
      }
    }
    return y;
  }

  // Rotates pair j of every head by position * base^(-2j / dim), divided by the
  // factor of j if there is one. The pairs are (2j, 2j + 1) in Llama's files
  // and (j, j + dim / 2) in others.
  void Rotate(DoubleRows& x, bool local) const {
    const bool own = local && form_.local_base > 0;
    const double base =
        own ? form_.local_base : static_cast<double>(c_.rope_base);
    const double divisor = own ? 1 : form_.rope_divisor;
    const auto dim = static_cast<size_t>(c_.head_dim);
    const auto half = form_.rope_dim / 2;
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t head = 0; head < x[t].size(); head += dim) {
        for (size_t j = 0; j < half; ++j) {
          const double factor =
              form_.rope_factors.empty() ? 1 : form_.rope_factors[j];
          const double angle = static_cast<double>(t) * YarnShare(j, base) *
                               std::pow(base, -static_cast<double>(j) /
                                                  static_cast<double>(half)) /
                               (factor * divisor);
          double& a = x[t][head + (form_.rope_pairs ? 2 * j : j)];
          double& b = x[t][head + (form_.rope_pairs ? 2 * j + 1 : j + half)];
          const double magnitude =
              form_.yarn_factor > 0 ? 1 + 0.1 * std::log(form_.yarn_factor) : 1;
          const double turned = a * std::cos(angle) - b * std::sin(angle);
          b = magnitude * (b * std::cos(angle) + a * std::sin(angle));
          a = magnitude * turned;
        }
      }
    }
  }

  // What YaRN multiplies the frequency of pair j by: 1 for pairs that turn more
  // than 32 times in the original context, 1 / factor for those that turn less
  // than once, and linear in j between.
  double YarnShare(size_t j, double base) const {
    if (form_.yarn_factor == 0) return 1;
    const auto dim = static_cast<double>(form_.rope_dim);
    const auto pair_of = [&](double turns) {
      return dim *
             std::log(form_.yarn_original / (2 * std::acos(-1.0) * turns)) /
             (2 * std::log(base));
    };
    double low = pair_of(32), high = pair_of(1);
    if (form_.yarn_truncates) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1);
    if (low == high) high += 0.001;
    const double ramp =
        std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    return ramp / form_.yarn_factor + (1 - ramp);
  }

  // Takes the gates out of q, and returns them: half of the numbers, head by
  // head behind the queries, or behind all queries.
  DoubleRows TakeGates(DoubleRows& q) const {
    const size_t dim = form_.gates_by_turns ? static_cast<size_t>(c_.head_dim)
                                            : q[0].size() / 2;
    DoubleRows gates;
    for (std::vector<double>& row : q) {
      std::vector<double> queries;
      gates.emplace_back();
      for (size_t i = 0; i < row.size(); ++i) {
        (i / dim % 2 == 0 ? queries : gates.back()).push_back(row[i]);
      }
      row = queries;
    }
    return gates;
  }

  DoubleRows Attention(int64_t layer, const DoubleRows& h) const {
    const std::string blk = absl::StrCat("blk.", layer, ".");
    const bool local =
        form_.window > 0 && (form_.window_interval == 0 ||
                             (layer + 1) % form_.window_interval != 0);
    const auto window = local ? static_cast<size_t>(form_.window) : h.size();
    const int64_t q_cols = c_.q_heads * c_.head_dim;
    const int64_t kv_cols = c_.kv_heads * c_.head_dim;
    const auto project = [&](const char* name, int64_t begin, int64_t count) {
      const std::string joined = blk + "attn_qkv.weight";
      return file_.HasTensor(joined) ? Times(h, RowsOf(joined, begin, count))
                                     : Times(h, blk + name);
    };
    DoubleRows q = project("attn_q.weight", 0, q_cols);
    const DoubleRows gates = form_.gates_in_q ? TakeGates(q) : DoubleRows();
    DoubleRows k = project("attn_k.weight", q_cols, kv_cols);
    DoubleRows v = project("attn_v.weight", q_cols + kv_cols, kv_cols);
    if (form_.q_bias) AddToEach(q, blk + "attn_q.bias");
    if (form_.k_bias) AddToEach(k, blk + "attn_k.bias");
    if (form_.v_bias) AddToEach(v, blk + "attn_v.bias");
    const auto norm_heads = [&] {
      if (form_.q_norm) q = NormHeads(blk + "attn_q_norm.weight", q);
      if (form_.k_norm) k = NormHeads(blk + "attn_k_norm.weight", k);
    };
    if (!form_.late_norms) norm_heads();
    const int64_t gap = form_.rope_gap;
    if (form_.rope && (gap == 0 || layer % gap != gap - 1)) {
      Rotate(q, local);
      Rotate(k, local);
    }
    if (form_.late_norms) norm_heads();
    const std::vector<double> sinks =
        form_.sinks && file_.HasTensor(blk + "attn_sinks.weight")
            ? Matrix(blk + "attn_sinks.weight")[0]
            : std::vector<double>();
    const auto dim = static_cast<size_t>(c_.head_dim);
    const auto group = static_cast<size_t>(c_.q_heads / c_.kv_heads);
    DoubleRows out(q.size(), std::vector<double>(q[0].size()));
    for (size_t t = 0; t < q.size(); ++t) {
      const size_t first = t + 1 > window ? t + 1 - window : 0;
      for (size_t head = 0; head < static_cast<size_t>(c_.q_heads); ++head) {
        const size_t kv = head / group * dim;
        std::vector<double> weights;
        double sum = sinks.empty() ? 0 : std::exp(sinks[head]);
        for (size_t s = first; s <= t; ++s) {
          double score = 0;
          for (size_t i = 0; i < dim; ++i) {
            score += q[t][head * dim + i] * k[s][kv + i];
          }
          // exp cannot overflow, because scores of these models are small.
          weights.push_back(
              std::exp(Capped(score / form_.divisor, form_.attention_cap)));
          sum += weights.back();
        }
        for (size_t s = first; s <= t; ++s) {
          for (size_t i = 0; i < dim; ++i) {
            out[t][head * dim + i] += weights[s - first] / sum * v[s][kv + i];
          }
        }
      }
    }
    if (form_.query_gates) {
      for (size_t t = 0; t < out.size(); ++t) {
        for (size_t i = 0; i < out[t].size(); ++i) {
          out[t][i] /= 1 + std::exp(-gates[t][i]);
        }
      }
    }
    return out;
  }

  const GgufFile& file_;
  const DecoderConfig& c_;
  const ReferenceForm form_;
};

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_REFERENCE_DECODER_TESTUTIL_H_
