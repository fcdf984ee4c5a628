#include "quern/tools/perf/attention/attention_util.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op_util.h"

namespace quern {

bool AttentionLengths::Sees(int64_t query, int64_t token) const {
  const int64_t first = kv_len - q_len;
  if (tree == 0) return token <= first + query;
  if (token < first) return true;
  int64_t draft = query;
  while (draft > token - first) draft = (draft - 1) / tree;
  return draft == token - first;
}

int64_t AttentionLengths::KeysOf(int64_t query) const {
  int64_t keys = kv_len - q_len;
  if (tree == 0) return keys + query + 1;
  for (int64_t t = kv_len - q_len; t < kv_len; ++t) {
    if (Sees(query, t)) ++keys;
  }
  return keys;
}

std::vector<uint64_t> AttentionLengths::DraftMasks() const {
  std::vector<uint64_t> masks;
  for (int64_t i = 0; tree > 0 && i < batch * q_len; ++i) {
    uint64_t mask = 0;
    for (int64_t j = 0; j < q_len; ++j) {
      if (Sees(i % q_len, kv_len - q_len + j)) mask |= uint64_t{1} << j;
    }
    masks.push_back(mask);
  }
  return masks;
}

absl::StatusOr<AttentionLengths> ParseAttentionLengths(const Args& args) {
  constexpr int64_t kMaxDrafts = AttentionSchedule::kMaxDrafts;
  AttentionLengths lengths;
  QUERN_ASSIGN_OR_RETURN(lengths.batch, args.Int("batch", 1, 4096));
  QUERN_ASSIGN_OR_RETURN(lengths.kv_len, args.Int("kv_len", 1, 1 << 24));
  QUERN_ASSIGN_OR_RETURN(lengths.tree, args.Int("tree", 0, kMaxDrafts));
  const int64_t most = lengths.tree > 0 ? kMaxDrafts : lengths.kv_len;
  QUERN_ASSIGN_OR_RETURN(lengths.q_len,
                         args.Int("q_len", 1, std::min(most, lengths.kv_len)));
  return lengths;
}

// |q|, |k|, |v| <= 1. A logit is a dot product of `dim` terms, at most
// sqrt(dim), off by its `dim` roundings and a few more in the subtraction of
// the maximum; exp turns that into a relative error of a weight, and each
// chunk of keys rescales once. A weighted mean of values <= 1 is off by twice
// that (the weights and their sum), plus the roundings of its sum over keys.
void AppendStored(const KvCacheView& cache, int64_t page, int64_t head,
                  int64_t token, double scale, std::vector<double>& key,
                  std::vector<double>& value) {
  const KvLayout& layout = cache.layout();
  if (layout.scaling() == KvScaling::kPerBlock) {
    const std::vector<double> row = LatentRow(cache, page, head, token);
    key.insert(key.end(), row.begin(), row.end());
    value.insert(value.end(), row.begin(), row.begin() + layout.v_head_dim());
    return;
  }
  WithType(layout.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto* keys = reinterpret_cast<const T*>(cache.K(page, head));
    const auto* values = reinterpret_cast<const T*>(cache.V(page, head));
    for (int64_t d = 0; d < layout.head_dim(); ++d) {
      key.push_back(scale * ToDouble(keys[layout.KOffset(token, d)]));
    }
    for (int64_t d = 0; d < layout.v_head_dim(); ++d) {
      value.push_back(scale * ToDouble(values[layout.VOffset(token, d)]));
    }
  });
}

double AttentionErrorBound(const ReferenceAttentionSpec& spec, DType out) {
  constexpr double kEps = 0x1p-23;
  const auto d = static_cast<double>(spec.head_dim);
  const auto keys = static_cast<double>(spec.kv_len);
  const double chunks =
      std::ceil(keys / static_cast<double>(AttentionSchedule::kChunkTokens));
  const double weight =
      std::sqrt(d) * (d + 3 + (spec.soft_cap > 0 ? 12 : 0)) * kEps +
      chunks * (2 * std::sqrt(d) + 4) * kEps;
  // Weights and outputs are rounded to the type.
  return 2 * (weight + keys * kEps) + 2 * RelativeRoundoff(out);
}

}  // namespace quern
