#include "quern/attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/prefix_blocks.h"
#include "quern/attention/schedule_tiles.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";
constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
constexpr int64_t kSpan = AttentionSchedule::kSpanChunks;

// A key and its value brought from memory: 512 bytes.
constexpr int64_t kKeyCost = 8;
// A row of partial results brought from another core and merged: as many.
constexpr int64_t kMergeCost = 16;

// No share is shorter than this many chunks of the largest block.
constexpr double kLeastShare = 4;
// A block that costs less than this part of a worker's work is never cut, and
// none is for so little: cutting costs a merge, and does not gain as much.
constexpr double kNotWorthACut = 1.0 / 32;

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
  return absl::OkStatus();
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

// Pieces of the run [begin, end) of a block whose chunks start at `first`.
int64_t PieceCount(int64_t begin, int64_t end, int64_t first) {
  const int64_t head = std::min(end, RoundUp(begin, kSpan)) - begin;
  const int64_t spans = DivCeil(end - begin - head, kSpan);
  return (begin == first ? (head == 0 ? 0 : 1) : head) + spans;
}

std::string ToString(const AttentionBlock& block) {
  if (block.prefix != kNoPrefix) {
    return absl::StrCat("prefix ", block.prefix, " kv_head ", block.kv_head,
                        " queries [", block.q_begin, ", ", block.q_end, ")");
  }
  return absl::StrCat("sequence ", block.sequence, " kv_head ", block.kv_head,
                      " queries [", block.q_begin, ", ", block.q_end, ")");
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

// The place on the line of a block, whichever its head. Costs are integers in
// double: exact below 2^53, and the same each time beyond it.
struct Stretch {
  Stretch(const AttentionSequence& s, const AttentionBlock& of, int64_t group)
      : block(of), rows(of.q_count() * group) {
    const int64_t position = s.kv_len - s.q_len;
    key_begin = std::max(int64_t{0}, position + of.q_begin - s.left);
    key_end = std::clamp(position + of.q_end + s.right, int64_t{0}, s.kv_len);
    chunk_begin = static_cast<int32_t>(key_begin / kChunk);
    chunk_end = static_cast<int32_t>(DivCeil(key_end, kChunk));
    first_chunk = chunk_begin;
  }
  // Keeps the first `tokens`, which are whole chunks that every query sees.
  void OnlyPrefix(int64_t tokens) {
    key_end = tokens;
    chunk_end = static_cast<int32_t>(tokens / kChunk);
  }
  // Drops the first `tokens`, which are whole chunks that every query sees.
  void AfterPrefix(int64_t tokens) {
    key_begin = tokens;
    chunk_begin = static_cast<int32_t>(tokens / kChunk);
  }

  // The first key of `chunk` that any of the queries sees.
  int64_t Key(int32_t chunk) const {
    return std::clamp(chunk * kChunk, key_begin, key_end);
  }
  double key_cost() const { return static_cast<double>(kKeyCost + rows); }
  // Cost of the chunks [begin, end), without that of starting an item.
  double cost(int32_t begin, int32_t end) const {
    return static_cast<double>(Key(end) - Key(begin)) * key_cost();
  }
  double cost() const {
    return AttentionSchedule::kItemCost + cost(chunk_begin, chunk_end);
  }

  AttentionBlock block;
  int64_t rows;
  int64_t key_begin, key_end;      // that any of the queries sees
  int32_t chunk_begin, chunk_end;  // with those keys
  int32_t first_chunk;             // of the block, in whichever item
};

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

// Lays blocks on the line and cuts it into shares.
class Line {
 public:
  // The whole line costs `total`, a chunk of its largest block `chunk`.
  Line(AttentionScheduleStorage& storage, int num_workers, double total,
       double chunk)
      : storage_(storage),
        workers_(num_workers),
        worker_(total / num_workers),
        slack_(worker_ * kNotWorthACut) {
    while (workers_ > 1 && rounds_ < kMaxRounds &&
           worker_ >= kLeastShare * chunk * static_cast<double>(1 << rounds_)) {
      ++rounds_;
    }
    NextTarget();
  }

  void Add(const Stretch& stretch, int64_t head) {
    head_ = static_cast<int32_t>(head);
    const double cost = stretch.cost();
    if (cost <= target_ - position_ || last_share()) {
      AddWhole(stretch, cost);
      return;
    }
    const auto first_run = static_cast<int32_t>(storage_.runs.size());
    if (AddItems(stretch, true)) AddMerge(stretch, first_run);
  }

  // A block of a prefix: its rows are merged with what its members add.
  void AddPrefix(const Stretch& stretch, int64_t head) {
    head_ = static_cast<int32_t>(head);
    AddItems(stretch, false);
  }

  // What follows a prefix, whose runs are [prefix_begin, prefix_end), and in
  // whose partial results the block's rows begin at `first_row`.
  void AddAfterPrefix(const Stretch& stretch, int64_t head,
                      int32_t prefix_begin, int32_t prefix_end,
                      int64_t first_row) {
    head_ = static_cast<int32_t>(head);
    const auto first_run = static_cast<int32_t>(storage_.runs.size());
    for (int32_t i = prefix_begin; i < prefix_end; ++i) {
      AttentionRun run = storage_.runs[static_cast<size_t>(i)];
      run.partial += first_row;
      storage_.runs.push_back(run);
    }
    AddItems(stretch, false);
    AddMerge(stretch, first_run);
  }

  void End() {
    CloseShare();
    DivideMerges();
    std::sort(storage_.shares.begin(), storage_.shares.end(),
              [](const AttentionShare& a, const AttentionShare& b) {
                return a.cost != b.cost ? a.cost > b.cost : a.begin < b.begin;
              });
  }

  int64_t partial_rows() const { return partial_rows_; }

 private:
  bool last_share() const { return next_share_ >= int64_t{rounds_} * workers_; }

  // Each field by itself: a struct that is put together on the stack and copied
  // from there waits for its small stores, 10 ns an item.
  void AddWork(const Stretch& stretch, int32_t begin, int32_t end,
               int64_t partial) {
    AttentionWork& work = storage_.work.emplace_back();
    work.block.sequence = stretch.block.sequence;
    work.block.kv_head = head_;
    work.block.q_begin = stretch.block.q_begin;
    work.block.q_end = stretch.block.q_end;
    work.block.prefix = stretch.block.prefix;
    work.chunk_begin = begin;
    work.chunk_end = end;
    work.partial = partial;
  }

  void AddWhole(const Stretch& stretch, double cost) {
    position_ += cost;
    AddWork(stretch, stretch.chunk_begin, stretch.chunk_end, kNoPartial);
  }

  // Whether the items are parts of the block, with partial results. One that is
  // not cut is a part too where it may not be whole.
  bool AddItems(const Stretch& stretch, bool may_be_whole) {
    double cost = stretch.cost();
    int32_t chunk = stretch.chunk_begin;
    const bool may_cut = cost > slack_;
    while (!last_share()) {
      const double room = target_ - position_;
      if (cost <= room) break;
      if (may_cut) {
        if (cost <= room + slack_) break;
        const int32_t cut = CutNear(stretch, chunk, room);
        if (cut >= stretch.chunk_end) break;
        if (cut > chunk) {
          AddPartial(stretch, chunk, cut);
          const double done = stretch.cost(chunk, cut);
          position_ += done;
          cost -= done;
          chunk = cut;
        }
      } else if (cost <= 2 * room) {
        break;  // more of it on this side of the target than on the other
      }
      EndShare();
    }
    if (chunk == stretch.chunk_begin && may_be_whole) {
      AddWhole(stretch, cost);
      return false;
    }
    position_ += cost;
    AddPartial(stretch, chunk, stretch.chunk_end);
    return true;
  }

  // The boundary of chunks nearest to `room`, or one of spans not far away:
  // then the run leaves fewer pieces.
  int32_t CutNear(const Stretch& stretch, int32_t chunk, double room) const {
    const double chunks =
        (static_cast<double>(stretch.Key(chunk)) + room / stretch.key_cost()) /
        static_cast<double>(kChunk);
    if (chunks <= static_cast<double>(chunk)) return chunk;
    if (chunks >= static_cast<double>(stretch.chunk_end)) {
      return stretch.chunk_end;
    }
    const auto cut = static_cast<int64_t>(chunks + 0.5);
    const int64_t span = (cut + kSpan / 2) / kSpan * kSpan;
    const int64_t away = (span > cut ? span - cut : cut - span) * kChunk;
    const bool take_span =
        static_cast<double>(away) * stretch.key_cost() <= slack_ &&
        span > chunk && span < stretch.chunk_end;
    return static_cast<int32_t>(take_span ? span : cut);
  }

  void AddPartial(const Stretch& stretch, int32_t begin, int32_t end) {
    AddWork(stretch, begin, end, partial_rows_);
    storage_.runs.push_back({begin, end, partial_rows_, stretch.rows});
    // At most 2^22 pieces of 2^31 rows; beyond the limit the sum stays near it.
    partial_rows_ =
        std::min(AttentionSchedule::kMaxPartialRows + 1,
                 partial_rows_ + PieceCount(begin, end, stretch.first_chunk) *
                                     stretch.rows);
  }

  void AddMerge(const Stretch& stretch, int32_t first_run) {
    AttentionMerge& merge = storage_.merges.emplace_back();
    merge.block = stretch.block;
    merge.block.kv_head = head_;
    merge.row_begin = 0;
    merge.row_end = static_cast<int32_t>(stretch.rows);
    merge.run_begin = first_run;
    merge.run_end = static_cast<int32_t>(storage_.runs.size());
  }

  // So that no merge has more than a worker's part of all rows.
  void DivideMerges() {
    int64_t rows = 0, count = 0;
    for (const AttentionMerge& merge : storage_.merges) rows += merge.row_end;
    const int64_t most = DivCeil(rows, workers_);
    for (const AttentionMerge& merge : storage_.merges) {
      count += DivCeil(merge.row_end, most);
    }
    // From the last one, in place: none is overwritten before it is read.
    size_t from = storage_.merges.size();
    size_t to = static_cast<size_t>(count);
    storage_.merges.resize(to);
    while (from-- > 0) {
      AttentionMerge merge = storage_.merges[from];
      while (merge.row_end > 0) {
        merge.row_begin =
            static_cast<int32_t>((merge.row_end - 1) / most * most);
        storage_.merges[--to] = merge;
        merge.row_end = merge.row_begin;
      }
    }
  }

  void EndShare() {
    CloseShare();
    ++next_share_;
    NextTarget();
  }

  void CloseShare() {
    const auto begin = static_cast<int32_t>(share_begin_);
    const auto end = static_cast<int32_t>(storage_.work.size());
    if (begin == end) return;
    storage_.shares.push_back({begin, end, position_ - share_position_});
    share_begin_ = storage_.work.size();
    share_position_ = position_;
  }

  // The part of the line before the shares of `round`: 0, 1/2, 3/4 ...
  double Before(int64_t round) const {
    return round == rounds_ ? 1
                            : 1 - 1 / static_cast<double>(int64_t{1} << round);
  }
  void NextTarget() {
    const int64_t round = (next_share_ - 1) / workers_;
    const auto shares = static_cast<double>((next_share_ - 1) % workers_ + 1);
    const double before = Before(round);
    target_ =
        worker_ * (before * workers_ + (Before(round + 1) - before) * shares);
  }

  AttentionScheduleStorage& storage_;
  const int workers_;
  const double worker_;     // what each worker does in all
  const double slack_;      // a share may be longer by that
  int rounds_ = 1;          // shares of a worker
  int64_t next_share_ = 1;  // counted from 1: ends at target_
  double target_ = 0;
  double position_ = 0;
  size_t share_begin_ = 0;  // of the share at hand: in the work, on the line
  double share_position_ = 0;
  int32_t head_ = 0;  // of the block at hand
  int64_t partial_rows_ = 0;
};

}  // namespace

absl::StatusOr<AttentionSchedule> AttentionSchedule::Build(
    const AttentionSpec& spec, const AttentionBatch& batch,
    const AttentionTiles& tiles, int num_workers,
    AttentionScheduleStorage& storage) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "num_workers", num_workers, 1, kMaxWorkers));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "block_rows", tiles.block_rows, 1, kMaxTokens));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "row_tile", tiles.row_tile, 1, tiles.block_rows));
  QUERN_RETURN_IF_ERROR(CheckBatch(batch));
  storage.sequences.clear();
  storage.work.clear();
  storage.shares.clear();
  storage.runs.clear();
  storage.merges.clear();

  AttentionSchedule schedule;
  schedule.group_ = spec.group();
  schedule.kv_heads_ = spec.kv.kv_heads();
  const int64_t block_rows = BlockRowsFor(
      batch, tiles, schedule.group_ * schedule.kv_heads_, num_workers);
  const int64_t block_queries =
      BlockQueries(schedule.group_, block_rows, tiles.row_tile);
  const int64_t left = AttentionSchedule::WindowTokens(spec.window_left);
  const int64_t right = AttentionSchedule::WindowTokens(spec.window_right);
  int64_t blocks = 0, longest = 0;
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    const int64_t q_len = batch.q_lens[s];
    const bool causal = batch.causal.empty() || batch.causal[s] != 0;
    AttentionSequence& sequence = storage.sequences.emplace_back();
    sequence.q_offset = schedule.num_tokens_;
    sequence.q_len = q_len;
    sequence.kv_len = batch.kv_lens[s];
    sequence.left = left;
    sequence.right = causal ? 0 : right;
    schedule.num_tokens_ += q_len;
    longest = std::max(longest, std::min(q_len, block_queries));
    // At most 2^31 heads of 2^30 blocks; the sum stays near the limit.
    blocks += schedule.kv_heads_ * DivCeil(q_len, block_queries);
    if (blocks > kMaxBlocks) return TooManyBlocks();
  }
  QUERN_RETURN_IF_ERROR(MakePrefixBlocks(spec, batch, block_queries, storage));
  blocks += schedule.kv_heads_ * static_cast<int64_t>(storage.prefixes.size());
  if (blocks > kMaxBlocks) return TooManyBlocks();
  schedule.sequences_ = storage.sequences;

  // Each head costs the same.
  double total = 0;
  for (size_t p = 0; p < storage.prefixes.size(); ++p) {
    const Stretch stretch = PrefixStretch(storage, p, schedule.group_);
    longest = std::max(longest, stretch.block.q_count());
    total += stretch.cost();
  }
  for (size_t s = 0; s < storage.sequences.size(); ++s) {
    const PrefixGroup* prefix = PrefixOf(storage, s);
    ForEachBlock(storage.sequences[s], s, 0, 1, block_queries, schedule.group_,
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
  schedule.max_block_rows_ = longest * schedule.group_;
  Line line(
      storage, num_workers, total * static_cast<double>(schedule.kv_heads_),
      static_cast<double>(kChunk * (kKeyCost + schedule.max_block_rows_)));
  storage.work.reserve(static_cast<size_t>(blocks));
  storage.prefix_runs.clear();
  const auto runs = [&] { return static_cast<int32_t>(storage.runs.size()); };
  int64_t member_runs = 0;
  for (size_t p = 0; p < storage.prefixes.size(); ++p) {
    const Stretch stretch = PrefixStretch(storage, p, schedule.group_);
    for (int64_t head = 0; head < schedule.kv_heads_; ++head) {
      storage.prefix_runs.push_back(runs());
      line.AddPrefix(stretch, head);
      const PrefixGroup& prefix = storage.prefixes[p];
      member_runs += (int64_t{prefix.end} - prefix.begin) *
                     (int64_t{runs()} - storage.prefix_runs.back());
    }
  }
  storage.prefix_runs.push_back(runs());
  if (member_runs > kMaxRuns) return TooManyRuns();
  for (size_t s = 0; s < storage.sequences.size(); ++s) {
    const PrefixGroup* prefix = PrefixOf(storage, s);
    ForEachBlock(storage.sequences[s], s, 0, schedule.kv_heads_, block_queries,
                 schedule.group_, [&](const Stretch& stretch, int64_t head) {
                   if (prefix == nullptr) return line.Add(stretch, head);
                   Stretch rest = stretch;
                   rest.AfterPrefix(prefix->tokens);
                   const PrefixPlace& place = storage.places[s];
                   const auto first = static_cast<size_t>(
                       place.prefix * schedule.kv_heads_ + head);
                   line.AddAfterPrefix(rest, head, storage.prefix_runs[first],
                                       storage.prefix_runs[first + 1],
                                       place.first_query * schedule.group_);
                 });
  }
  line.End();
  schedule.partial_rows_ = line.partial_rows();
  if (schedule.partial_rows_ > kMaxPartialRows) return TooManyPartialRows();
  schedule.Borrow(storage);
  return schedule;
}

void AttentionSchedule::Borrow(const AttentionScheduleStorage& storage) {
  sequences_ = storage.sequences;
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

std::string AttentionSchedule::DebugString() const {
  std::string text = absl::StrCat(
      sequences_.size(), " sequences, ", num_tokens_, " tokens, ", kv_heads_,
      " kv_heads of ", group_, " rows, ", partial_rows_, " partial rows\n");
  for (const PrefixGroup& prefix : prefixes_) {
    absl::StrAppend(&text, "prefix of ", prefix.tokens, " tokens, sequences ",
                    absl::StrJoin(Members(prefix), " "), "\n");
  }
  for (const AttentionShare& share : shares_) {
    absl::StrAppend(&text, "share of cost ", share.cost, "\n");
    for (const AttentionWork& work : Work(share)) {
      absl::StrAppend(&text, "  ", ToString(work.block), " chunks [",
                      work.chunk_begin, ", ", work.chunk_end, ")");
      if (work.partial != kNoPartial) {
        absl::StrAppend(&text, " partial ", work.partial);
      }
      text += '\n';
    }
  }
  for (const AttentionMerge& merge : merges_) {
    absl::StrAppend(&text, "merge ", ToString(merge.block), " rows [",
                    merge.row_begin, ", ", merge.row_end, ") of");
    for (const AttentionRun& run : Runs(merge)) {
      absl::StrAppend(&text, " [", run.chunk_begin, ", ", run.chunk_end,
                      ") partial ", run.partial);
    }
    text += '\n';
  }
  return text;
}

}  // namespace quern
