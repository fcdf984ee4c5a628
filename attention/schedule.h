#ifndef QUERN_ATTENTION_SCHEDULE_H_
#define QUERN_ATTENTION_SCHEDULE_H_

// How the attention of one step is divided: integers only, built once a step
// and used by every layer.
//
// The batch is ragged: sequence s has q_len new queries, rows
// [q_offset, q_offset + q_len) of q, the last of its kv_len tokens. Query i of
// it stands at position p = kv_len - q_len + i and sees the keys
// [p - left, p + right] of its sequence: right is 0 where it is causal. Queries
// of a sequence that is not causal need not be among its tokens and may be more
// than they (cross-attention); without windows each sees all keys.
//
// The last draft_len tokens of a causal sequence may be drafts: not a text but
// a tree of continuations. Draft i sees draft j where bit j of its mask m is
// set. The path of draft i is the tokens before the drafts, then the drafts
// that it sees. Windows count along the path: with n(j) = popcount(m & (2^j -
// 1)) and t0 = kv_len - draft_len, draft j stands at t0 + n(j) and draft i at
// p = t0 + n(i). A mask of the bits [0, i] is causal attention.
//
//   block   rows that share their keys: consecutive queries of one sequence
//           times the query heads of one key/value head
//   chunk   the keys [c * kChunkTokens, (c + 1) * kChunkTokens) of a sequence
//   span    kSpanChunks chunks, from a multiple of that on
//   item    a block against a run of chunks, done by one worker
//   share   consecutive items that a worker takes at once
//
// Determinism. The softmax of a row is computed chunk by chunk. The chunks of a
// span are merged from left to right, then the spans are merged from left to
// right. This order depends on the position of the keys alone. Therefore the
// number of workers, the other sequences of the batch, and how a sequence was
// cut into steps do not change the bits of a row. An item that covers only part
// of a block's chunks leaves, for each span, what can be merged later without
// changing that order: see PieceEnd.
//
// Who does what. Lay all blocks on a line, each as long as it costs; cut it
// into a stretch for each worker, and each stretch into shares. A block is cut
// only where a share ends, so that few leave partial results, and a few long
// sequences fill any number of workers. Half of a stretch is one share, the
// rest smaller and smaller ones. Shares are claimed longest first: the small
// ones even out what a plan cannot know, a worker that lost its core for a
// while. Workers begin a stretch apart, because the outputs of heads that are
// neighbours lie in the same 4 KiB of memory, and a core's prefetchers take
// lines from another core that is about to write them. With shares of one size
// beside each other, a prefill of 512 tokens took 1.06 times as long (two
// workers with an L3 each, Zen 4, 2026).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"

namespace quern {

struct AttentionSequence {
  int64_t q_offset;
  int64_t q_len;
  int64_t kv_len;
  // What a query sees beside itself: at most kMaxTokens, which is everything.
  int64_t left;
  int64_t right;
  int64_t draft_len;    // the last of its queries, which are drafts
  int64_t draft_begin;  // the first of them in drafts()

  // The first key that any of the queries sees, where there are any.
  int64_t first_key() const { return FirstKey(0); }
  // The first key that any query from q_begin on sees. A draft may stand where
  // the first draft does.
  int64_t FirstKey(int64_t q_begin) const {
    const int64_t query = std::min(q_begin, q_len - draft_len);
    return std::max(int64_t{0}, kv_len - q_len + query - left);
  }
};

// A query that is a draft.
struct AttentionDraft {
  uint64_t seen;   // bit j: it sees draft j, which no window hides from it
  int64_t before;  // drafts before it on its path
};

// Consecutive queries [q_begin, q_end) of a sequence, for one key/value head.
// Or those of all members of a prefix, one after another, against the keys that
// they share: `sequence` is the first of them then.
struct AttentionBlock {
  int32_t sequence;
  int32_t kv_head;
  int32_t q_begin;
  int32_t q_end;
  int32_t prefix;  // of prefixes(), or kNoPrefix

  int64_t q_count() const { return int64_t{q_end} - q_begin; }
};
constexpr int32_t kNoPrefix = -1;

// The sequences members[begin, end) share their first `tokens` keys.
struct PrefixGroup {
  int32_t begin;
  int32_t end;
  int64_t tokens;

  int64_t saved_tokens() const { return (int64_t{end} - begin - 1) * tokens; }
};

// The prefix that a sequence is a member of, and how many queries of its block
// are those of members before.
struct PrefixPlace {
  int32_t prefix = kNoPrefix;
  int32_t first_query = 0;
};

constexpr int64_t kNoPartial = -1;

// The block against the chunks [chunk_begin, chunk_end). Without a partial
// these are all that any of its queries sees, perhaps none, and the item writes
// the block's output. With one, piece i of it goes to the rows of partial
// results [partial + i * rows, partial + (i + 1) * rows), `rows` the block's.
struct AttentionWork {
  AttentionBlock block;
  int32_t chunk_begin;
  int32_t chunk_end;
  int64_t partial;
};

// Merges the rows [row_begin, row_end) of a block, whose items are the runs
// [run_begin, run_end) in the order of their chunks, into its output. The first
// ones may be those of a prefix.
struct AttentionMerge {
  AttentionBlock block;
  int32_t row_begin;
  int32_t row_end;
  int32_t run_begin;
  int32_t run_end;
};

// The chunks of one item, for merges: where its partial results are, and how
// many rows from one piece to the next.
struct AttentionRun {
  int32_t chunk_begin;
  int32_t chunk_end;
  int64_t partial;
  int64_t rows;
};

// The work items [begin, end), and what they cost together.
struct AttentionShare {
  int32_t begin;
  int32_t end;
  double cost;
};

// The sequences of a step: one entry each. Build reads these arrays and keeps
// none of them.
struct AttentionBatch {
  absl::Span<const int64_t> q_lens;   // new tokens, which have queries
  absl::Span<const int64_t> kv_lens;  // all tokens, the new ones included
  // Not 0: no query sees what comes after it. Empty: all are causal.
  absl::Span<const uint8_t> causal;
  // Sequences that begin with the same pages: groups() and members() of
  // SharedPrefixes::Find. The queries of a group meet those keys in blocks of
  // their own, which read them once. The bits of the results are the same. Each
  // block takes as many members as it has room for queries (block_rows / group
  // of them); a member that brings more queries than that, in a long prefill,
  // reads the keys by itself. Both empty: no groups. Groups are checked, and
  // ignored, where the spec has a window_left: some queries do not see all of a
  // prefix.
  absl::Span<const PrefixGroup> prefix_groups;
  absl::Span<const int32_t> prefix_members;
  // The last draft_lens[s] <= kMaxDrafts queries of sequence s are drafts, and
  // draft_masks has a mask for each, sequence by sequence. Drafts come after
  // those that they see, so no mask has a bit above its draft's own, which may
  // be clear: the draft then does not see its own key. Both empty: no drafts.
  absl::Span<const int64_t> draft_lens = {};
  absl::Span<const uint64_t> draft_masks = {};
};

// The blocks that kernels like. The defaults are right for all kernels here;
// other values are for experiments.
struct AttentionTiles {
  // Rows of a block at most, or those of one query if they are more. It is
  // halved, down to 32, while the workers would have few blocks to share.
  int64_t block_rows = 128;
  // Rows computed at once: blocks are multiples of it where that costs little.
  int64_t row_tile = 1;

  friend bool operator==(const AttentionTiles& a, const AttentionTiles& b) {
    return a.block_rows == b.block_rows && a.row_tile == b.row_tile;
  }
  friend bool operator!=(const AttentionTiles& a, const AttentionTiles& b) {
    return !(a == b);
  }
};

// The arrays of a schedule, kept from step to step: only growth allocates.
// Indices only: they may be copied and moved. Callers do not look inside.
struct AttentionScheduleStorage {
  std::vector<AttentionSequence> sequences;
  std::vector<AttentionDraft> drafts;
  std::vector<AttentionWork> work;
  std::vector<AttentionShare> shares;
  std::vector<AttentionRun> runs;
  std::vector<AttentionMerge> merges;
  std::vector<int32_t> members;
  std::vector<PrefixGroup> prefixes;
  std::vector<PrefixPlace> places;   // of each sequence
  std::vector<int32_t> prefix_runs;  // the first of each prefix and head
};

// A borrowed, validated schedule: the storage outlives it and does not change,
// and the next Build into that storage ends it. It may be copied freely.
class AttentionSchedule {
 public:
  // Short enough that a block's logits stay in the L1 or L2 cache, long enough
  // that merging costs less than a percent.
  static constexpr int64_t kChunkTokens = 256;
  // What an item leaves for a merge is one row of f32 for each span and row:
  // for each of its rows, about a thousandth of the keys and values it read.
  static constexpr int64_t kSpanChunks = 4;
  // No q_len or kv_len may be longer.
  static constexpr int64_t kMaxTokens = int64_t{1} << 30;
  // A mask has a bit for each draft of a sequence.
  static constexpr int64_t kMaxDrafts = 64;
  // The most blocks of a step, those of prefixes included: they take 160 MiB.
  // Eight heads have as many where a sequence has four million tokens and
  // a block eight queries.
  static constexpr int64_t kMaxBlocks = int64_t{1} << 22;
  // The most runs of prefixes, each counted once for every member: 384 MiB. 128
  // members have as many where their prefix is cut into 131072 items.
  static constexpr int64_t kMaxRuns = int64_t{1} << 24;
  // The most rows of partial results.
  static constexpr int64_t kMaxPartialRows = int64_t{1} << 40;
  static constexpr int kMaxWorkers = 1 << 16;

  // Nothing to do.
  AttentionSchedule() = default;

  // InvalidArgument names the field, the sequence and the value: lengths out of
  // range, lists of different sizes, q_len > kv_len where causal (but for
  // kv_len 0: such queries see nothing, their output is zero), num_workers not
  // in [1, kMaxWorkers], tiles of no rows, prefixes that are not whole chunks,
  // that some query does not see, or of a sequence in two groups; more drafts
  // than kMaxDrafts or the sequence's queries or keys, drafts of a sequence
  // that is not causal, another number of masks than of drafts, and a mask with
  // a bit above its own. ResourceExhausted: more than kMaxBlocks, kMaxRuns or
  // kMaxPartialRows. num_workers: those of the executor that will run it; with
  // any other number the results are the same, the shares less even.
  // Deterministic: the same arguments give the same bytes. Cost: linear in the
  // blocks and runs, a few nanoseconds each.
  static absl::StatusOr<AttentionSchedule> Build(
      const AttentionSpec& spec, const AttentionBatch& batch,
      const AttentionTiles& tiles, int num_workers,
      AttentionScheduleStorage& storage);
  // Like the other Build: all sequences are causal, the tiles are the default.
  static absl::StatusOr<AttentionSchedule> Build(
      const AttentionSpec& spec, absl::Span<const int64_t> q_lens,
      absl::Span<const int64_t> kv_lens, int num_workers,
      AttentionScheduleStorage& storage) {
    return Build(spec, {q_lens, kv_lens, {}, {}, {}}, AttentionTiles(),
                 num_workers, storage);
  }

  // What Build refuses of these whatever the batch. A refusal calls the number
  // of workers `name`.
  static absl::Status CheckSpec(const AttentionSpec& spec,
                                const AttentionTiles& tiles, int num_workers,
                                const char* name = "num_workers");

  // Copies the schedule into another storage.
  AttentionSchedule CopyTo(AttentionScheduleStorage& storage) const;

  absl::Span<const AttentionSequence> sequences() const { return sequences_; }
  // The drafts of all sequences, one after another.
  absl::Span<const AttentionDraft> drafts() const { return drafts_; }
  // The query as a draft of its sequence, or null.
  const AttentionDraft* Draft(const AttentionSequence& s, int64_t query) const {
    const int64_t draft = query - (s.q_len - s.draft_len);
    return draft < 0 ? nullptr
                     : &drafts_[static_cast<size_t>(s.draft_begin + draft)];
  }
  // All items in the order of the line: by sequence, head, queries and chunks,
  // prefixes before all sequences.
  absl::Span<const AttentionWork> work() const { return work_; }
  // All of the work, in parts of which none is empty. Claimed in this order,
  // the longest first, they keep num_workers workers busy to the end.
  absl::Span<const AttentionShare> shares() const { return shares_; }
  absl::Span<const AttentionWork> Work(const AttentionShare& share) const {
    return work_.subspan(static_cast<size_t>(share.begin),
                         static_cast<size_t>(share.end - share.begin));
  }
  absl::Span<const AttentionMerge> merges() const { return merges_; }
  absl::Span<const AttentionRun> Runs(const AttentionMerge& merge) const {
    return runs_.subspan(static_cast<size_t>(merge.run_begin),
                         static_cast<size_t>(merge.run_end - merge.run_begin));
  }

  // What blocks share, each a part of a group of the batch. None where no two
  // neighbours in a group fit into one block.
  absl::Span<const PrefixGroup> prefixes() const { return prefixes_; }
  absl::Span<const int32_t> Members(const PrefixGroup& prefix) const {
    return members_.subspan(static_cast<size_t>(prefix.begin),
                            static_cast<size_t>(prefix.end - prefix.begin));
  }

  // A window of a spec as `left` and `right` of AttentionSequence have it.
  static constexpr int64_t WindowTokens(int64_t window) {
    return window == kNoWindow || window > kMaxTokens ? kMaxTokens : window;
  }

  // Whether a span begins with this chunk, or ended before it.
  static bool IsSpanBegin(int32_t chunk) { return chunk % kSpanChunks == 0; }
  // The chunks [chunk, PieceEnd) of a run that ends at run_end are one piece:
  // merged from left to right by whoever computes them. A piece that starts a
  // span, or the run, goes on to the end of the span or of the run. But where
  // earlier chunks of its span are another worker's, each chunk is a piece of
  // its own: merging them first would change the order.
  static int32_t PieceEnd(int32_t chunk, int32_t run_end, bool first_of_block) {
    constexpr auto kSpan = static_cast<int32_t>(kSpanChunks);
    if (chunk % kSpan != 0 && !first_of_block) return chunk + 1;
    const int32_t span_end = (chunk / kSpan + 1) * kSpan;
    return span_end < run_end ? span_end : run_end;
  }

  // Rows of q and of the output.
  int64_t num_tokens() const { return num_tokens_; }
  // Query heads of a key/value head, and key/value heads, as the spec said.
  int64_t group() const { return group_; }
  int64_t kv_heads() const { return kv_heads_; }
  // Rows of the largest block.
  int64_t max_block_rows() const { return max_block_rows_; }
  // Rows of partial results that the work items leave.
  int64_t partial_rows() const { return partial_rows_; }

  // The keys [VisibleBegin, VisibleEnd) of the block's sequence are those that
  // its query `query` sees, of which a draft's mask hides some. The end grows
  // with the query, the begin does where there are no drafts; the end may be 0.
  // In the block of a prefix they are all keys of the prefix, whichever the
  // query: the later keys that its queries see are those of other blocks.
  int64_t VisibleBegin(const AttentionBlock& block, int64_t query) const {
    if (block.prefix != kNoPrefix) return 0;
    const AttentionSequence& s =
        sequences_[static_cast<size_t>(block.sequence)];
    const AttentionDraft* draft = Draft(s, query);
    const int64_t position = draft == nullptr
                                 ? s.kv_len - s.q_len + query
                                 : s.kv_len - s.draft_len + draft->before;
    return position < s.left ? 0 : position - s.left;
  }
  int64_t VisibleEnd(const AttentionBlock& block, int64_t query) const {
    if (block.prefix != kNoPrefix) {
      return prefixes_[static_cast<size_t>(block.prefix)].tokens;
    }
    const AttentionSequence& s =
        sequences_[static_cast<size_t>(block.sequence)];
    const int64_t end = s.kv_len - s.q_len + query + s.right + 1;
    return end < 0 ? 0 : end < s.kv_len ? end : s.kv_len;
  }

  // The first key that any query of the block sees, and the chunk of that key.
  int64_t FirstKey(const AttentionBlock& block) const {
    if (block.prefix != kNoPrefix) return 0;
    return sequences_[static_cast<size_t>(block.sequence)].FirstKey(
        block.q_begin);
  }
  int32_t FirstChunk(const AttentionBlock& block) const {
    return static_cast<int32_t>(FirstKey(block) / kChunkTokens);
  }

  // What an item or a merge is taken to cost. The unit is one row against one
  // key of 128 elements: about 2 ns of bf16 dot products.
  double Cost(const AttentionWork& work) const;
  double Cost(const AttentionMerge& merge) const;
  // The part of a cost that starts an item: its queries are loaded, its output
  // is written.
  static constexpr double kItemCost = 256;

  // One line for each share, work item and merge, to read and to compare.
  std::string DebugString() const;

 private:
  void Borrow(const AttentionScheduleStorage& storage);

  absl::Span<const AttentionSequence> sequences_;
  absl::Span<const AttentionDraft> drafts_;
  absl::Span<const AttentionWork> work_;
  absl::Span<const AttentionShare> shares_;
  absl::Span<const AttentionRun> runs_;
  absl::Span<const AttentionMerge> merges_;
  absl::Span<const int32_t> members_;
  absl::Span<const PrefixGroup> prefixes_;
  int64_t num_tokens_ = 0;
  int64_t group_ = 0;
  int64_t kv_heads_ = 0;
  int64_t max_block_rows_ = 0;
  int64_t partial_rows_ = 0;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_H_
