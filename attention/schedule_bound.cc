#include "quern/attention/schedule_bound.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule/schedule_tiles.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";

// x * y or `most`, whichever is less; x, y >= 0.
int64_t Product(int64_t x, int64_t y, int64_t most) {
  int64_t product = 0;
  return CheckedMul(x, y, &product) ? std::min(product, most) : most;
}

}  // namespace

absl::StatusOr<AttentionBound> AttentionBoundOf(const AttentionSpec& spec,
                                                const AttentionLimits& limits,
                                                const AttentionTiles& tiles,
                                                int max_workers) {
  constexpr int64_t kMaxTokens = AttentionSchedule::kMaxTokens;
  QUERN_RETURN_IF_ERROR(
      AttentionSchedule::CheckSpec(spec, tiles, max_workers, "max_workers"));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_tokens", limits.max_tokens, 0, kMaxTokens));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_sequences", limits.max_sequences, 0, kMaxTokens));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_kv_len", limits.max_kv_len, 0, kMaxTokens));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_drafts", limits.max_drafts, 0, kMaxTokens));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "max_schedule_workers",
                                   limits.max_schedule_workers, 0,
                                   AttentionSchedule::kMaxWorkers));
  const int workers = std::max(max_workers, limits.max_schedule_workers);

  const int64_t group = spec.group(), kv_heads = spec.kv.kv_heads();
  int64_t most_queries = BlockQueries(group, tiles.block_rows, tiles.row_tile);
  int64_t fewest_queries = most_queries;
  for (int64_t block_rows = tiles.block_rows; HalveBlockRows(&block_rows);) {
    fewest_queries = std::min(fewest_queries,
                              BlockQueries(group, block_rows, tiles.row_tile));
  }
  most_queries = std::min(most_queries, limits.max_tokens);

  AttentionBound bound;
  bound.sequences = limits.max_sequences;
  bound.drafts = std::min(limits.max_drafts, limits.max_tokens);
  bound.max_block_rows = most_queries * group;
  // Each end of a share cuts one block at most. A cut block leaves a run for
  // each of its parts, and rows of partial results for each span of its keys; a
  // part that begins within a span leaves three more, and its end may divide
  // another span.
  const int64_t ends = int64_t{kMaxRounds} * workers;
  bound.shares = ends;
  constexpr int64_t kMaxBlocks = AttentionSchedule::kMaxBlocks;
  const int64_t with_queries =
      std::min(limits.max_sequences, limits.max_tokens);
  int64_t blocks = Product(
      kv_heads, limits.max_tokens / fewest_queries + with_queries, kMaxBlocks);
  int64_t rows = Product(limits.max_tokens, group * kv_heads,
                         AttentionSchedule::kMaxPartialRows);
  const int64_t spans =
      DivCeil(limits.max_kv_len, AttentionSchedule::kChunkTokens *
                                     AttentionSchedule::kSpanChunks) +
      5;
  int64_t whole_rows = std::min(
      rows,
      Product(ends, bound.max_block_rows, AttentionSchedule::kMaxPartialRows));
  bound.runs = 2 * ends;
  bound.merges = ends + workers;
  bound.prefix_runs = 1;
  if (limits.prefix_groups) {
    // All blocks of prefixes and of their members leave partial results. A cut
    // of a prefix is a run of each member, which brings one query or more.
    bound.members = limits.max_sequences;
    bound.prefixes = with_queries / 2;
    const int64_t prefix_blocks = Product(kv_heads, bound.prefixes, kMaxBlocks);
    bound.prefix_runs += prefix_blocks;
    const int64_t member_blocks = Product(kv_heads, with_queries, kMaxBlocks);
    blocks = std::min(kMaxBlocks, blocks + prefix_blocks);
    bound.runs += prefix_blocks + 2 * member_blocks +
                  Product(ends, most_queries, AttentionSchedule::kMaxRuns);
    bound.merges += member_blocks;
    whole_rows = 2 * rows;
  }
  bound.work = blocks + ends;
  bound.partial_rows =
      std::min(AttentionSchedule::kMaxPartialRows,
               Product(whole_rows, spans, AttentionSchedule::kMaxPartialRows) +
                   Product(4 * ends, bound.max_block_rows,
                           AttentionSchedule::kMaxPartialRows));
  return bound;
}

void Reserve(const AttentionBound& bound, AttentionScheduleStorage& storage) {
  storage.sequences.reserve(static_cast<size_t>(bound.sequences));
  storage.drafts.reserve(static_cast<size_t>(bound.drafts));
  storage.work.reserve(static_cast<size_t>(bound.work));
  storage.shares.reserve(static_cast<size_t>(bound.shares));
  storage.runs.reserve(static_cast<size_t>(bound.runs));
  storage.merges.reserve(static_cast<size_t>(bound.merges));
  storage.members.reserve(static_cast<size_t>(bound.members));
  storage.places.reserve(static_cast<size_t>(bound.members));
  storage.prefixes.reserve(static_cast<size_t>(bound.prefixes));
  storage.prefix_runs.reserve(static_cast<size_t>(bound.prefix_runs));
}

}  // namespace quern
