#include "quern/attention/schedule/schedule_line.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/attention/schedule.h"
#include "quern/attention/schedule/schedule_stretch.h"
#include "quern/attention/schedule/schedule_tiles.h"
#include "quern/core/math_util.h"

namespace quern {
namespace {

constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
constexpr int64_t kSpan = AttentionSchedule::kSpanChunks;

// No share is shorter than this many chunks of the largest block.
constexpr double kLeastShare = 4;
// A block that costs less than this part of a worker's work is never cut, and
// none is for so little: cutting costs a merge, and does not gain as much.
constexpr double kNotWorthACut = 1.0 / 32;

}  // namespace

ScheduleLine::ScheduleLine(AttentionScheduleStorage& storage, int num_workers,
                           double total, double chunk)
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

void ScheduleLine::AddAfterPrefix(const Stretch& stretch, int64_t head,
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

void ScheduleLine::End() {
  CloseShare();
  DivideMerges();
  std::sort(storage_.shares.begin(), storage_.shares.end(),
            [](const AttentionShare& a, const AttentionShare& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.begin < b.begin;
            });
}

bool ScheduleLine::AddItems(const Stretch& stretch, bool may_be_whole) {
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

int32_t ScheduleLine::CutNear(const Stretch& stretch, int32_t chunk,
                              double room) const {
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

void ScheduleLine::AddPartial(const Stretch& stretch, int32_t begin,
                              int32_t end) {
  AddWork(stretch, begin, end, partial_rows_);
  storage_.runs.push_back({begin, end, partial_rows_, stretch.rows});
  // At most 2^22 pieces of 2^31 rows; beyond the limit the sum stays near it.
  partial_rows_ =
      std::min(AttentionSchedule::kMaxPartialRows + 1,
               partial_rows_ +
                   PieceCount(begin, end, stretch.first_chunk) * stretch.rows);
}

void ScheduleLine::AddMerge(const Stretch& stretch, int32_t first_run) {
  AttentionMerge& merge = storage_.merges.emplace_back();
  merge.block = stretch.block;
  merge.block.kv_head = head_;
  merge.row_begin = 0;
  merge.row_end = static_cast<int32_t>(stretch.rows);
  merge.run_begin = first_run;
  merge.run_end = static_cast<int32_t>(storage_.runs.size());
}

void ScheduleLine::DivideMerges() {
  int64_t rows = 0, count = 0;
  for (const AttentionMerge& merge : storage_.merges) rows += merge.row_end;
  const int64_t most = DivCeil(rows, workers_);
  for (const AttentionMerge& merge : storage_.merges) {
    count += DivCeil(merge.row_end, most);
  }
  // Goes from the last merge to the first, so that none is overwritten before
  // it is read.
  size_t from = storage_.merges.size();
  size_t to = static_cast<size_t>(count);
  storage_.merges.resize(to);
  while (from-- > 0) {
    AttentionMerge merge = storage_.merges[from];
    while (merge.row_end > 0) {
      merge.row_begin = static_cast<int32_t>((merge.row_end - 1) / most * most);
      storage_.merges[--to] = merge;
      merge.row_end = merge.row_begin;
    }
  }
}

void ScheduleLine::EndShare() {
  CloseShare();
  ++next_share_;
  NextTarget();
}

void ScheduleLine::CloseShare() {
  const auto begin = static_cast<int32_t>(share_begin_);
  const auto end = static_cast<int32_t>(storage_.work.size());
  if (begin == end) return;
  storage_.shares.push_back({begin, end, position_ - share_position_});
  share_begin_ = storage_.work.size();
  share_position_ = position_;
}

void ScheduleLine::NextTarget() {
  const int64_t worker = (next_share_ - 1) / rounds_;
  const int64_t round = (next_share_ - 1) % rounds_;
  target_ = worker_ * (static_cast<double>(worker) + Before(round + 1));
}

}  // namespace quern
