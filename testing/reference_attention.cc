#include "quern/testing/reference_attention.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/check.h"
#include "quern/testing/reference_softmax.h"

namespace quern {
namespace {

// Where a query stands, and where the keys do that it may see: -1 for others.
struct Path {
  int64_t position = 0;
  std::vector<int64_t> keys;
};

Path PathOf(const ReferenceAttentionSpec& spec, int64_t query) {
  const auto drafts = static_cast<int64_t>(spec.draft_masks.size());
  const int64_t first_draft = spec.kv_len - drafts;
  Path path;
  const int64_t self = spec.kv_len - spec.q_len + query;
  if (drafts == 0 || self < first_draft) {
    for (int64_t j = 0; j < spec.kv_len; ++j) path.keys.push_back(j);
    path.position = self;
    return path;
  }
  const uint64_t mask =
      spec.draft_masks.at(static_cast<size_t>(self - first_draft));
  int64_t next = 0;
  for (int64_t j = 0; j < spec.kv_len; ++j) {
    if (j == self) path.position = next;
    const bool on_path =
        j < first_draft || (j <= self && (mask >> (j - first_draft)) % 2 != 0);
    path.keys.push_back(on_path ? next++ : -1);
  }
  return path;
}

}  // namespace

ReferenceAttentionResult ReferenceAttention(const ReferenceAttentionSpec& spec,
                                            const std::vector<double>& q,
                                            const std::vector<double>& k,
                                            const std::vector<double>& v) {
  const int64_t dim = spec.head_dim;
  const int64_t v_dim = spec.v_head_dim > 0 ? spec.v_head_dim : dim;
  const auto at = [](const std::vector<double>& x, int64_t i) {
    return x.at(static_cast<size_t>(i));
  };
  QUERN_CHECK(spec.q_heads % spec.kv_heads == 0);
  ReferenceAttentionResult result;
  for (int64_t i = 0; i < spec.q_len; ++i) {
    const Path path = PathOf(spec, i);
    const int64_t position = path.position;
    for (int64_t h = 0; h < spec.q_heads; ++h) {
      const int64_t g = h * spec.kv_heads / spec.q_heads;
      std::vector<int64_t> seen;
      std::vector<double> scores;
      for (int64_t j = 0; j < spec.kv_len; ++j) {
        const int64_t at_key = path.keys[static_cast<size_t>(j)];
        if (at_key < 0) continue;
        if (spec.causal && at_key > position) continue;
        if (spec.window > 0 && at_key <= position - spec.window) continue;
        if (spec.window_right >= 0 && at_key > position + spec.window_right)
          continue;
        double s = 0.0;
        for (int64_t d = 0; d < dim; ++d) {
          s += at(q, (i * spec.q_heads + h) * dim + d) *
               at(k, (j * spec.kv_heads + g) * dim + d);
        }
        s *= spec.scale;
        if (spec.soft_cap > 0) s = spec.soft_cap * std::tanh(s / spec.soft_cap);
        if (!spec.alibi_slopes.empty()) {
          s +=
              at(spec.alibi_slopes, h) * static_cast<double>(at_key - position);
        }
        seen.push_back(j);
        scores.push_back(s);
      }
      if (!spec.sinks.empty()) scores.push_back(at(spec.sinks, h));
      const std::vector<double> p = ReferenceSoftmax(scores);
      for (int64_t d = 0; d < v_dim; ++d) {
        double sum = 0.0;
        for (size_t t = 0; t < seen.size(); ++t) {
          sum += p[t] * at(v, (seen[t] * spec.kv_heads + g) * v_dim + d);
        }
        result.out.push_back(sum);
      }
      result.lse.push_back(LogSumExp(scores));
    }
  }
  return result;
}

}  // namespace quern
