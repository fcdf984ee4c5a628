#ifndef QUERN_ATTENTION_SCHEDULE_SCHEDULE_LINE_H_
#define QUERN_ATTENTION_SCHEDULE_SCHEDULE_LINE_H_

// Private: the line of AttentionSchedule::Build, on which every block is as
// long as it costs, and where it is cut into shares.

#include <cstddef>
#include <cstdint>

#include "quern/attention/schedule.h"
#include "quern/attention/schedule/schedule_stretch.h"

namespace quern {

// Lays blocks on the line and cuts it into shares.
class ScheduleLine {
 public:
  // The whole line costs `total`, a chunk of its largest block `chunk`.
  ScheduleLine(AttentionScheduleStorage& storage, int num_workers, double total,
               double chunk);

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

  // A block of a prefix's member, without the prefix. The runs of the prefix
  // are [prefix_begin, prefix_end); the block's rows begin at `first_row` in
  // their partial results.
  void AddAfterPrefix(const Stretch& stretch, int64_t head,
                      int32_t prefix_begin, int32_t prefix_end,
                      int64_t first_row);

  // Closes the last share and sorts all, the longest first.
  void End();

  int64_t partial_rows() const { return partial_rows_; }

 private:
  bool last_share() const { return next_share_ >= int64_t{rounds_} * workers_; }

  // Sets each field by itself, because a struct that is put together on the
  // stack and copied from there waits for its small stores (10 ns an item).
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

  // Adds the items of a block. Returns whether they are parts of it, which
  // leave partial results: where the block is cut, or `may_be_whole` is false.
  bool AddItems(const Stretch& stretch, bool may_be_whole);

  // The boundary between chunks that is nearest to `room`, or one between spans
  // that is not far from there, because the run leaves fewer pieces then.
  int32_t CutNear(const Stretch& stretch, int32_t chunk, double room) const;

  void AddPartial(const Stretch& stretch, int32_t begin, int32_t end);
  void AddMerge(const Stretch& stretch, int32_t first_run);

  // Divides the merges, so that none has more than a worker's part of all rows.
  void DivideMerges();

  void EndShare();
  void CloseShare();

  // The part of a worker's stretch of the line before its share of `round`: 0,
  // 1/2, 3/4 ...
  double Before(int64_t round) const {
    return round == rounds_ ? 1
                            : 1 - 1 / static_cast<double>(int64_t{1} << round);
  }
  void NextTarget();

  AttentionScheduleStorage& storage_;
  const int workers_;
  const double worker_;     // what each worker does in all
  const double slack_;      // a share may be longer by that
  int rounds_ = 1;          // shares of a worker's stretch
  int64_t next_share_ = 1;  // counted from 1: ends at target_
  double target_ = 0;
  double position_ = 0;
  size_t share_begin_ = 0;  // of the share at hand: in the work, on the line
  double share_position_ = 0;
  int32_t head_ = 0;  // of the block at hand
  int64_t partial_rows_ = 0;
};

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_SCHEDULE_LINE_H_
