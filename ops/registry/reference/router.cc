#include "quern/ops/registry/reference/router.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

constexpr float kHighest = std::numeric_limits<float>::max();
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Row {
  float scores[RouterSpec::kMaxExperts];
  float choice[RouterSpec::kMaxExperts];  // kNothing once it is taken
  float groups[RouterSpec::kMaxExperts];
};

float Exp(float x) {
  return static_cast<float>(std::exp(static_cast<double>(x)));
}

float Finite(float x) {
  return x >= -kHighest ? std::min(x, kHighest) : -kHighest;  // NaN, too
}

float Score(RouterScore score, float x, float max) {
  if (score == RouterScore::kSoftmax) return Exp(x - max);
  if (score == RouterScore::kSigmoid) return 1.0f / (1.0f + Exp(-x));
  const double tail = std::log1p(std::exp(-std::abs(static_cast<double>(x))));
  return static_cast<float>(
      std::sqrt(std::max(static_cast<double>(x), 0.0) + tail));
}

// The first of the largest, which it takes away.
int64_t TakeLargest(float* x, int64_t n) {
  const int64_t at = std::max_element(x, x + n) - x;
  x[at] = kNothing;
  return at;
}

// Takes away the experts of all but the best groups.
void KeepGroups(const RouterSpec& spec, Row& row) {
  const int64_t size = spec.GroupExperts();
  for (int64_t g = 0; g < spec.groups; ++g) {
    float first = kNothing, second = kNothing;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, row.choice[e]));
      first = std::max(first, row.choice[e]);
    }
    row.groups[g] = Finite(spec.biased ? first + second : first);
  }
  for (int64_t i = 0; i < spec.top_groups; ++i) {
    TakeLargest(row.groups, spec.groups);
  }
  for (int64_t g = 0; g < spec.groups; ++g) {
    if (row.groups[g] == kNothing) continue;
    std::fill_n(row.choice + g * size, size, kNothing);
  }
}

void RouteToken(const RouterSpec& spec, const ScalarRow& logits,
                const ScalarRow& bias, Row& row, float* weights, int32_t* ids) {
  float max = -kHighest, sum = 0;
  for (int64_t e = 0; e < spec.experts; ++e) {
    row.choice[e] = Finite(logits[e]);
    max = std::max(max, row.choice[e]);
  }
  for (int64_t e = 0; e < spec.experts; ++e) {
    row.scores[e] = Score(spec.score, row.choice[e], max);
    sum += row.scores[e];
  }
  for (int64_t e = 0; e < spec.experts; ++e) {
    if (spec.score == RouterScore::kSoftmax) row.scores[e] /= sum;
    if (spec.biased) row.choice[e] = Finite(row.scores[e] + bias[e]);
  }
  if (spec.groups > 1) KeepGroups(spec, row);
  sum = 0;
  for (int64_t j = 0; j < spec.top_k; ++j) {
    const int64_t e = TakeLargest(row.choice, spec.experts);
    ids[j] = static_cast<int32_t>(e);
    weights[j] = row.scores[e];
    sum += weights[j];
  }
  for (int64_t j = 0; j < spec.top_k; ++j) {
    if (spec.renormalize && sum != 0) weights[j] /= sum;
    weights[j] *= spec.scale;
  }
}

}  // namespace

void NativeRouter(const RouterSpec& spec, const AnyTensorView& logits,
                  const AnyTensorView& bias, const MatrixView<float>& weights,
                  const MatrixView<int32_t>& ids) {
  Row row;
  const ScalarRow biases(bias, 0);
  for (int64_t t = 0; t < logits.extent(0); ++t) {
    const bool one = logits.extent(0) == 1;  // its strides may be any number
    RouteToken(spec, ScalarRow(logits, t), biases, row,
               one ? weights.data() : weights.Row(t),
               one ? ids.data() : ids.Row(t));
  }
}

}  // namespace quern
