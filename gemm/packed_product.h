#ifndef QUERN_GEMM_PACKED_PRODUCT_H_
#define QUERN_GEMM_PACKED_PRODUCT_H_

// What every packed GEMM does between the rows of a and the rows of c, over a
// block of at most kBlockRows rows:
//
//   1. pack(row, to, worker)   the caller writes one row of a, converted or
//                              quantised, to `to`, chunk i of it i * a_chunk()
//                              further
//   2. tiles                   sums[rows x panels], gemm/tile_loop.h
//   3. finish(sums)            the caller turns sums into c while in cache
//
// in two parallel regions, or on the calling thread where that is faster. Who
// computes what depends on the number of workers; what is computed does not.
//
// b is `parts` matrices of one layout, one after the other in packed memory;
// the sums of the same columns of all of them are finished together.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/executor.h"
#include "core/math_util.h"
#include "gemm/division.h"
#include "gemm/tile.h"
#include "gemm/tile_loop.h"
#include "packing/vnni_layout.h"

namespace quern {

// Rows that are packed and multiplied at once: their packed form stays in L2
// for a chunk of k, and the weights are read again for every so many rows.
inline constexpr int64_t kBlockRows = 256;

// Calls fn(first row, rows) for blocks of at most kBlockRows, of even sizes.
template <typename Fn>
void ForEachRowBlock(int64_t m, const Fn& fn) {
  const int64_t blocks = DivCeil(m, kBlockRows);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t row = m * i / blocks;
    fn(row, m * (i + 1) / blocks - row);
  }
}

template <typename Sum>
struct PackedScratch {
  uint32_t* a;
  Sum* sums;
};

// Sums of some rows and panels, for finish: of part p from sums + p *
// part_stride on.
template <typename Sum>
struct SumsBlock {
  int64_t row, rows;
  int64_t col, cols;
  const Sum* sums;
  int64_t stride;
  int64_t part_stride;
};

// As tiles add: integers modulo 2^32.
template <typename Sum>
Sum WrappingAdd(Sum x, Sum y) {
  if constexpr (std::is_integral_v<Sum>) {
    return static_cast<Sum>(static_cast<uint32_t>(x) +
                            static_cast<uint32_t>(y));
  } else {
    return x + y;
  }
}

template <typename Sum>
class PackedProduct {
 public:
  PackedProduct(const VnniLayout& layout, const TileTable& table,
                int64_t elements_per_line, int64_t rows, int64_t parts)
      : layout_(layout),
        table_(table),
        parts_(parts),
        tiles_(rows, table),
        chunks_(DivCeil(layout.lines(), kChunk)),
        pitch_(static_cast<int64_t>(
            PackedRowPitch(static_cast<size_t>(elements_per_line)))) {}

  // Elements of k in a chunk, and 32-bit elements from one chunk of a packed
  // row to the next.
  int64_t chunk_k() const { return kChunk * layout_.v(); }
  int64_t a_chunk() const { return tiles_.max_size() * pitch_; }
  int64_t chunks() const { return chunks_; }
  const RowTiles& tiles() const { return tiles_; }

  // Room for the sums of every worker, or of every chunk where k is divided.
  template <typename Allocator>
  PackedScratch<Sum> LayOut(Allocator& allocator, int64_t workers) const {
    int64_t cols = workers * Division::kUnitPanels * kPanelCols;
    if (tiles_.rows <= Division::kMaxSplitRows && layout_.panels() < workers) {
      cols = std::max(cols, chunks_ * layout_.panels() * kPanelCols);
    }
    return {
        allocator.template Allocate<uint32_t>(
            "packed rows", tiles_.count * chunks_ * a_chunk()),
        allocator.template Allocate<Sum>("sums", parts_ * tiles_.rows * cols)};
  }

  template <typename Pack, typename Finish>
  void Run(const uint8_t* b, const PackedScratch<Sum>& scratch,
           Executor& executor, const Pack& pack, const Finish& finish) const {
    PackRows(scratch, executor, pack);

    // Writes the sums of part p from sums + p * part_stride on.
    const auto multiply = [&](const TileRange& range, Sum* sums, int64_t stride,
                              int64_t part_stride, int /*worker*/) {
      TileLoop loop = {&table_,
                       scratch.a,
                       pitch_,
                       tiles_,
                       b,
                       layout_.panel_bytes(),
                       layout_.lines(),
                       layout_.panels()};
      for (int64_t part = 0; part < parts_; ++part) {
        MultiplyPanels(loop, range, sums, stride);
        loop.b += layout_.bytes();
        sums += part_stride;
      }
    };
    const int64_t rows = tiles_.rows;
    const Division division =
        Division::Of(rows, tiles_.count, layout_.panels(), layout_.lines(),
                     chunks_, executor.num_workers());
    InlineExecutor inline_executor;
    Executor& multipliers = Multipliers(executor, inline_executor);
    if (division.k_pieces == 1) {
      MultiplyUnits(division, scratch, multipliers, multiply, finish);
      return;
    }
    // The sums of every chunk side by side, then added in order.
    const int64_t stride = layout_.panels() * kPanelCols;
    const int64_t part_stride = rows * stride;
    const int64_t chunk_sums = parts_ * part_stride;
    multipliers.ParallelFor(division.tasks(), [&](int64_t task, int) {
      TileRange range = RangeOf(division, task);
      const int64_t end = range.chunk_end;
      for (; range.chunk < end; ++range.chunk) {
        range.chunk_end = range.chunk + 1;
        multiply(range,
                 scratch.sums + range.chunk * chunk_sums +
                     tiles_.begin(range.tile) * stride +
                     range.panel * kPanelCols,
                 stride, part_stride, 0);
      }
    });
    for (int64_t chunk = 1; chunk < chunks_; ++chunk) {
      const Sum* from = scratch.sums + chunk * chunk_sums;
      for (int64_t i = 0; i < chunk_sums; ++i) {
        scratch.sums[i] = WrappingAdd(scratch.sums[i], from[i]);
      }
    }
    finish(BlockOf(0, layout_.panels(), 0, rows, scratch.sums, stride,
                   part_stride));
  }

  // The same where the caller multiplies, all of k at a time: multiply(range,
  // sums, stride, part_stride, worker) overwrites the sums of the range.
  template <typename Pack, typename Multiply, typename Finish>
  void RunWith(const PackedScratch<Sum>& scratch, Executor& executor,
               const Pack& pack, const Multiply& multiply,
               const Finish& finish) const {
    PackRows(scratch, executor, pack);
    const Division division =
        Division::Of(tiles_.rows, tiles_.count, layout_.panels(),
                     layout_.lines(), 1, executor.num_workers());
    InlineExecutor inline_executor;
    MultiplyUnits(division, scratch, Multipliers(executor, inline_executor),
                  multiply, finish);
  }

 private:
  static constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);
  static constexpr int64_t kPanelCols = VnniLayout::kPanelCols;

  template <typename Pack>
  void PackRows(const PackedScratch<Sum>& scratch, Executor& executor,
                const Pack& pack) const {
    InlineExecutor inline_executor;
    const int64_t rows = tiles_.rows;
    Executor& packers =
        WorthAFork(rows * layout_.lines() / 8, 0) ? executor : inline_executor;
    packers.ParallelFor(rows, [&](int64_t row, int worker) {
      const int64_t tile = tiles_.tile_of(row);
      pack(row,
           scratch.a + tile * chunks_ * a_chunk() +
               (row - tiles_.begin(tile)) * pitch_,
           worker);
    });
  }

  Executor& Multipliers(Executor& executor, Executor& inline_executor) const {
    return WorthAFork(parts_ * layout_.panels() * layout_.lines(), tiles_.rows)
               ? executor
               : inline_executor;
  }

  // Where k is not divided: each task finishes what it has multiplied.
  template <typename Multiply, typename Finish>
  void MultiplyUnits(const Division& division,
                     const PackedScratch<Sum>& scratch, Executor& multipliers,
                     const Multiply& multiply, const Finish& finish) const {
    const int64_t stride = Division::kUnitPanels * kPanelCols;
    const int64_t part_stride = tiles_.rows * stride;
    multipliers.ParallelFor(division.tasks(), [&](int64_t task, int worker) {
      const TileRange range = RangeOf(division, task);
      Sum* sums = scratch.sums + worker * parts_ * part_stride;
      multiply(range, sums, stride, part_stride, worker);
      const int64_t row = tiles_.begin(range.tile);
      finish(BlockOf(range.panel, range.panel_end, row,
                     tiles_.begin(range.tile_end) - row, sums, stride,
                     part_stride));
    });
  }

  TileRange RangeOf(const Division& division, int64_t task) const {
    TileRange range;
    const int64_t piece = task % division.k_pieces;
    const int64_t unit = task / division.k_pieces % division.units;
    const int64_t group = task / division.k_pieces / division.units;
    range.panel = division.panel(unit);
    range.panel_end = division.panel(unit + 1);
    range.tile = tiles_.count * group / division.row_groups;
    range.tile_end = tiles_.count * (group + 1) / division.row_groups;
    range.chunk = chunks_ * piece / division.k_pieces;
    range.chunk_end = chunks_ * (piece + 1) / division.k_pieces;
    return range;
  }

  SumsBlock<Sum> BlockOf(int64_t panel, int64_t panel_end, int64_t row,
                         int64_t rows, const Sum* sums, int64_t stride,
                         int64_t part_stride) const {
    const int64_t col = panel * kPanelCols;
    const int64_t cols = std::min(panel_end * kPanelCols, layout_.n()) - col;
    return {row, rows, col, cols, sums, stride, part_stride};
  }

  const VnniLayout& layout_;
  const TileTable& table_;
  int64_t parts_;
  RowTiles tiles_;
  int64_t chunks_;
  int64_t pitch_;
};

// Of the workspace for any number of rows up to max_rows: `lay_out(rows,
// layout)` lists what `rows` rows take. More rows take more, but where k is
// divided few rows may take more than many.
template <typename LayOutRows>
int64_t MostWorkspaceBytes(int64_t max_rows, const LayOutRows& lay_out) {
  const int64_t rows = std::min(std::max<int64_t>(max_rows, 1), kBlockRows);
  int64_t bytes = lay_out(rows);
  if (rows > Division::kMaxSplitRows) {
    bytes = std::max(bytes, lay_out(Division::kMaxSplitRows));
  }
  return bytes;
}

}  // namespace quern

#endif  // QUERN_GEMM_PACKED_PRODUCT_H_
