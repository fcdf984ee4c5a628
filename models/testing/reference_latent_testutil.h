#ifndef QUERN_MODELS_TESTING_REFERENCE_LATENT_TESTUTIL_H_
#define QUERN_MODELS_TESTING_REFERENCE_LATENT_TESTUTIL_H_

// An oracle of DeepSeek's forward pass (deepseek2), in double with plain loops,
// token after token and head after head: every key and value is expanded from
// its latent. It reads all from the file's keys and tensors, and nothing from
// the config that it checks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/gguf.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// What a file says; tests change one to see that it is felt.
struct ReferenceLatentForm {
  using Row = std::vector<double>;

  size_t layers = 0, heads = 0, nope = 0, rope = 0, value = 0, latent = 0;
  size_t leading_dense = 0, experts_used = 0;
  double eps = 0, rope_base = 0;
  bool rope_pairs = true, q_norm = true, kv_norm = true;
  bool shared = true, sum_to_one = false, sigmoid = false, bias = true;
  double expert_scale = 1;
  // Keys are those of a cache of f8e4m3: latents in blocks, the others in bf16.
  bool blocks = false;
  Row frequencies;   // of each rotated pair
  double scale = 0;  // of a query's product with a key

  static ReferenceLatentForm Of(const GgufFile& file) {
    const auto name = [](const char* key) {
      return absl::StrCat("deepseek2.", key);
    };
    const auto size = [&](const char* key) {
      const auto value = file.GetInt(name(key));
      EXPECT_TRUE(value.ok()) << value.status();
      return static_cast<size_t>(value.value_or(1));
    };
    const auto number = [&](const char* key) {
      return static_cast<double>(file.GetF32(name(key)).value_or(0));
    };
    ReferenceLatentForm f;
    f.layers = size("block_count");
    f.heads = size("attention.head_count");
    f.rope = size("rope.dimension_count");
    const bool split = file.Has(name("attention.key_length_mla"));
    f.nope = size(split ? "attention.key_length_mla" : "attention.key_length") -
             f.rope;
    f.value =
        size(split ? "attention.value_length_mla" : "attention.value_length");
    f.latent = size("attention.kv_lora_rank");
    f.leading_dense = size("leading_dense_block_count");
    f.experts_used = size("expert_used_count");
    f.eps = number("attention.layer_norm_rms_epsilon");
    f.rope_base = number("rope.freq_base");
    f.sum_to_one = *file.GetBool(name("expert_weights_norm"));
    f.sigmoid = size("expert_gating_func") == 2;
    f.expert_scale = number("expert_weights_scale");
    const bool yarn = file.Has(name("rope.scaling.type"));
    f.SetPositions(yarn ? number("rope.scaling.factor") : 1,
                   yarn ? number("rope.scaling.yarn_log_multiplier") : 0,
                   yarn ? size("rope.scaling.original_context_length") : 1);
    return f;
  }

  // YaRN: pairs that turn more than 32 times in the original context keep their
  // frequency, those that turn less than once are slowed by `factor`.
  void SetPositions(double factor, double log_mul, size_t original) {
    const auto dims = static_cast<double>(rope);
    // The dimension whose pair turns `turns` times.
    const auto dim = [&](double turns) {
      return dims *
             std::log(static_cast<double>(original) /
                      (turns * 2 * std::acos(-1.0))) /
             (2 * std::log(rope_base));
    };
    frequencies.clear();
    for (size_t j = 0; j < rope / 2; ++j) {
      const auto at = static_cast<double>(j);
      const double plain = std::pow(rope_base, -2 * at / dims);
      double kept = 1;
      if (factor > 1) {
        const double low = std::max(std::floor(dim(32)), 0.0);
        const double high = std::min(std::ceil(dim(1)), dims - 1);
        kept = 1 - std::clamp((at - low) / (high - low), 0.0, 1.0);
      }
      frequencies.push_back(plain * (kept + (1 - kept) / factor));
    }
    const double magnitude = 1 + log_mul * std::log(factor);
    scale = magnitude * magnitude / std::sqrt(static_cast<double>(nope + rope));
  }
};

class ReferenceLatentDecoder {
 public:
  using Row = std::vector<double>;
  using Rows = std::vector<Row>;

  explicit ReferenceLatentDecoder(const GgufFile& file)
      : ReferenceLatentDecoder(file, ReferenceLatentForm::Of(file)) {}
  ReferenceLatentDecoder(const GgufFile& file, const ReferenceLatentForm& form)
      : file_(file), f_(form) {}

  // logits[token][vocab] of one sequence from its start.
  Rows Logits(const std::vector<int32_t>& tokens) const {
    const Rows embedding = Matrix("token_embd.weight");
    Rows x;
    for (const int32_t token : tokens) {
      x.push_back(embedding[static_cast<size_t>(token)]);
    }
    for (size_t layer = 0; layer < f_.layers; ++layer) {
      const std::string blk = absl::StrCat("blk.", layer, ".");
      Add(x, Times(Attention(blk, Norm(blk + "attn_norm.weight", x)),
                   Matrix(blk + "attn_output.weight")));
      const Rows h = Norm(blk + "ffn_norm.weight", x);
      Add(x, layer < f_.leading_dense ? Dense(blk, "", h) : Mixture(blk, h));
    }
    return Times(
        Norm("output_norm.weight", x),
        Matrix(file_.HasTensor("output.weight") ? "output.weight"
                                                : "token_embd.weight"));
  }

 private:
  Rows Matrix(const std::string& name) const {
    const GgufTensor& tensor = **file_.FindTensor(name);
    std::vector<float> values(static_cast<size_t>(tensor.elements));
    EXPECT_TRUE(file_.ReadRows(tensor, 0, absl::MakeSpan(values)).ok());
    Rows rows;
    for (auto it = values.begin(); it != values.end(); it += tensor.cols()) {
      rows.emplace_back(it, it + tensor.cols());
    }
    return rows;
  }

  static double Dot(const Row& a, const Row& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }
  static Rows Times(const Rows& x, const Rows& w) {
    Rows y;
    for (const Row& row : x) {
      y.emplace_back();
      for (const Row& weights : w) y.back().push_back(Dot(row, weights));
    }
    return y;
  }
  static void Add(Rows& x, const Rows& y, double scale = 1) {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += scale * y[t][i];
    }
  }
  Rows Norm(const std::string& name, Rows x) const {
    const Row weight = Matrix(name)[0];
    for (Row& row : x) {
      const double rms =
          std::sqrt(Dot(row, row) / static_cast<double>(row.size()) + f_.eps);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= weight[i] / rms;
    }
    return x;
  }

  // Rows `begin` to `begin + count` of a matrix.
  static Rows Slice(const Rows& w, size_t begin, size_t count) {
    const auto first = w.begin() + static_cast<int64_t>(begin);
    return Rows(first, first + static_cast<int64_t>(count));
  }
  // Elements of each row likewise.
  static Rows Columns(const Rows& x, size_t begin, size_t count) {
    Rows y;
    for (const Row& row : x) {
      const auto first = row.begin() + static_cast<int64_t>(begin);
      y.emplace_back(first, first + static_cast<int64_t>(count));
    }
    return y;
  }

  Rows Rotated(Rows x) const {
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t j = 0; j < f_.rope / 2; ++j) {
        const double angle = static_cast<double>(t) * f_.frequencies[j];
        double& a = x[t][f_.rope_pairs ? 2 * j : j];
        double& b = x[t][f_.rope_pairs ? 2 * j + 1 : j + f_.rope / 2];
        const double turned = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = turned;
      }
    }
    return x;
  }

  Rows Queries(const std::string& blk, const Rows& h) const {
    if (!file_.HasTensor(blk + "attn_q_a.weight")) {
      return Times(h, Matrix(blk + "attn_q.weight"));
    }
    Rows narrow = Times(h, Matrix(blk + "attn_q_a.weight"));
    if (f_.q_norm) narrow = Norm(blk + "attn_q_a_norm.weight", narrow);
    return Times(narrow, Matrix(blk + "attn_q_b.weight"));
  }

  // W_uk [nope, latent] and W_uv [value, latent] of a head.
  Rows KeyMatrix(const std::string& blk, size_t head) const {
    if (file_.HasTensor(blk + "attn_kv_b.weight")) {
      return Slice(Matrix(blk + "attn_kv_b.weight"),
                   head * (f_.nope + f_.value), f_.nope);
    }
    const Rows turned =
        Slice(Matrix(blk + "attn_k_b.weight"), head * f_.latent, f_.latent);
    Rows w(f_.nope, Row(f_.latent));
    for (size_t i = 0; i < f_.nope; ++i) {
      for (size_t j = 0; j < f_.latent; ++j) w[i][j] = turned[j][i];
    }
    return w;
  }
  Rows ValueMatrix(const std::string& blk, size_t head) const {
    if (file_.HasTensor(blk + "attn_kv_b.weight")) {
      return Slice(Matrix(blk + "attn_kv_b.weight"),
                   head * (f_.nope + f_.value) + f_.nope, f_.value);
    }
    return Slice(Matrix(blk + "attn_v_b.weight"), head * f_.value, f_.value);
  }

  static Rows InBlocks(Rows rows) {
    for (Row& row : rows) {
      constexpr size_t kBlock = KvLayout::kScaleBlock;
      for (size_t begin = 0; begin < row.size(); begin += kBlock) {
        const auto first = row.begin() + static_cast<int64_t>(begin);
        const auto last =
            first + static_cast<int64_t>(std::min(kBlock, row.size() - begin));
        const uint8_t exponent = LatentExponent(Row(first, last));
        std::transform(first, last, first, [&](double x) {
          return LatentValue(LatentCode(x, exponent), exponent);
        });
      }
    }
    return rows;
  }

  // The values that each head attends to, one after the other.
  Rows Attention(const std::string& blk, const Rows& h) const {
    const Rows q = Queries(blk, h);
    const Rows projected = Times(h, Matrix(blk + "attn_kv_a_mqa.weight"));
    Rows c = Columns(projected, 0, f_.latent);
    if (f_.kv_norm) c = Norm(blk + "attn_kv_a_norm.weight", c);
    Rows shared_key = Rotated(Columns(projected, f_.latent, f_.rope));
    if (f_.blocks) {
      c = InBlocks(std::move(c));
      for (Row& row : shared_key) {
        for (double& x : row) x = ToDouble(FromDouble<BFloat16>(x));
      }
    }
    Rows out(h.size());
    for (size_t head = 0; head < f_.heads; ++head) {
      const size_t first = head * (f_.nope + f_.rope);
      const Rows q_nope = Columns(q, first, f_.nope);
      const Rows q_rope = Rotated(Columns(q, first + f_.nope, f_.rope));
      const Rows k = Times(c, KeyMatrix(blk, head));
      const Rows v = Times(c, ValueMatrix(blk, head));
      for (size_t t = 0; t < h.size(); ++t) {
        Row sum(f_.value);
        double weights = 0;
        for (size_t s = 0; s <= t; ++s) {
          // exp cannot overflow, because scores of these models are small.
          const double weight =
              std::exp(f_.scale *
                       (Dot(q_nope[t], k[s]) + Dot(q_rope[t], shared_key[s])));
          weights += weight;
          for (size_t i = 0; i < f_.value; ++i) sum[i] += weight * v[s][i];
        }
        for (const double number : sum) out[t].push_back(number / weights);
      }
    }
    return out;
  }

  static Rows FeedForward(const Rows& x, const Rows& gate, const Rows& up,
                          const Rows& down) {
    Rows h = Times(x, gate);
    const Rows u = Times(x, up);
    for (size_t t = 0; t < h.size(); ++t) {
      for (size_t i = 0; i < h[t].size(); ++i) {
        h[t][i] *= u[t][i] / (1 + std::exp(-h[t][i]));
      }
    }
    return Times(h, down);
  }
  Rows Dense(const std::string& blk, const std::string& suffix,
             const Rows& x) const {
    const auto matrix = [&](const char* name) {
      return Matrix(absl::StrCat(blk, name, suffix, ".weight"));
    };
    return FeedForward(x, matrix("ffn_gate"), matrix("ffn_up"),
                       matrix("ffn_down"));
  }

  // The weight of each expert for a token.
  Row Weights(const Row& logits, const Row& bias) const {
    double sum = 0;
    for (const double v : logits) sum += std::exp(v);
    Row scores, choice;
    for (size_t e = 0; e < logits.size(); ++e) {
      scores.push_back(f_.sigmoid ? 1 / (1 + std::exp(-logits[e]))
                                  : std::exp(logits[e]) / sum);
      choice.push_back(scores[e] + (f_.bias && !bias.empty() ? bias[e] : 0));
    }
    Row largest = choice;
    std::sort(largest.begin(), largest.end(), std::greater<>());
    double total = 0;
    for (size_t e = 0; e < scores.size(); ++e) {
      if (choice[e] < largest[f_.experts_used - 1]) scores[e] = 0;
      total += scores[e];
    }
    for (double& score : scores) {
      score *= f_.expert_scale / (f_.sum_to_one ? total : 1);
    }
    return scores;
  }

  Rows Mixture(const std::string& blk, const Rows& x) const {
    const Rows logits = Times(x, Matrix(blk + "ffn_gate_inp.weight"));
    Row bias;
    if (file_.HasTensor(blk + "exp_probs_b.bias")) {
      bias = Matrix(blk + "exp_probs_b.bias")[0];
    }
    Rows weights;
    for (const Row& row : logits) weights.push_back(Weights(row, bias));
    const size_t experts = logits[0].size();
    const Rows gate = Matrix(blk + "ffn_gate_exps.weight");
    const Rows up = Matrix(blk + "ffn_up_exps.weight");
    const Rows down = Matrix(blk + "ffn_down_exps.weight");
    const size_t inner = gate.size() / experts, hidden = down.size() / experts;
    Rows y(x.size(), Row(hidden));
    for (size_t e = 0; e < experts; ++e) {
      const Rows part = FeedForward(x, Slice(gate, e * inner, inner),
                                    Slice(up, e * inner, inner),
                                    Slice(down, e * hidden, hidden));
      for (size_t t = 0; t < x.size(); ++t) {
        for (size_t i = 0; i < hidden; ++i) {
          y[t][i] += weights[t][e] * part[t][i];
        }
      }
    }
    if (f_.shared && file_.HasTensor(blk + "ffn_up_shexp.weight")) {
      Add(y, Dense(blk, "_shexp", x));
    }
    return y;
  }

  const GgufFile& file_;
  const ReferenceLatentForm f_;
};

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_REFERENCE_LATENT_TESTUTIL_H_
