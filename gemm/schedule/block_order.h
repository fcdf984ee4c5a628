#ifndef QUERN_GEMM_SCHEDULE_BLOCK_ORDER_H_
#define QUERN_GEMM_SCHEDULE_BLOCK_ORDER_H_

// The order in which every packed GEMM reads its weights: block by block, each
// one chunk of k of 2^log panels. Chunks of a panel follow each other, for the
// order of their sums is part of the result.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace quern {

// One task: ranges of panels, of tiles of rows, and of chunks.
struct TileRange {
  int64_t panel, panel_end;
  int64_t tile, tile_end;
  int64_t chunk, chunk_end;
};

// Weights that are multiplied at once: one chunk of panels [panel, panel +
// 2^log).
struct WeightBlock {
  int64_t panels() const { return int64_t{1} << log; }

  int64_t panel;
  int64_t chunk;
  size_t log;
  // Whether no other block of this chunk comes before it in its group of
  // panels.
  bool starts_chunk;
};

// Where a block begins.
struct BlockStart {
  int64_t panel;
  int64_t chunk;
};

// The largest power of two that is not above n >= 1, as its logarithm.
inline size_t FloorLog2(int64_t n) {
  size_t log = 0;
  while ((int64_t{2} << log) <= n) ++log;
  return log;
}

// Calls fn(block, next) for the blocks of `range`, whose panels() are at most
// `best`. `next` is where the block after it begins, and after the last one
// {range.panel_end, range.chunk}.
//
// With one tile of rows, a group of `best` panels from its first line to its
// last: the hardware's prefetchers see long streams. With more, all panels for
// one chunk after the other: the rows of that chunk stay in L2.
template <typename Fn>
void ForEachBlock(const TileRange& range, int64_t best, const Fn& fn) {
  const int64_t width =
      range.tile_end - range.tile == 1 ? best : range.panel_end - range.panel;
  for (int64_t begin = range.panel; begin < range.panel_end; begin += width) {
    const int64_t end = std::min(begin + width, range.panel_end);
    for (int64_t chunk = range.chunk; chunk < range.chunk_end; ++chunk) {
      const BlockStart after = chunk + 1 < range.chunk_end
                                   ? BlockStart{begin, chunk + 1}
                                   : BlockStart{end, range.chunk};
      for (int64_t panel = begin; panel < end;) {
        const size_t log = FloorLog2(std::min(best, end - panel));
        const WeightBlock block = {panel, chunk, log, panel == begin};
        panel += block.panels();
        fn(block, panel < end ? BlockStart{panel, chunk} : after);
      }
    }
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_BLOCK_ORDER_H_
