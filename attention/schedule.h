#ifndef QUERN_ATTENTION_SCHEDULE_H_
#define QUERN_ATTENTION_SCHEDULE_H_

// How the attention of one step is divided: integers only, built once a step
// and used by every layer.
//
// The batch is ragged: sequence s has q_len new queries, rows
// [q_offset, q_offset + q_len) of q, the last of its kv_len tokens. Query i of
// it sees the keys [0, kv_len - q_len + i], itself included.
//
//   block   kBlockRows rows that share their keys: consecutive queries of one
//           sequence times the query heads of one key/value head
//   chunk   the keys [c * kChunkTokens, (c + 1) * kChunkTokens) of a sequence
//
// The softmax of a row is computed chunk by chunk and the results are merged in
// the order of the chunks. Chunks depend on the position of the keys alone, so
// the bits of a row depend neither on how many workers there are, nor on its
// neighbours in the batch, nor on how its sequence was cut into steps. What the
// number of workers does decide is whether one work item goes through all
// chunks of a block, or each chunk is an item of its own, leaving a partial
// result for a merge.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/attention_spec.h"

namespace quern {

struct AttentionSequence {
  int64_t q_offset;
  int64_t q_len;
  int64_t kv_len;
};

// Consecutive queries [q_begin, q_end) of a sequence, for one key/value head.
struct AttentionBlock {
  int32_t sequence;
  int32_t kv_head;
  int32_t q_begin;
  int32_t q_end;

  int64_t q_count() const { return int64_t{q_end} - q_begin; }
};

constexpr int64_t kNoPartial = -1;

// The block against the chunks [chunk_begin, chunk_end). Without a partial
// these are all that any of its queries sees, perhaps none, and the item writes
// the block's output. With one it is a single chunk, whose result goes to the
// rows of partial results that start with `partial`.
struct AttentionWork {
  AttentionBlock block;
  int32_t chunk_begin;
  int32_t chunk_end;
  int64_t partial;
};

// Merges `chunks` partial results of the block into its output. That of chunk c
// starts at row partial + c * (rows of the block).
struct AttentionMerge {
  AttentionBlock block;
  int64_t chunks;
  int64_t partial;
};

// The arrays of a schedule, kept from step to step: only growth allocates.
struct AttentionScheduleStorage {
  std::vector<AttentionSequence> sequences;
  std::vector<AttentionWork> work;
  std::vector<AttentionMerge> merges;
};

// A borrowed, validated schedule: the storage outlives it and does not change.
class AttentionSchedule {
 public:
  // Short enough that a block's logits stay in the L1 or L2 cache, long enough
  // that merging costs less than a percent.
  static constexpr int64_t kChunkTokens = 256;
  // A block has at most this many rows, or those of one query if they are more.
  static constexpr int64_t kBlockRows = 32;
  // No q_len or kv_len may be longer.
  static constexpr int64_t kMaxTokens = int64_t{1} << 30;
  // Nor may a step have more work items: they take 128 MiB. Eight heads have
  // as many blocks of four million tokens, or chunks of 134 million.
  static constexpr int64_t kMaxWork = int64_t{1} << 22;

  // Nothing to do.
  AttentionSchedule() = default;

  // InvalidArgument names the field, the sequence and the value: lengths out of
  // range, lists of different sizes, q_len > kv_len (but for kv_len 0: such
  // queries see nothing, their output is zero), num_workers < 1.
  // ResourceExhausted: more than kMaxWork work items. Deterministic: the same
  // arguments give the same schedule. Cost: linear in the work items.
  static absl::StatusOr<AttentionSchedule> Build(
      const AttentionSpec& spec, absl::Span<const int64_t> q_lens,
      absl::Span<const int64_t> kv_lens, int num_workers,
      AttentionScheduleStorage& storage);

  absl::Span<const AttentionSequence> sequences() const { return sequences_; }
  absl::Span<const AttentionWork> work() const { return work_; }
  absl::Span<const AttentionMerge> merges() const { return merges_; }

  // Rows of q and of the output.
  int64_t num_tokens() const { return num_tokens_; }
  // Query heads of a key/value head, and key/value heads, as the spec said.
  int64_t group() const { return group_; }
  int64_t kv_heads() const { return kv_heads_; }
  // Rows of the largest block.
  int64_t max_block_rows() const { return max_block_rows_; }
  // Rows of partial results that the work items leave.
  int64_t partial_rows() const { return partial_rows_; }

  // Keys of the block's sequence that its query `query` sees; >= 0.
  int64_t VisibleKeys(const AttentionBlock& block, int64_t query) const {
    const AttentionSequence& s =
        sequences_[static_cast<size_t>(block.sequence)];
    const int64_t visible = s.kv_len - s.q_len + query + 1;
    return visible < 0 ? 0 : visible < s.kv_len ? visible : s.kv_len;
  }

  // One line for each work item and merge, to read and to compare.
  std::string DebugString() const;

 private:
  absl::Span<const AttentionSequence> sequences_;
  absl::Span<const AttentionWork> work_;
  absl::Span<const AttentionMerge> merges_;
  int64_t num_tokens_ = 0;
  int64_t group_ = 0;
  int64_t kv_heads_ = 0;
  int64_t max_block_rows_ = 0;
  int64_t partial_rows_ = 0;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_H_
