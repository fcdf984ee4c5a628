#ifndef QUERN_GEMM_SCHEDULE_PACKED_PRODUCT_H_
#define QUERN_GEMM_SCHEDULE_PACKED_PRODUCT_H_

// What every packed GEMM does between the rows of a and the rows of c, over a
// block of at most kBlockRows rows:
//
//   1. pack(row, to, worker)   the caller writes one row of a, converted or
//                              quantised, to `to`, chunk i of it i * a_chunk()
//                              further
//   2. tiles                   sums[rows x panels], gemm/schedule/tile_loop.h
//   3. finish(sums)            the caller turns sums into c while in cache
//
// in two parallel regions, or on the calling thread where that is faster. One
// row may be packed by every worker for itself, in one region with the tiles.
// Where k is divided between the workers, a further region adds the sums of its
// chunks before it finishes them. Who computes what depends on the number of
// workers; what is computed does not.
//
// b is `parts` matrices of one layout, one after the other in packed memory;
// the sums of the same columns of all of them are finished together.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/division.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

// Rows that are packed and multiplied at once: their packed form stays in L2
// for a chunk of k, and the weights are read again for every so many rows. The
// number is not from CpuInfo: a chunk of 256 rows is 272 KiB of pairs or 528 of
// f32, which an L2 of 1 MiB holds, and no other has been measured.
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

// Who packs a block of one row: one worker for all, or every worker for itself.
// With kByEachWorker, `pack` runs on several workers at once, so it must write
// nothing but the packed row and what belongs to its worker. That is faster
// where a cache line that other cores have read is slow to write: a layer of
// Q4_K with k = 5632 takes 123 us, and 127 us with kOnce (two workers with an
// L3 each, Zen 4, 2026).
enum class OneRowIsPacked : uint8_t { kOnce, kByEachWorker };

// The memory of one block of rows, and the division that it is made for.
template <typename Sum>
struct PackedScratch {
  uint32_t* a;
  Sum* sums;
  Division division;
  // Number of 32-bit elements from the packed row of a worker to that of the
  // next, where every worker packs; else zero.
  int64_t a_stride = 0;
  // The units of share w that workers have taken, at w * kTakenStride. Null
  // where the division has no shares.
  std::atomic<int64_t>* taken = nullptr;
};

// Where sums of some rows and panels are: those of part p from sums + p *
// part_stride on.
template <typename Sum>
struct SumsAt {
  Sum* sums;
  int64_t stride;
  int64_t part_stride;
};
// Such sums for finish.
template <typename Sum>
struct SumsBlock : SumsAt<const Sum> {
  int64_t row, rows;
  int64_t col, cols;
};

template <typename Sum>
class PackedProduct {
 public:
  // `pitch`: 32-bit elements from a packed row to the next, of one chunk.
  PackedProduct(const VnniLayout& layout, const TileTable& table, int64_t pitch,
                int64_t rows, int64_t parts,
                TileCount tile_count = TileCount::kEven)
      : layout_(layout),
        table_(table),
        parts_(parts),
        tiles_(rows, table, tile_count),
        chunks_(DivCeil(layout.lines(), kChunk)),
        pitch_(pitch),
        chunk_k_(kChunk * layout.v()),
        a_chunk_(tiles_.max_size() * pitch) {}

  // Elements of k in a chunk, and 32-bit elements from one chunk of a packed
  // row to the next.
  int64_t chunk_k() const { return chunk_k_; }
  int64_t a_chunk() const { return a_chunk_; }
  int64_t chunks() const { return chunks_; }
  const RowTiles& tiles() const { return tiles_; }
  // 32-bit elements of a packed row, all chunks.
  int64_t row_elements() const { return chunks_ * pitch_; }
  // Number of sums that one worker needs for up to `rows` rows: those of all
  // panels that it multiplies at once, and a gap that keeps prefetchers away
  // from the sums of the next worker.
  int64_t unit_sums(int64_t rows) const {
    return parts_ * Division::MostSums(rows) * kPanelCols +
           kGapBytes / static_cast<int64_t>(sizeof(Sum));
  }

  // What Run needs with an executor of `workers`.
  template <typename Allocator>
  PackedScratch<Sum> LayOut(Allocator& allocator, int64_t workers) const {
    return LayOutFor(allocator, workers, chunks_, OneRowIsPacked::kOnce);
  }
  // What RunWith needs.
  template <typename Allocator>
  PackedScratch<Sum> LayOutWholeK(
      Allocator& allocator, int64_t workers,
      OneRowIsPacked one_row = OneRowIsPacked::kOnce) const {
    return LayOutFor(allocator, workers, 1, one_row);
  }

  // `scratch` is of LayOut, for the workers of the executor.
  template <typename Pack, typename Finish>
  void Run(const uint8_t* b, const PackedScratch<Sum>& scratch,
           Executor& executor, const Pack& pack, const Finish& finish) const {
    const auto multiply = [&](const uint32_t* a, const TileRange& range,
                              const SumsAt<Sum>& to, int /*worker*/) {
      MultiplyRange(b, a, range, to);
    };
    const Division& division = scratch.division;
    if (division.k_pieces == 1) {
      RunWith(scratch, executor, pack, multiply, finish);
      return;
    }
    PackRows(scratch, executor, pack);
    InlineExecutor inline_executor;
    Executor& multipliers = Multipliers(executor, inline_executor);
    // The sums of every chunk side by side, then added in order.
    const int64_t stride = layout_.panels() * kPanelCols;
    const int64_t part_stride = tiles_.rows * stride;
    const int64_t chunk_sums = parts_ * part_stride;
    multipliers.ParallelFor(division.tasks(), [&](int64_t task, int) {
      TileRange range = RangeOf(division, task);
      const int64_t end = range.chunk_end;
      for (; range.chunk < end; ++range.chunk) {
        range.chunk_end = range.chunk + 1;
        MultiplyRange(
            b, scratch.a, range,
            {scratch.sums + range.chunk * chunk_sums +
                 tiles_.begin(range.tile) * stride + range.panel * kPanelCols,
             stride, part_stride});
      }
    });
    AddChunks(scratch, multipliers, finish);
  }

  // Like Run, but the caller multiplies, all of k at a time: multiply(a, range,
  // to, worker) overwrites the sums of the range, which are `to`, by the packed
  // rows at `a`. `scratch` is of LayOutWholeK, or of LayOut where that
  // does not divide k.
  template <typename Pack, typename Multiply, typename Finish>
  void RunWith(const PackedScratch<Sum>& scratch, Executor& executor,
               const Pack& pack, const Multiply& multiply,
               const Finish& finish) const {
    const Division& division = scratch.division;
    const bool each_packs = scratch.a_stride > 0;
    if (!each_packs) PackRows(scratch, executor, pack);
    InlineExecutor inline_executor;
    Executor& multipliers = Multipliers(executor, inline_executor);
    const auto multiply_unit = [&](int64_t unit, int worker) {
      MultiplyAndFinish(
          RangeOf(division, unit),
          scratch.sums + worker * unit_sums(tiles_.rows),
          [&](const TileRange& range, const SumsAt<Sum>& to) {
            multiply(scratch.a + worker * scratch.a_stride, range, to, worker);
          },
          finish);
    };
    if (scratch.taken == nullptr) {
      multipliers.ParallelFor(division.tasks(), multiply_unit);
      return;
    }
    for (int64_t share = 0; share < division.shares(); ++share) {
      new (&scratch.taken[share * kTakenStride]) std::atomic<int64_t>(0);
    }
    multipliers.ParallelFor(division.shares(), [&](int64_t task, int worker) {
      bool packed = !each_packs;
      TakeUnits(scratch, task, [&](int64_t unit) {
        if (!packed) pack(0, scratch.a + worker * scratch.a_stride, worker);
        packed = true;
        multiply_unit(unit, worker);
      });
    });
  }

  // The pieces that Run consists of, for gemm/grouped_linear.h, which divides
  // the work itself and never divides k.

  // Where row `row` of the block goes in packed rows that begin at `a`.
  uint32_t* PackedRow(uint32_t* a, int64_t row) const {
    const int64_t tile = tiles_.tile_of(row);
    return a + tile * chunks_ * a_chunk() + (row - tiles_.begin(tile)) * pitch_;
  }

  // Overwrites the sums of the range, which are `to`.
  void MultiplyRange(const uint8_t* b, const uint32_t* a,
                     const TileRange& range, const SumsAt<Sum>& to) const {
    TileLoop loop = {&table_,
                     a,
                     pitch_,
                     tiles_,
                     b,
                     layout_.panel_bytes(),
                     layout_.lines(),
                     layout_.panels(),
                     b,
                     range.panel_end};
    for (int64_t part = 0; part < parts_; ++part) {
      const bool last = part + 1 == parts_;
      loop.after_b = last ? b : loop.b + layout_.bytes();
      loop.after_panel = last ? range.panel_end : range.panel;
      MultiplyPanels(loop, range, to.sums + part * to.part_stride, to.stride);
      loop.b += layout_.bytes();
    }
  }

  // All rows and all k of panels [panel, panel_end): multiply(range, to) and
  // finish(block) by turns, for Division::MostPanels(rows) panels at a time.
  // `sums` has unit_sums(rows), or that of more rows.
  template <typename Multiply, typename Finish>
  void MultiplyAllRows(int64_t panel, int64_t panel_end, Sum* sums,
                       const Multiply& multiply, const Finish& finish) const {
    TileRange range = {panel, panel, 0, tiles_.count, 0, chunks_};
    for (; range.panel < panel_end; range.panel = range.panel_end) {
      range.panel_end =
          std::min(range.panel + Division::MostPanels(tiles_.rows), panel_end);
      MultiplyAndFinish(range, sums, multiply, finish);
    }
  }

 private:
  static constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);
  static constexpr int64_t kPanelCols = VnniLayout::kPanelCols;
  // Size of the gap that keeps prefetchers away from what the next worker
  // writes.
  static constexpr int64_t kGapBytes = 4096;
  static constexpr int64_t kWordBytes = sizeof(uint32_t);
  // Two cache lines, which prefetchers fetch together.
  static constexpr int64_t kTakenStride = 128 / sizeof(std::atomic<int64_t>);

  // The division says whether sums are those of each worker or, where it
  // divides k, those of each chunk; Run and RunWith follow the same division.
  template <typename Allocator>
  PackedScratch<Sum> LayOutFor(Allocator& allocator, int64_t workers,
                               int64_t chunks, OneRowIsPacked one_row) const {
    const Division division =
        Division::Of(tiles_.rows, tiles_.count, layout_.panels(),
                     layout_.lines(), chunks, workers);
    const int64_t sums =
        division.k_pieces > 1
            ? chunks * parts_ * tiles_.rows * layout_.panels() * kPanelCols
            : workers * unit_sums(tiles_.rows);
    const int64_t a = tiles_.count * chunks_ * a_chunk();
    PackedScratch<Sum> scratch = {};
    scratch.division = division;
    if (division.share_units > 0) {
      scratch.taken = allocator.template Allocate<std::atomic<int64_t>>(
          "taken units", division.shares() * kTakenStride);
    }
    if (one_row == OneRowIsPacked::kByEachWorker && tiles_.rows == 1 &&
        division.shares() > 1) {
      scratch.a_stride = RoundUp(a + kGapBytes / kWordBytes, 16);
    }
    scratch.a = allocator.template Allocate<uint32_t>(
        "packed rows", std::max(a, workers * scratch.a_stride));
    scratch.sums = allocator.template Allocate<Sum>("sums", sums);
    return scratch;
  }

  template <typename Pack>
  void PackRows(const PackedScratch<Sum>& scratch, Executor& executor,
                const Pack& pack) const {
    InlineExecutor inline_executor;
    const int64_t rows = tiles_.rows;
    Executor& packers =
        WorthAFork(rows * layout_.lines() / 8, 0) ? executor : inline_executor;
    packers.ParallelFor(rows, [&](int64_t row, int worker) {
      pack(row, PackedRow(scratch.a, row), worker);
    });
  }

  Executor& Multipliers(Executor& executor, Executor& inline_executor) const {
    return WorthAFork(parts_ * layout_.panels() * layout_.lines(), tiles_.rows)
               ? executor
               : inline_executor;
  }

  // Calls fn(unit) for the units of share `share` that nobody has taken, in
  // order, and then for what workers that are late have left of the next ones.
  template <typename Fn>
  static void TakeUnits(const PackedScratch<Sum>& scratch, int64_t share,
                        const Fn& fn) {
    constexpr int64_t kMostShares = 4;
    const int64_t shares = scratch.division.shares();
    const int64_t units = scratch.division.share_units;
    for (int64_t i = 0; i < std::min(shares, kMostShares); ++i) {
      const int64_t from = (share + i) % shares;
      std::atomic<int64_t>& taken = scratch.taken[from * kTakenStride];
      while (taken.load(std::memory_order_relaxed) < units) {
        const int64_t unit = taken.fetch_add(1, std::memory_order_relaxed);
        if (unit < units) fn(from * units + unit);
      }
    }
  }

  template <typename Multiply, typename Finish>
  void MultiplyAndFinish(const TileRange& range, Sum* sums,
                         const Multiply& multiply, const Finish& finish) const {
    const int64_t stride = Division::MostPanels(tiles_.rows) * kPanelCols;
    const SumsAt<Sum> to = {sums, stride, tiles_.rows * stride};
    multiply(range, to);
    const int64_t row = tiles_.begin(range.tile);
    finish(BlockOf(range.panel, range.panel_end, row,
                   tiles_.begin(range.tile_end) - row, to));
  }

  // Where k is divided, once all sums are there. Columns, and rows where there
  // are few columns, are divided between the workers; each finishes what it has
  // added.
  template <typename Finish>
  void AddChunks(const PackedScratch<Sum>& scratch, Executor& multipliers,
                 const Finish& finish) const {
    const int64_t rows = tiles_.rows;
    const int64_t panels = layout_.panels();
    const int64_t stride = panels * kPanelCols;
    const int64_t part_stride = rows * stride;
    InlineExecutor inline_executor;
    Executor& adders = WorthAFork(parts_ * chunks_ * rows * panels, 0)
                           ? multipliers
                           : inline_executor;
    const int64_t units = std::min<int64_t>(adders.num_workers(), panels);
    const int64_t groups = std::min(rows, DivCeil(adders.num_workers(), units));
    adders.ParallelFor(units * groups, [&](int64_t task, int /*worker*/) {
      const int64_t unit = task % units, group = task / units;
      const int64_t panel = panels * unit / units;
      const int64_t panel_end = panels * (unit + 1) / units;
      const int64_t row = rows * group / groups;
      const int64_t row_end = rows * (group + 1) / groups;
      Sum* sums = scratch.sums + row * stride + panel * kPanelCols;
      AddChunksArgs add = {};
      add.rows = static_cast<size_t>(row_end - row);
      add.cols = static_cast<size_t>((panel_end - panel) * kPanelCols);
      add.sums_stride = static_cast<size_t>(stride);
      add.chunks = static_cast<size_t>(chunks_);
      add.chunk_stride = static_cast<size_t>(parts_ * part_stride);
      for (int64_t part = 0; part < parts_; ++part) {
        add.sums = sums + part * part_stride;
        table_.add_chunks(add);
      }
      finish(BlockOf(panel, panel_end, row, row_end - row,
                     {sums, stride, part_stride}));
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
                         int64_t rows, const SumsAt<Sum>& at) const {
    const int64_t col = panel * kPanelCols;
    const int64_t cols = std::min(panel_end * kPanelCols, layout_.n()) - col;
    return {{at.sums, at.stride, at.part_stride}, row, rows, col, cols};
  }

  const VnniLayout& layout_;
  const TileTable& table_;
  int64_t parts_;
  RowTiles tiles_;
  int64_t chunks_;
  int64_t pitch_;
  // Each takes a division, and rows ask for them.
  int64_t chunk_k_;
  int64_t a_chunk_;
};

// The largest workspace of any number of rows up to max_rows and of workers up
// to max_workers: lay_out(rows, workers) is what exactly so many take. More
// rows or workers take more, unless k is divided or every worker packs one row
// for itself; few rows are therefore asked for one by one. Takes a microsecond
// or two for each worker.
template <typename LayOutRows>
int64_t MostWorkspaceBytes(int64_t max_rows, int64_t max_workers,
                           const LayOutRows& lay_out) {
  const int64_t most = std::clamp<int64_t>(max_rows, 1, kBlockRows);
  int64_t bytes = lay_out(most, max_workers);
  for (int64_t rows = std::min(most, Division::kMaxSplitRows); rows > 0;
       --rows) {
    for (int64_t workers = 1; workers <= max_workers; ++workers) {
      bytes = std::max(bytes, lay_out(rows, workers));
    }
  }
  return bytes;
}

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_PACKED_PRODUCT_H_
