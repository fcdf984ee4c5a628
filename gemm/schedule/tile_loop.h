#ifndef QUERN_GEMM_SCHEDULE_TILE_LOOP_H_
#define QUERN_GEMM_SCHEDULE_TILE_LOOP_H_

// The order in which the packed GEMMs visit their tiles:
//
//   for each chunk of kChunkLines lines      its sums stay in registers
//     for each group of panels               a block of b, read from memory
//       for each tile of rows                ... by the first, then from L2
//
// While one block is multiplied, the next is fetched into L2, spread evenly
// over the tiles and over the steps of each, because loads from L2 wait behind
// a burst of fetches (16 rows of bf16: 0.69 of the arithmetic limit against
// 0.52. Zen 5, 2026); but for so few rows that the core merely waits for
// memory, the hardware's prefetchers do better alone (AVX-512, 4 rows of bf16:
// 0.88 of DRAM speed against 0.74; from 6 rows on it is the other way round.
// Zen 4, 2026. With AVX2 it is from 2 rows on: 4 rows take 735 us against 900.
// Zen 5, 2026). The rows' next chunk is fetched too, where all chunks together
// are more than L2 holds: every group of panels reads them again, from an L3
// that neighbours share (256 rows, k = 14336: 0.89 of the arithmetic limit
// against 0.77). Each element of `sums` is
//
//   ((chunk 0) + chunk 1) + chunk 2 ...
//
// whatever the rows, panels or threads: kChunkLines is a constant, for this
// order is part of the result.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "quern/core/math_util.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

// How many tiles the rows of one product become: as few as there must be, or,
// where rows may be divided between workers, an even number.
enum class TileCount : uint8_t { kEven, kFewest };

// The rows of one product divided into tiles as even as they can be: the first
// row of tile i is RowTiles::begin(i).
struct RowTiles {
  RowTiles(int64_t rows, const TileTable& table, TileCount tile_count)
      : rows(rows), count(DivCeil(rows, static_cast<int64_t>(table.max_rows))) {
    // Tiles of six rows or fewer lose speed where they become smaller, and
    // fewer than 16 of them are seldom divided by rows: with AVX2, 16 rows of
    // bf16 are at 0.84 of the arithmetic limit in three tiles and at 0.745 in
    // four (Zen 4, 2026).
    const int64_t even_from = table.max_rows <= 6 ? 16 : 2;
    if (count >= even_from && tile_count == TileCount::kEven) {
      count = RoundUp(count, 2);
    }
  }
  int64_t begin(int64_t tile) const { return rows * tile / count; }
  int64_t tile_of(int64_t row) const {
    return DivCeil((row + 1) * count, rows) - 1;
  }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  // 0 of no rows.
  int64_t max_size() const { return count == 0 ? 0 : DivCeil(rows, count); }

  int64_t rows;
  int64_t count;
};

struct TileLoop {
  const TileTable* table;
  // a[tile][chunk][row < tiles.max_size()][pitch], see PackedRowPitch.
  const uint32_t* a;
  int64_t a_pitch;
  RowTiles tiles;
  const uint8_t* b;  // the first panel of all
  int64_t panel_bytes;
  int64_t lines;   // of each panel
  int64_t panels;  // of all, so as not to prefetch beyond
  // What will probably be multiplied after the range: panel after_panel of the
  // panels at after_b, of which there are as many.
  const uint8_t* after_b;
  int64_t after_panel;
};

// One call of MultiplyPanels.
template <typename Sum>
class PanelMultiplier {
 public:
  PanelMultiplier(const TileLoop& loop, const TileRange& range, Sum* sums,
                  int64_t sums_stride)
      : loop_(loop),
        range_(range),
        sums_(sums),
        sums_stride_(sums_stride),
        a_chunk_(loop.tiles.max_size() * loop.a_pitch),
        a_tile_(DivCeil(loop.lines, kChunk) * a_chunk_),
        num_tiles_(range.tile_end - range.tile),
        pitch_bytes_(loop.a_pitch * 4) {
    tile_.panel_bytes = static_cast<size_t>(loop.panel_bytes);
    tile_.sums_stride = static_cast<size_t>(sums_stride);
    // Beyond these bytes the rows are not in L2 when they are read again. The
    // number is for an L2 of 1 MiB, which holds lines of the weights, too. It
    // is not from CpuInfo: it decides about fetches alone, a virtual machine
    // may report caches that it does not have, and no other L2 has been
    // measured.
    constexpr int64_t kNearBytes = 640 << 10;
    far_ = num_tiles_ > 1 && num_tiles_ * loop.tiles.max_size() * pitch_bytes_ *
                                     (range.chunk_end - range.chunk) >
                                 kNearBytes;
    ahead_ = num_tiles_ > 1 ||
             loop.tiles.max_size() > static_cast<int64_t>(loop.table->few_rows);
  }

  void Run() {
    const auto best =
        static_cast<int64_t>(loop_.table->panels[loop_.tiles.max_size()]);
    ForEachBlock(range_, best,
                 [&](const WeightBlock& block, const BlockStart& next) {
                   MultiplyBlock(block, next);
                 });
  }

 private:
  static constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);
  static constexpr int64_t kLineBytes = VnniLayout::kLineBytes;

  // Multiplies all tiles by the block, while as many panels of the next one are
  // fetched.
  void MultiplyBlock(const WeightBlock& block, const BlockStart& next) {
    const bool last = next.panel == range_.panel_end;
    const uint8_t* next_b = last ? loop_.after_b : loop_.b;
    const int64_t next_panel = last ? loop_.after_panel : next.panel;
    const int64_t line = block.chunk * kChunk;
    tile_.b = loop_.b + block.panel * loop_.panel_bytes + line * kLineBytes;
    const int64_t steps = std::min(kChunk, loop_.lines - line);
    const int64_t next_line = next.chunk * kChunk;
    const bool fetch = ahead_ && next_panel + block.panels() <= loop_.panels;
    const int64_t next_lines =
        fetch ? std::min(steps, loop_.lines - next_line) : 0;
    tile_.steps = static_cast<size_t>(steps);
    tile_.add = block.chunk != range_.chunk;
    for (int64_t i = 0; i < num_tiles_; ++i) {
      const int64_t tile = range_.tile + i;
      const int64_t part = next_lines * i / num_tiles_;
      tile_.prefetch[0] = {
          next_b + next_panel * loop_.panel_bytes +
              (next_line + part) * kLineBytes,
          tile_.panel_bytes,
          static_cast<size_t>(next_lines * (i + 1) / num_tiles_ - part)};
      if (far_) {
        tile_.prefetch[1] = RowsAhead(block, tile);
        tile_.prefetch[1].lines = std::min(
            tile_.prefetch[1].lines, tile_.steps - tile_.prefetch[0].lines);
      }
      tile_.prefetch_steps =
          tile_.steps /
          std::max<size_t>(tile_.prefetch[0].lines + tile_.prefetch[1].lines,
                           1);
      tile_.a = loop_.a + tile * a_tile_ + block.chunk * a_chunk_;
      const int64_t row =
          loop_.tiles.begin(tile) - loop_.tiles.begin(range_.tile);
      tile_.sums = sums_ + row * sums_stride_ +
                   (block.panel - range_.panel) * VnniLayout::kPanelCols;
      loop_.table->tiles[loop_.tiles.size(tile)][block.log](tile_);
    }
  }

  // Returns the share of the block in fetching the rows of `tile` in the chunk
  // that follows the block's, in this task or in the next.
  TilePrefetch RowsAhead(const WeightBlock& block, int64_t tile) const {
    const int64_t streams = block.panels();
    const int64_t next =
        block.chunk + 1 < range_.chunk_end ? block.chunk + 1 : range_.chunk;
    const int64_t lines = loop_.tiles.size(tile) * pitch_bytes_ / kLineBytes;
    const int64_t all = range_.panel_end - range_.panel;
    const int64_t begin = lines * (block.panel - range_.panel) / all;
    const int64_t end = lines * (block.panel + streams - range_.panel) / all;
    const int64_t steps = DivCeil(end - begin, streams);
    return {reinterpret_cast<const uint8_t*>(loop_.a + tile * a_tile_ +
                                             next * a_chunk_) +
                begin * kLineBytes,
            static_cast<size_t>(steps * kLineBytes),
            static_cast<size_t>(steps)};
  }

  const TileLoop& loop_;
  const TileRange& range_;
  Sum* const sums_;
  const int64_t sums_stride_;
  const int64_t a_chunk_;  // elements from chunk to chunk of a tile of rows
  const int64_t a_tile_;   // elements from tile to tile
  const int64_t num_tiles_;
  const int64_t pitch_bytes_;
  bool far_;    // whether the rows of the next chunk are fetched, too
  bool ahead_;  // whether the next panels are fetched
  TileArgs tile_ = {};
};

// Overwrites sums[rows of the tiles] x [16 * panels]. Sum is float or int32_t.
template <typename Sum>
void MultiplyPanels(const TileLoop& loop, const TileRange& range, Sum* sums,
                    int64_t sums_stride) {
  PanelMultiplier<Sum>(loop, range, sums, sums_stride).Run();
}

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_TILE_LOOP_H_
