#ifndef QUERN_GEMM_SCHEDULE_GROUP_LINE_H_
#define QUERN_GEMM_SCHEDULE_GROUP_LINE_H_

// Private: how the products of gemm/grouped_linear.h are divided between
// workers.
//
// All panels of all blocks of rows stand in one line, the blocks of most rows
// first. A unit is a pair of panels of one block, or a panel where there are
// few pairs; it costs its panels times its rows, or times kRowsOfALoad where
// fewer rows merely wait for the weights. Workers claim shares from the front:
// each share costs what is left, divided by twice the number of workers, and is
// at least one unit. So the first shares are long streams of one expert's
// weights, the last ones are single units, and no worker ends much later than
// another, whichever experts the router likes. k is never divided.

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/math_util.h"

namespace quern {

// Rows [first, first + rows) of group `group`.
struct GroupBlock {
  int64_t group;
  int64_t first;
  int64_t rows;
  int64_t cost_before;  // of all blocks that stand before it in the line
};

class GroupLine {
 public:
  static constexpr int64_t kRowsOfALoad = 8;

  // Sorts `blocks`, which must outlive the line. Each is multiplied by `panels`
  // panels, at least one.
  GroupLine(absl::Span<GroupBlock> blocks, int64_t panels, int64_t workers)
      : blocks_(blocks), panels_(panels), workers_(workers) {
    std::sort(blocks.begin(), blocks.end(),
              [](const GroupBlock& x, const GroupBlock& y) {
                return x.rows != y.rows ? x.rows > y.rows : x.first < y.first;
              });
    const auto count = static_cast<int64_t>(blocks.size());
    constexpr int64_t kPairsPerWorker = 8;
    unit_panels_ = count * panels < 2 * kPairsPerWorker * workers ? 1 : 2;
    block_units_ = DivCeil(panels, unit_panels_);
    units_ = count * block_units_;
    for (GroupBlock& block : blocks) {
      block.cost_before = cost_;
      cost_ += panels * RowCost(block);
    }
  }

  int64_t units() const { return units_; }
  int64_t cost() const { return cost_; }

  // The cost of the units before `unit`.
  int64_t CostBefore(int64_t unit) const {
    if (unit == units_) return cost_;
    const GroupBlock& block = BlockOf(unit);
    return block.cost_before +
           unit % block_units_ * unit_panels_ * RowCost(block);
  }

  // The end of the share that begins at `unit`, which is not the end.
  int64_t ShareEnd(int64_t unit) const {
    int64_t left = (cost_ - CostBefore(unit)) / (2 * workers_);
    int64_t end = unit;
    while (end < units_) {
      const int64_t unit_cost = unit_panels_ * RowCost(BlockOf(end));
      const int64_t fit =
          std::min(left / unit_cost, block_units_ - end % block_units_);
      if (fit == 0) break;
      end += fit;
      left -= fit * unit_cost;
    }
    return std::max(end, unit + 1);
  }

  // fn(block, panel, panel_end) for what units [begin, end) are.
  template <typename Fn>
  void ForEachRange(int64_t begin, int64_t end, const Fn& fn) const {
    while (begin < end) {
      const int64_t unit = begin % block_units_;
      const int64_t count = std::min(end - begin, block_units_ - unit);
      fn(BlockOf(begin), unit * unit_panels_,
         std::min((unit + count) * unit_panels_, panels_));
      begin += count;
    }
  }

 private:
  static int64_t RowCost(const GroupBlock& block) {
    return std::max(block.rows, kRowsOfALoad);
  }
  const GroupBlock& BlockOf(int64_t unit) const {
    return blocks_[static_cast<size_t>(unit / block_units_)];
  }

  absl::Span<const GroupBlock> blocks_;
  int64_t panels_;
  int64_t workers_;
  int64_t unit_panels_;
  int64_t block_units_;  // units of one block
  int64_t units_;
  int64_t cost_ = 0;
};

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_GROUP_LINE_H_
