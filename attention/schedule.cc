#include "quern/attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule/draft_trees.h"
#include "quern/attention/schedule/prefix_blocks.h"
#include "quern/attention/schedule/schedule_line.h"
#include "quern/attention/schedule/schedule_stretch.h"
#include "quern/attention/schedule/schedule_tiles.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";
constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

// Chunks of whole blocks that are enough for a worker.
constexpr double kEnoughChunks = 48;

absl::Status CheckBatch(const AttentionBatch& batch) {
  const auto size = static_cast<int64_t>(batch.q_lens.size());
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "kv_lens.size()",
                                   static_cast<int64_t>(batch.kv_lens.size()),
                                   size, "q_lens"));
  if (!batch.causal.empty()) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "causal.size()",
                                     static_cast<int64_t>(batch.causal.size()),
                                     size, "q_lens"));
  }
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    const int64_t q_len = batch.q_lens[s], kv_len = batch.kv_lens[s];
    if (q_len < 0 || q_len > AttentionSchedule::kMaxTokens) {
      return InvalidArgument(
          kOp, "sequence ", s, ": q_len=", q_len,
          "; need 0 <= q_len <= ", AttentionSchedule::kMaxTokens);
    }
    if (kv_len < 0 || kv_len > AttentionSchedule::kMaxTokens) {
      return InvalidArgument(
          kOp, "sequence ", s, ": kv_len=", kv_len,
          "; need 0 <= kv_len <= ", AttentionSchedule::kMaxTokens);
    }
    const bool causal = batch.causal.empty() || batch.causal[s] != 0;
    if (causal && kv_len != 0 && q_len > kv_len) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_len,
                             ", kv_len=", kv_len,
                             "; need q_len <= kv_len, the new tokens included, "
                             "of a causal sequence");
    }
  }
  return CheckDrafts(batch);
}

// The rows of a block: fewer than the tiles say where the workers would share
// too few blocks. What queries do not see is counted too: it only makes the
// answer a coarser one.
int64_t BlockRowsFor(const AttentionBatch& batch, const AttentionTiles& tiles,
                     int64_t heads, int num_workers) {
  double row_chunks = 0;
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    row_chunks += static_cast<double>(heads) *
                  static_cast<double>(batch.q_lens[s]) *
                  static_cast<double>(DivCeil(batch.kv_lens[s], kChunk));
  }
  int64_t block_rows = tiles.block_rows;
  while (num_workers > 1 &&
         row_chunks <
             kEnoughChunks * num_workers * static_cast<double>(block_rows) &&
         HalveBlockRows(&block_rows)) {
  }
  return block_rows;
}

absl::Status TooManyBlocks() {
  return absl::ResourceExhaustedError(absl::StrCat(
      kOp, ": the step has more than ", AttentionSchedule::kMaxBlocks,
      " blocks; need fewer or shorter sequences"));
}

absl::Status TooManyRuns() {
  return absl::ResourceExhaustedError(absl::StrCat(
      kOp, ": the members of prefixes have more than ",
      AttentionSchedule::kMaxRuns, " runs; need fewer workers or members"));
}

absl::Status TooManyPartialRows() {
  return absl::ResourceExhaustedError(absl::StrCat(
      kOp, ": the step leaves more than ", AttentionSchedule::kMaxPartialRows,
      " rows of partial results; need fewer workers or heads"));
}

// fn(stretch, head) for each block of the heads [begin, end) of sequence s,
// head by head: one head's keys stay in the cache for all of its blocks.
template <typename Fn>
void ForEachBlock(const AttentionSequence& sequence, size_t s, int64_t begin,
                  int64_t end, int64_t block_queries, int64_t group,
                  const Fn& fn) {
  AttentionBlock block;
  block.sequence = static_cast<int32_t>(s);
  block.kv_head = 0;
  block.prefix = kNoPrefix;
  block.q_begin = 0;
  block.q_end = static_cast<int32_t>(std::min(sequence.q_len, block_queries));
  const Stretch stretch(sequence, block, group);
  for (int64_t head = begin; head < end; ++head) {
    if (sequence.q_len <= block_queries) {  // decode: the same for all heads
      if (sequence.q_len > 0) fn(stretch, head);
      continue;
    }
    for (int64_t q = 0; q < sequence.q_len; q += block_queries) {
      block.q_begin = static_cast<int32_t>(q);
      block.q_end =
          static_cast<int32_t>(std::min(sequence.q_len, q + block_queries));
      fn(Stretch(sequence, block, group), head);
    }
  }
}

// The prefix that the sequence is a member of, or null.
const PrefixGroup* PrefixOf(const AttentionScheduleStorage& storage, size_t s) {
  if (storage.places.empty() || storage.places[s].prefix == kNoPrefix) {
    return nullptr;
  }
  return &storage.prefixes[static_cast<size_t>(storage.places[s].prefix)];
}

// The block of all members' queries.
Stretch PrefixStretch(const AttentionScheduleStorage& storage, size_t index,
                      int64_t group) {
  const PrefixGroup& prefix = storage.prefixes[index];
  const auto sequence = [&](int32_t i) -> const AttentionSequence& {
    return storage.sequences[static_cast<size_t>(
        storage.members[static_cast<size_t>(i)])];
  };
  AttentionBlock block;
  block.sequence = storage.members[static_cast<size_t>(prefix.begin)];
  block.kv_head = 0;
  block.q_begin = block.q_end = 0;
  block.prefix = static_cast<int32_t>(index);
  for (int32_t i = prefix.begin; i < prefix.end; ++i) {
    block.q_end += static_cast<int32_t>(sequence(i).q_len);
  }
  Stretch stretch(sequence(prefix.begin), block, group);
  stretch.OnlyPrefix(prefix.tokens);
  return stretch;
}

// The blocks of a step: those of prefixes, and then those of sequences.
class Blocks {
 public:
  // Empties the storage.
  Blocks(const AttentionSpec& spec, int64_t block_queries,
         AttentionScheduleStorage& storage)
      : storage_(storage),
        block_queries_(block_queries),
        group_(spec.group()),
        kv_heads_(spec.kv.kv_heads()) {
    storage.sequences.clear();
    storage.drafts.clear();
    storage.work.clear();
    storage.shares.clear();
    storage.runs.clear();
    storage.merges.clear();
    storage.prefix_runs.clear();
  }

  // Fills the storage's sequences and prefixes, and counts their blocks.
  absl::Status AddSequences(const AttentionSpec& spec,
                            const AttentionBatch& batch) {
    const int64_t left = AttentionSchedule::WindowTokens(spec.window_left);
    const int64_t right = AttentionSchedule::WindowTokens(spec.window_right);
    int64_t blocks = 0;
    for (size_t s = 0; s < batch.q_lens.size(); ++s) {
      const int64_t q_len = batch.q_lens[s];
      const bool causal = batch.causal.empty() || batch.causal[s] != 0;
      AttentionSequence& sequence = storage_.sequences.emplace_back();
      sequence.q_offset = num_tokens_;
      sequence.q_len = q_len;
      sequence.kv_len = batch.kv_lens[s];
      sequence.left = left;
      sequence.right = causal ? 0 : right;
      AddDrafts(batch, s, storage_);
      num_tokens_ += q_len;
      longest_ = std::max(longest_, std::min(q_len, block_queries_));
      // At most 2^31 heads of 2^30 blocks; the sum stays near the limit.
      blocks += kv_heads_ * DivCeil(q_len, block_queries_);
      if (blocks > AttentionSchedule::kMaxBlocks) return TooManyBlocks();
    }
    QUERN_RETURN_IF_ERROR(
        MakePrefixBlocks(spec, batch, block_queries_, storage_));
    blocks += kv_heads_ * static_cast<int64_t>(storage_.prefixes.size());
    if (blocks > AttentionSchedule::kMaxBlocks) return TooManyBlocks();
    for (size_t p = 0; p < storage_.prefixes.size(); ++p) {
      longest_ = std::max(longest_,
                          PrefixStretch(storage_, p, group_).block.q_count());
    }
    storage_.work.reserve(static_cast<size_t>(blocks));
    return absl::OkStatus();
  }

  int64_t num_tokens() const { return num_tokens_; }
  // Queries of the block that has most.
  int64_t longest() const { return longest_; }

  // What all blocks of one head cost; each head costs the same.
  double CostOfHead() const {
    double total = 0;
    for (size_t p = 0; p < storage_.prefixes.size(); ++p) {
      total += PrefixStretch(storage_, p, group_).cost();
    }
    for (size_t s = 0; s < storage_.sequences.size(); ++s) {
      const PrefixGroup* prefix = PrefixOf(storage_, s);
      ForEachBlock(storage_.sequences[s], s, 0, 1, block_queries_, group_,
                   [&](const Stretch& stretch, int64_t) {
                     if (prefix == nullptr) {
                       total += stretch.cost();
                       return;
                     }
                     Stretch rest = stretch;
                     rest.AfterPrefix(prefix->tokens);
                     total += rest.cost();
                   });
    }
    return total;
  }

  // Puts the blocks of prefixes on the line, before LaySequences.
  absl::Status LayPrefixes(ScheduleLine& line) {
    const auto runs = [&] {
      return static_cast<int32_t>(storage_.runs.size());
    };
    int64_t member_runs = 0;
    for (size_t p = 0; p < storage_.prefixes.size(); ++p) {
      const Stretch stretch = PrefixStretch(storage_, p, group_);
      const PrefixGroup& prefix = storage_.prefixes[p];
      for (int64_t head = 0; head < kv_heads_; ++head) {
        storage_.prefix_runs.push_back(runs());
        line.AddPrefix(stretch, head);
        member_runs += (int64_t{prefix.end} - prefix.begin) *
                       (int64_t{runs()} - storage_.prefix_runs.back());
      }
    }
    storage_.prefix_runs.push_back(runs());
    return member_runs > AttentionSchedule::kMaxRuns ? TooManyRuns()
                                                     : absl::OkStatus();
  }

  // Puts the blocks of sequences on the line: for those of a prefix's members,
  // what they see beyond the prefix.
  void LaySequences(ScheduleLine& line) const {
    for (size_t s = 0; s < storage_.sequences.size(); ++s) {
      const PrefixGroup* prefix = PrefixOf(storage_, s);
      ForEachBlock(storage_.sequences[s], s, 0, kv_heads_, block_queries_,
                   group_, [&](const Stretch& stretch, int64_t head) {
                     if (prefix == nullptr) return line.Add(stretch, head);
                     Stretch rest = stretch;
                     rest.AfterPrefix(prefix->tokens);
                     const PrefixPlace& place = storage_.places[s];
                     const auto first =
                         static_cast<size_t>(place.prefix * kv_heads_ + head);
                     line.AddAfterPrefix(rest, head,
                                         storage_.prefix_runs[first],
                                         storage_.prefix_runs[first + 1],
                                         place.first_query * group_);
                   });
    }
  }

 private:
  AttentionScheduleStorage& storage_;
  const int64_t block_queries_;
  const int64_t group_;
  const int64_t kv_heads_;
  int64_t num_tokens_ = 0;
  int64_t longest_ = 0;
};

}  // namespace

absl::Status AttentionSchedule::CheckSpec(const AttentionSpec& spec,
                                          const AttentionTiles& tiles,
                                          int num_workers, const char* name) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, name, num_workers, 1, kMaxWorkers));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "block_rows", tiles.block_rows, 1, kMaxTokens));
  return CheckRange(kOp, "row_tile", tiles.row_tile, 1, tiles.block_rows);
}

absl::StatusOr<AttentionSchedule> AttentionSchedule::Build(
    const AttentionSpec& spec, const AttentionBatch& batch,
    const AttentionTiles& tiles, int num_workers,
    AttentionScheduleStorage& storage) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec, tiles, num_workers));
  QUERN_RETURN_IF_ERROR(CheckBatch(batch));

  AttentionSchedule schedule;
  schedule.group_ = spec.group();
  schedule.kv_heads_ = spec.kv.kv_heads();
  const int64_t block_rows = BlockRowsFor(
      batch, tiles, schedule.group_ * schedule.kv_heads_, num_workers);
  Blocks blocks(spec, BlockQueries(schedule.group_, block_rows, tiles.row_tile),
                storage);
  QUERN_RETURN_IF_ERROR(blocks.AddSequences(spec, batch));
  schedule.num_tokens_ = blocks.num_tokens();
  schedule.max_block_rows_ = blocks.longest() * schedule.group_;
  ScheduleLine line(
      storage, num_workers,
      blocks.CostOfHead() * static_cast<double>(schedule.kv_heads_),
      static_cast<double>(kChunk * (kKeyCost + schedule.max_block_rows_)));
  QUERN_RETURN_IF_ERROR(blocks.LayPrefixes(line));
  blocks.LaySequences(line);
  line.End();
  schedule.partial_rows_ = line.partial_rows();
  if (schedule.partial_rows_ > kMaxPartialRows) return TooManyPartialRows();
  schedule.Borrow(storage);
  return schedule;
}

void AttentionSchedule::Borrow(const AttentionScheduleStorage& storage) {
  sequences_ = storage.sequences;
  drafts_ = storage.drafts;
  work_ = storage.work;
  shares_ = storage.shares;
  runs_ = storage.runs;
  merges_ = storage.merges;
  members_ = storage.members;
  prefixes_ = storage.prefixes;
}

AttentionSchedule AttentionSchedule::CopyTo(
    AttentionScheduleStorage& storage) const {
  storage.sequences.assign(sequences_.begin(), sequences_.end());
  storage.drafts.assign(drafts_.begin(), drafts_.end());
  storage.work.assign(work_.begin(), work_.end());
  storage.shares.assign(shares_.begin(), shares_.end());
  storage.runs.assign(runs_.begin(), runs_.end());
  storage.merges.assign(merges_.begin(), merges_.end());
  storage.members.assign(members_.begin(), members_.end());
  storage.prefixes.assign(prefixes_.begin(), prefixes_.end());
  AttentionSchedule copy = *this;
  copy.Borrow(storage);
  return copy;
}

double AttentionSchedule::Cost(const AttentionWork& work) const {
  const Stretch stretch(sequences_[static_cast<size_t>(work.block.sequence)],
                        work.block, group_);
  return AttentionSchedule::kItemCost +
         stretch.cost(work.chunk_begin, work.chunk_end);
}

double AttentionSchedule::Cost(const AttentionMerge& merge) const {
  const absl::Span<const AttentionRun> runs = Runs(merge);
  int64_t pieces = 0;
  for (const AttentionRun& run : runs) {
    pieces +=
        PieceCount(run.chunk_begin, run.chunk_end, runs.front().chunk_begin);
  }
  return static_cast<double>(kMergeCost) * static_cast<double>(pieces) *
         static_cast<double>(merge.row_end - merge.row_begin);
}

}  // namespace quern
