#ifndef QUERN_GEMM_TILE_LOOP_H_
#define QUERN_GEMM_TILE_LOOP_H_

// The order in which the packed GEMMs visit their tiles:
//
//   for each chunk of kChunkLines lines      its sums stay in registers
//     for each group of panels               a block of b, read from memory
//       for each tile of rows                ... by the first, then from L2
//
// While one block is multiplied, the next is fetched into L2, spread evenly
// over the tiles; but for so few rows that the core merely waits for memory,
// the hardware's prefetchers do better alone (4 rows of bf16: 0.88 of DRAM
// speed against 0.74; from 6 rows on it is the other way round. Zen 4, 2026).
// The rows' next chunk is fetched too, where all chunks together are more than
// L2 holds: every group of panels reads them again, from an L3 that neighbours
// share (256 rows, k = 14336: 0.89 of the arithmetic limit against 0.77).
// Each element of `sums` is
//
//   ((chunk 0) + chunk 1) + chunk 2 ...
//
// whatever the rows, panels or threads: kChunkLines is a constant, for this
// order is part of the result.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/math_util.h"
#include "quern/gemm/tile.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

// The rows of one product divided into as few tiles as there must be, as even
// as they can be: the first of tile i is RowTiles::begin(i). Not into an odd
// number, or two workers could not share them alike.
struct RowTiles {
  RowTiles(int64_t rows, const TileTable& table)
      : rows(rows), count(DivCeil(rows, static_cast<int64_t>(table.max_rows))) {
    if (count > 1) count = RoundUp(count, 2);
  }
  int64_t begin(int64_t tile) const { return rows * tile / count; }
  int64_t tile_of(int64_t row) const {
    return DivCeil((row + 1) * count, rows) - 1;
  }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  int64_t max_size() const { return DivCeil(rows, count); }

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
};

// One task: ranges of panels, of tiles of rows, and of chunks.
struct TileRange {
  int64_t panel, panel_end;
  int64_t tile, tile_end;
  int64_t chunk, chunk_end;
};

// Overwrites sums[rows of the tiles] x [16 * panels]. Sum is float or int32_t.
template <typename Sum>
void MultiplyPanels(const TileLoop& loop, const TileRange& range, Sum* sums,
                    int64_t sums_stride) {
  constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);
  constexpr int64_t kLineBytes = VnniLayout::kLineBytes;
  constexpr int64_t kPanelCols = VnniLayout::kPanelCols;
  const TileTable& table = *loop.table;
  const auto best = static_cast<int64_t>(table.panels[loop.tiles.max_size()]);
  const int64_t a_chunk = loop.tiles.max_size() * loop.a_pitch;
  const int64_t a_tile = DivCeil(loop.lines, kChunk) * a_chunk;
  const int64_t num_tiles = range.tile_end - range.tile;
  TileArgs t = {};
  t.panel_bytes = static_cast<size_t>(loop.panel_bytes);
  t.sums_stride = static_cast<size_t>(sums_stride);

  // Beyond these bytes the rows are not in L2 when they are read again.
  constexpr int64_t kNearBytes = 640 << 10;
  const int64_t pitch_bytes = loop.a_pitch * 4;
  const int64_t chunk_bytes = loop.tiles.max_size() * pitch_bytes;
  const bool far =
      num_tiles > 1 &&
      num_tiles * chunk_bytes * (range.chunk_end - range.chunk) > kNearBytes;

  constexpr int64_t kHardwareRows = 5;
  const bool ahead = num_tiles > 1 || loop.tiles.max_size() > kHardwareRows;

  // The share of panels [panel, panel + 2^log) in the rows of `tile`, in the
  // chunk that follows `chunk`, in this task or in the next.
  const auto rows_ahead = [&](int64_t chunk, int64_t panel, size_t log,
                              int64_t tile) -> TilePrefetch {
    const int64_t streams = int64_t{1} << log;
    const int64_t next = chunk + 1 < range.chunk_end ? chunk + 1 : range.chunk;
    const int64_t lines = loop.tiles.size(tile) * pitch_bytes / kLineBytes;
    const int64_t all = range.panel_end - range.panel;
    const int64_t begin = lines * (panel - range.panel) / all;
    const int64_t end = lines * (panel + streams - range.panel) / all;
    const int64_t steps = DivCeil(end - begin, streams);
    return {reinterpret_cast<const uint8_t*>(loop.a + tile * a_tile +
                                             next * a_chunk) +
                begin * kLineBytes,
            static_cast<size_t>(steps * kLineBytes),
            static_cast<size_t>(steps)};
  };

  // All tiles for the lines of `chunk` in panels [panel, panel + 2^log), while
  // those at next_line and next_panel are fetched.
  const auto multiply_block = [&](int64_t chunk, int64_t panel, size_t log,
                                  int64_t next_panel, int64_t next_line) {
    const int64_t line = chunk * kChunk;
    const int64_t steps = std::min(kChunk, loop.lines - line);
    const bool fetch = ahead && next_panel + (int64_t{1} << log) <= loop.panels;
    const int64_t next_steps =
        fetch ? std::min(steps, loop.lines - next_line) : 0;
    t.steps = static_cast<size_t>(steps);
    t.add = chunk != range.chunk;
    t.b = loop.b + panel * loop.panel_bytes + line * kLineBytes;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t tile = range.tile + i;
      const int64_t part = next_steps * i / num_tiles;
      t.prefetch[0] = {
          loop.b + next_panel * loop.panel_bytes +
              (next_line + part) * kLineBytes,
          t.panel_bytes,
          static_cast<size_t>(next_steps * (i + 1) / num_tiles - part)};
      if (far) {
        t.prefetch[1] = rows_ahead(chunk, panel, log, tile);
        t.prefetch[1].steps =
            std::min(t.prefetch[1].steps, t.steps - t.prefetch[0].steps);
      }
      t.a = loop.a + tile * a_tile + chunk * a_chunk;
      const int64_t row = loop.tiles.begin(tile) - loop.tiles.begin(range.tile);
      t.sums = sums + row * sums_stride + (panel - range.panel) * kPanelCols;
      table.tiles[loop.tiles.size(tile)][log](t);
    }
  };

  // With one tile of rows, a group of panels from its first line to its last:
  // the hardware's prefetchers see long streams. With more, all panels for one
  // chunk after the other: the rows of that chunk stay in L2.
  const int64_t width = num_tiles == 1 ? best : range.panel_end - range.panel;
  for (int64_t begin = range.panel; begin < range.panel_end; begin += width) {
    const int64_t end = std::min(begin + width, range.panel_end);
    for (int64_t chunk = range.chunk; chunk < range.chunk_end; ++chunk) {
      for (int64_t panel = begin; panel < end;) {
        size_t log = 0;
        while ((int64_t{2} << log) <= std::min(best, end - panel)) ++log;
        const int64_t next = panel + (int64_t{1} << log);
        if (next < end) {
          multiply_block(chunk, panel, log, next, chunk * kChunk);
        } else if (chunk + 1 < range.chunk_end) {
          multiply_block(chunk, panel, log, begin, (chunk + 1) * kChunk);
        } else {  // what the next group or task will begin with
          multiply_block(chunk, panel, log, end, range.chunk * kChunk);
        }
        panel = next;
      }
    }
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_TILE_LOOP_H_
