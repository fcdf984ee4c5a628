#ifndef QUERN_TOOLS_PERF_ATTENTION_ATTENTION_UTIL_H_
#define QUERN_TOOLS_PERF_ATTENTION_ATTENTION_UTIL_H_

// What the cases of attention share: sequences of equal length, and the bound
// of their check.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/core/dtype.h"
#include "quern/testing/reference_attention.h"
#include "quern/tools/perf/args.h"

namespace quern {

struct AttentionLengths {
  int64_t batch = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t prefix = 0;  // tokens that all sequences share
  // 0, or the last q_len tokens are drafts of a tree in which so many follow
  // each, row by row, its root first.
  int64_t tree = 0;

  // Whether query `query` sees token `token` of its sequence.
  bool Sees(int64_t query, int64_t token) const;
  // Tokens that the query sees.
  int64_t KeysOf(int64_t query) const;
  // The masks of AttentionBatch, for all sequences. Empty without a tree.
  std::vector<uint64_t> DraftMasks() const;
};

// The keys batch, kv_len, q_len and tree; InvalidArgument names one that is out
// of range.
absl::StatusOr<AttentionLengths> ParseAttentionLengths(const Args& args);

// Appends the key and the value of a token as numbers. Elements are stored
// divided by `scale`.
void AppendStored(const KvCacheView& cache, int64_t page, int64_t head,
                  int64_t token, double scale, std::vector<double>& key,
                  std::vector<double>& value);

// What one output may be off by, of queries, keys and values in [-1, 1] whose
// results are stored as `out`.
double AttentionErrorBound(const ReferenceAttentionSpec& spec, DType out);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_ATTENTION_UTIL_H_
