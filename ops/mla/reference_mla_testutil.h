#ifndef QUERN_OPS_MLA_REFERENCE_MLA_TESTUTIL_H_
#define QUERN_OPS_MLA_REFERENCE_MLA_TESTUTIL_H_

// The layer of ops/mla/mla.h in double, in either of its forms, with a bound on
// the error of each number, and with a sample of that error
// (ops/mixer/bounded_testutil.h). Both count each rounding that the header
// lists, the sums and the softmax. The bound judges results in f32 of few
// elements, and the sample judges all others.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/core/dtype.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/reference_rope.h"

namespace quern {

// All matrices [n, k], as ops/mla/mla_weights.h names them.
struct ReferenceMlaWeights {
  std::vector<double> q_a, q, kv_a, kv_b, out;
  std::vector<double> q_norm, kv_norm;
};

// What later tokens see of one, in both forms.
struct ReferenceMlaKey {
  BoundedRow latent;                     // its row of the cache
  std::vector<BoundedRow> keys, values;  // expanded, of each head
};

class ReferenceMla {
 public:
  ReferenceMla(const MlaSpec& spec, ReferenceMlaWeights weights,
               RotaryStyle style, double base)
      : spec_(spec), weights_(std::move(weights)), style_(style), base_(base) {}

  // A row of the cache that is known.
  static ReferenceMlaKey Cached(const std::vector<double>& latent) {
    return {Exact(latent), {}, {}};
  }

  // What the token x at a position leaves for all later ones, expanded where
  // the direct form is to see it. The dtype of the cache rounds only its
  // latent.
  ReferenceMlaKey Key(const std::vector<double>& x, int64_t position,
                      bool expanded = true) const {
    const BoundedRow row = BoundedLinear(spec_.dtype, Exact(x), weights_.kv_a);
    const BoundedRow c = Normed(Part(row, 0, spec_.kv_lora), weights_.kv_norm);
    const BoundedRow turned =
        Turned(Part(row, spec_.kv_lora, spec_.rope), position);
    ReferenceMlaKey key;
    for (int64_t h = 0; expanded && h < spec_.heads; ++h) {
      key.keys.push_back(
          BoundedLinear(spec_.dtype, c, HeadRows(h, 0, spec_.nope)));
      Append(turned, key.keys.back());
      key.values.push_back(BoundedLinear(
          spec_.dtype, c, HeadRows(h, spec_.nope, spec_.v_head_dim)));
    }
    key.latent = c;
    Append(turned, key.latent);
    if (spec_.cache.scaling() == KvScaling::kPerBlock) {
      key.latent = InBlocks(key.latent);
    } else if (spec_.cache.dtype() != spec_.dtype) {
      key.latent = Rounded(spec_.cache.dtype(), key.latent);
    }
    return key;
  }

  // The output of the token x at a position that sees these, its own included.
  // A residual is added unless it is empty.
  BoundedRow Token(bool direct, const std::vector<double>& x, int64_t position,
                   const std::vector<ReferenceMlaKey>& seen,
                   const std::vector<double>& residual = {}) const {
    BoundedRow in = Exact(x);
    if (spec_.q_lora > 0) {
      in =
          Normed(BoundedLinear(spec_.dtype, in, weights_.q_a), weights_.q_norm);
    }
    const BoundedRow q = BoundedLinear(spec_.dtype, in, weights_.q);
    BoundedRow heads;
    for (int64_t h = 0; h < spec_.heads; ++h) {
      const BoundedRow nope = Part(q, h * spec_.head_dim(), spec_.nope);
      const BoundedRow turned = Turned(
          Part(q, h * spec_.head_dim() + spec_.nope, spec_.rope), position);
      Append(direct ? Direct(h, nope, turned, seen)
                    : Absorbed(h, nope, turned, seen),
             heads);
    }
    const DType dtype = spec_.dtype_of_out();
    if (residual.empty()) return BoundedLinear(dtype, heads, weights_.out);
    BoundedRow out = BoundedLinear(DType::kF32, heads, weights_.out);
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = Rounded(dtype, out[i] + Bounded{residual[i], 0});
    }
    return out;
  }

 private:
  using Rows = std::vector<BoundedRow>;

  static BoundedRow Exact(const std::vector<double>& values) {
    BoundedRow row;
    for (const double v : values) row.push_back({v, 0});
    return row;
  }
  static void Append(const BoundedRow& from, BoundedRow& to) {
    to.insert(to.end(), from.begin(), from.end());
  }

  BoundedRow Normed(const BoundedRow& x,
                    const std::vector<double>& weight) const {
    const Bounded inverse = BoundedInverseNorm(x, static_cast<double>(x.size()),
                                               static_cast<double>(spec_.eps));
    BoundedRow y;
    for (size_t i = 0; i < x.size(); ++i) {
      y.push_back(Rounded(spec_.dtype, x[i] * inverse * Bounded{weight[i], 0}));
    }
    return y;
  }

  // Cosines and sines are f32.
  BoundedRow Turned(BoundedRow x, int64_t position) const {
    const bool halves = style_ == RotaryStyle::kHalves;
    for (int64_t i = 0; i < spec_.rope / 2; ++i) {
      const double angle = ReferenceRopeAngle(position, i, spec_.rope, base_);
      const Bounded c = {std::cos(angle), kBoundedEps};
      const Bounded s = {std::sin(angle), kBoundedEps};
      Bounded& a = x[static_cast<size_t>(halves ? i : 2 * i)];
      Bounded& b =
          x[static_cast<size_t>(halves ? i + spec_.rope / 2 : 2 * i + 1)];
      const Bounded turned = a * c - b * s;
      b = b * c + a * s;
      a = turned;
    }
    return Rounded(spec_.dtype, x);
  }

  // Rounded to f8e4m3 with a scale for each block of the latent, and to bf16
  // behind it. A code is off by 2^-4 of the element, or by 2^-10 of the scale,
  // which is less than twice the largest element / 448.
  BoundedRow InBlocks(BoundedRow row) const {
    const auto latent = static_cast<size_t>(spec_.kv_lora);
    const auto block = static_cast<size_t>(KvLayout::kScaleBlock);
    for (size_t begin = 0; begin < latent; begin += block) {
      const size_t end = std::min(begin + block, latent);
      double most = 0x1p-100;  // the smallest scale is 2^-117
      for (size_t i = begin; i < end; ++i) most = std::max(most, Reach(row[i]));
      std::vector<double> sample;
      for (size_t i = begin; i < end; ++i) sample.push_back(row[i].rounded);
      const uint8_t exponent = LatentExponent(sample);
      for (size_t i = begin; i < end; ++i) {
        row[i].error += std::max(0x1p-4 * Reach(row[i]), 0x1p-10 * most / 224);
        row[i].rounded =
            LatentValue(LatentCode(row[i].rounded, exponent), exponent);
      }
    }
    for (size_t i = latent; i < row.size(); ++i) {
      row[i] = Rounded(DType::kBF16, row[i]);
    }
    return row;
  }
  // Rows [begin, begin + count) of a head of W_kvb.
  std::vector<double> HeadRows(int64_t head, int64_t begin,
                               int64_t count) const {
    const int64_t first = head * (spec_.nope + spec_.v_head_dim) + begin;
    return std::vector<double>(
        weights_.kv_b.begin() + first * spec_.kv_lora,
        weights_.kv_b.begin() + (first + count) * spec_.kv_lora);
  }

  BoundedRow Direct(int64_t head, const BoundedRow& nope,
                    const BoundedRow& turned,
                    const std::vector<ReferenceMlaKey>& seen) const {
    Rows keys, values;
    for (const ReferenceMlaKey& key : seen) {
      keys.push_back(key.keys[static_cast<size_t>(head)]);
      values.push_back(key.values[static_cast<size_t>(head)]);
    }
    BoundedRow q = nope;
    Append(turned, q);
    return Attended(q, keys, values);
  }

  BoundedRow Absorbed(int64_t head, const BoundedRow& nope,
                      const BoundedRow& turned,
                      const std::vector<ReferenceMlaKey>& seen) const {
    const std::vector<double> uk = HeadRows(head, 0, spec_.nope);
    std::vector<double> transposed;
    for (int64_t j = 0; j < spec_.kv_lora; ++j) {
      for (int64_t d = 0; d < spec_.nope; ++d) {
        transposed.push_back(uk[static_cast<size_t>(d * spec_.kv_lora + j)]);
      }
    }
    BoundedRow q = BoundedLinear(spec_.dtype, nope, transposed);
    Append(turned, q);
    Rows keys, values;
    for (const ReferenceMlaKey& key : seen) {
      keys.push_back(key.latent);
      values.push_back(Part(key.latent, 0, spec_.kv_lora));
    }
    return BoundedLinear(spec_.dtype, Attended(q, keys, values),
                         HeadRows(head, spec_.nope, spec_.v_head_dim));
  }

  // softmax(scale * q . keys) * values. Where each logit is off by d at most,
  // no weight changes by more than a factor e^(2d), and weights sum to 1, so
  // that an average changes by (e^(2d) - 1) of the largest value at most, and
  // by the largest error of a value. d has the errors of dot products and of
  // attention's own arithmetic: the subtraction of a maximum and an exp2 for a
  // chunk of keys and for each merge of chunks, and a rounding for each key in
  // both sums. bf16 dot products round the weights to bf16 before they multiply
  // values, and have a shorter exp2.
  BoundedRow Attended(const BoundedRow& q, const Rows& keys,
                      const Rows& values) const {
    const bool dot = spec_.dtype == DType::kBF16;
    const double exp2_error = dot ? 0x1p-18 : 0x1p-22;
    const double scale = Scale();
    std::vector<double> logits;
    std::vector<float> rounded_logits;
    double off = 0, reach = 0, most = 0;
    for (const BoundedRow& key : keys) {
      const Bounded logit =
          Dot(q, key) * Bounded{scale, 3 * kBoundedEps * scale};
      logits.push_back(logit.value);
      rounded_logits.push_back(static_cast<float>(logit.rounded));
      off = std::max(off, logit.error);
      reach = std::max(reach, Reach(logit));
      most = logits.size() == 1 ? logit.value : std::max(most, logit.value);
    }
    const double chunks = std::ceil(static_cast<double>(keys.size()) / 256) + 1;
    off += chunks * (4 * reach * kBoundedEps + exp2_error + 2 * kBoundedEps);
    const double relative =
        std::expm1(2 * off) +
        2 * static_cast<double>(keys.size() + 4) * kBoundedEps +
        (dot ? 0x1p-7 : 0);
    double sum = 0;
    for (double& logit : logits) sum += logit = std::exp(logit - most);
    const std::vector<double> rounded = RoundedAverage(rounded_logits, values);
    BoundedRow out;
    for (size_t d = 0; d < values[0].size(); ++d) {
      double value = 0, largest = 0, error = 0;
      for (size_t t = 0; t < values.size(); ++t) {
        value += logits[t] / sum * values[t][d].value;
        largest = std::max(largest, Reach(values[t][d]));
        error = std::max(error, values[t][d].error);
      }
      const Bounded average = {
          value, error * (1 + relative) + largest * relative, rounded[d]};
      out.push_back(Rounded(spec_.dtype, average));
    }
    return out;
  }

  // The average in f32, one key after the other, of values that are rounded
  // already. A weight is off by the error of attention's exp2, up or down by
  // turns.
  std::vector<double> RoundedAverage(const std::vector<float>& logits,
                                     const Rows& values) const {
    const bool dot = spec_.dtype == DType::kBF16;
    const float exp2_error = dot ? 0x1p-18f : 0x1p-22f;
    const float most = *std::max_element(logits.begin(), logits.end());
    std::vector<float> sums(values[0].size());
    float sum = 0;
    for (size_t t = 0; t < logits.size(); ++t) {
      const float error = t % 2 == 0 ? exp2_error : -exp2_error;
      float weight = std::exp(logits[t] - most) * (1 + error);
      sum += weight;
      if (dot) {
        const Bounded exact = {static_cast<double>(weight), 0};
        weight = static_cast<float>(Rounded(DType::kBF16, exact).rounded);
      }
      for (size_t d = 0; d < sums.size(); ++d) {
        sums[d] += weight * static_cast<float>(values[t][d].rounded);
      }
    }
    std::vector<double> average;
    for (const float x : sums) average.push_back(static_cast<double>(x / sum));
    return average;
  }

  double Scale() const {
    if (spec_.scale != 0.0f) return static_cast<double>(spec_.scale);
    return 1 / std::sqrt(static_cast<double>(spec_.head_dim()));
  }

  MlaSpec spec_;
  ReferenceMlaWeights weights_;
  RotaryStyle style_;
  double base_;
};

}  // namespace quern

#endif  // QUERN_OPS_MLA_REFERENCE_MLA_TESTUTIL_H_
