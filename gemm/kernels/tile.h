#ifndef QUERN_GEMM_KERNELS_TILE_H_
#define QUERN_GEMM_KERNELS_TILE_H_

// The inner loop of the packed GEMMs as plain data: what one call multiplies,
// and one instruction set's functions by number of rows and panels. What they
// compute is written in gemm/kernels/tile-inl.h; who calls them in which order,
// in gemm/schedule/tile_loop.h.

#include <cstddef>
#include <cstdint>

namespace quern {

inline constexpr size_t kTilePanels = 8;  // of b, at most

// Lines of b that one call multiplies, at most, and then adds to `sums`: 16 KiB
// of each panel, so that two panels fit L1 beside a tile of a, and the call and
// the addition are 1 % of the time.
inline constexpr size_t kChunkLines = 256;

// Stride of the rows of packed a, in 32-bit elements, where one line of b meets
// `elements_per_line` of them. It is a constant, so that rows are offsets in
// the instructions; one cache line more than a power of two, so that rows do
// not share cache sets.
constexpr size_t PackedRowPitch(size_t elements_per_line) {
  return kChunkLines * elements_per_line + 16;
}

// What to fetch into L2 meanwhile: `lines` times, one line of as many streams
// as the tile has panels.
struct TilePrefetch {
  const uint8_t* from;
  size_t stream_bytes;  // from one stream to the next
  size_t lines;
};

struct I4Groups;

struct TileArgs {
  const uint32_t* a;         // row r at a + r * PackedRowPitch(...)
  const uint8_t* b;          // the first line of the first panel
  size_t panel_bytes;        // from one panel to the next
  size_t steps;              // lines of each panel, at most kChunkLines
  void* sums;                // f32 or i32
  size_t sums_stride;        // elements from row to row
  bool add;                  // to what sums holds; else it is overwritten
  TilePrefetch prefetch[2];  // one after the other
  // From one line of `prefetch` to the next, at least 1; so many steps for all
  // lines of both are at most `steps`.
  size_t prefetch_steps;
  // Only for tiles of gemm/kernels/i4_block_kernels.h, which alone read it.
  const I4Groups* groups;
};

using Tile = void (*)(const TileArgs&);

// The sums of each chunk of k, side by side in memory, to those of all k:
//
//   sums[r, i] = ((chunk 0)[r, i] + (chunk 1)[r, i]) + (chunk 2)[r, i] ...
//
// for r < rows, i < cols, which is the order in which tiles add chunks.
// Integers wrap, modulo 2^32.
struct AddChunksArgs {
  void* sums;  // f32 or i32, those of chunk 0; overwritten
  size_t rows;
  size_t cols;          // a multiple of 16
  size_t sums_stride;   // elements from row to row
  size_t chunks;        // one or more
  size_t chunk_stride;  // elements from chunk to chunk
};

// What a row's sums depend on beside the row and the weights.
enum class TileSums : uint8_t {
  // The tile: a plan must not choose tiles by the number of rows.
  kPerTile,
  // The instruction set alone: a row has the same bits in every tile of its
  // set, at every place there.
  kAlike,
  // Nothing: integers modulo 2^32. Tiles of several sets may be mixed.
  kExact,
};

// The tiles of one set, up to as many rows as it has registers for. A Set says
// which there are:
//
//   kMostRows              rows of the largest tile, or rows that smaller tiles
//                          together take
//   Has(rows, panels)      whether there is a tile of so many rows and panels,
//                          which are powers of two, from one on without a gap
//   kTile<rows, panels>    that tile
template <class Set>
struct Tiles {
  size_t panels[Set::kMostRows + 1];
  size_t panels_in_one_stream[Set::kMostRows + 1];
  Tile tiles[Set::kMostRows + 1][4];
};

// Adds the tiles from kRows and 2^kLog panels on.
template <class Set, size_t kRows, size_t kLog>
constexpr void AddTiles(Tiles<Set>& to) {
  if constexpr (kRows <= Set::kMostRows) {
    constexpr size_t kPanels = size_t{1} << kLog;
    // Rows that are cut into smaller tiles have the panels of those.
    if constexpr (kLog == 0) to.panels[kRows] = to.panels[kRows - 1];
    if constexpr (kPanels <= kTilePanels && Set::Has(kRows, kPanels)) {
      to.tiles[kRows][kLog] = Set::template kTile<kRows, kPanels>;
      to.panels[kRows] = kPanels;
      AddTiles<Set, kRows, kLog + 1>(to);
    } else {
      AddTiles<Set, kRows + 1, 0>(to);
    }
  }
}

template <class Set>
constexpr Tiles<Set> MakeTiles() {
  Tiles<Set> tiles = {};
  AddTiles<Set, 1, 0>(tiles);
  return tiles;
}
template <class Set>
inline constexpr Tiles<Set> kTilesOf = MakeTiles<Set>();

// One of Tiles, whatever its size. Arrays have max_rows + 1 elements.
struct TileTable {
  size_t max_rows;
  // With so many rows or fewer the next panels are not fetched ahead, because a
  // core merely waits for memory (gemm/schedule/tile_loop.h).
  size_t few_rows;
  const size_t* panels;  // the best number of panels for so many rows
  // The best number where the core reads memory fastest in one stream
  // (gemm/schedule/prefetch_policy.h). Null where no layer asks.
  const size_t* panels_in_one_stream;
  const Tile (*tiles)[4];  // [rows][log2(panels)], up to the best
  void (*add_chunks)(const AddChunksArgs&);  // null where k is never divided
};

// The table of tiles that live for ever, without what kernels add besides.
template <class Set>
TileTable TableOf(const Tiles<Set>& tiles) {
  TileTable table = {};
  table.max_rows = Set::kMostRows;
  table.panels = tiles.panels;
  table.tiles = tiles.tiles;
  return table;
}

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_TILE_H_
