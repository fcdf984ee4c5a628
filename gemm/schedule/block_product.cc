#include "quern/gemm/schedule/block_product.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "quern/core/math_util.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/i4_block_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"

namespace quern {
namespace {

constexpr int64_t kPanelCols = BlockPanels::kPanelCols;
constexpr int64_t kLineBytes = BlockPanels::kLineBytes;
// Tiles fetch as many lines with each block of a record.
constexpr int64_t kBlocks = BlockPanels::kRecordBlocks;

// The groups of int4 weights that a record's blocks are in, from the first
// record on.
class GroupCursor {
 public:
  explicit GroupCursor(const PanelGroups& of)
      : of_(of),
        record_groups_(kBlocks / of.group_blocks),
        record_blocks_(kBlocks % of.group_blocks) {
    now_.group_blocks = static_cast<size_t>(of.group_blocks);
  }

  // Goes to the first record, and from a record to the next.
  void Start() { group_ = first_ = 0; }
  void Next() {
    group_ += record_groups_;
    first_ += record_blocks_;
    if (first_ >= of_.group_blocks) {
      first_ -= of_.group_blocks;
      ++group_;
    }
  }
  // The groups of this record in a panel. The next call overwrites them.
  const I4Groups& Of(int64_t panel) {
    const int64_t at = (panel * of_.groups + group_) * kPanelCols;
    now_.scales = of_.scales + at;
    now_.zeros = of_.zeros == nullptr ? nullptr : of_.zeros + at;
    now_.first = static_cast<size_t>(first_);
    return now_;
  }

 private:
  const PanelGroups of_;
  const int64_t record_groups_;  // groups that end within a record, at least
  const int64_t record_blocks_;  // blocks of a record beyond those
  int64_t group_ = 0;            // in which the record begins
  int64_t first_ = 0;            // blocks of that group before the record
  I4Groups now_ = {};
};
struct NoGroups {
  explicit NoGroups(const PanelGroups& /*of*/) {}
};

// The sizes of tiles of rows, one after the other, as RowTiles has them.
struct Sizes {
  int64_t Next() {
    rest += step;
    if (rest < count) return size;
    rest -= count;
    return size + 1;
  }
  int64_t size;   // floor(rows / count)
  int64_t step;   // rows mod count
  int64_t count;  // of tiles
  int64_t rest;   // (rows * tile) mod count
};

template <class Kernels>
class Multiplier {
  using Kind = BlockKind<Kernels>;
  using Decoded = typename Kind::Decoded;
  static constexpr bool kHasGroups = std::is_same_v<Kernels, I4BlockKernels>;

 public:
  Multiplier(const BlockPart<Kernels>& part,
             const PackedProduct<float>& product, const uint32_t* a,
             const TileRange& range, float* sums, int64_t stride)
      : part_(part),
        product_(product),
        tiles_(product.tiles()),
        a_(a),
        range_(range),
        sums_(sums),
        stride_(stride),
        record_bytes_(part.layout.record_bytes()),
        record_lines_(record_bytes_ / kLineBytes),
        panel_bytes_(part.layout.panel_bytes()),
        records_(part.layout.records()),
        row_pitch_(Kind::RowPitch(part.kernels)),
        a_tile_(product.chunks() * product.a_chunk()),
        first_sizes_{tiles_.rows / tiles_.count, tiles_.rows % tiles_.count,
                     tiles_.count, tiles_.rows * range.tile % tiles_.count},
        groups_(part.groups) {
    tile_.sums_stride = static_cast<size_t>(stride);
    tile_.panel_bytes =
        part.fused ? static_cast<size_t>(panel_bytes_) : sizeof(Decoded);
    const int64_t tiles = range.tile_end - range.tile;
    share_ = RoundUp(DivCeil(record_lines_, tiles), kBlocks);
  }

  void Run() {
    if (part_.fused) {
      MultiplyStreams();
    } else {
      MultiplyRecords();
    }
  }

 private:
  const uint8_t* RecordAt(int64_t panel, int64_t record) const {
    return part_.panels + panel * panel_bytes_ + record * record_bytes_;
  }

  // Tiles that decode read each panel as one stream. There is one tile of rows.
  void MultiplyStreams() {
    const int64_t rows = first_sizes_.size;
    if constexpr (std::is_same_v<Kernels, BlockKernels>) {
      if (rows == 1 && part_.kernels.one_row != nullptr) return MultiplyRow();
    }
    const auto best = static_cast<int64_t>(part_.kernels.fused.panels[rows]);
    const auto lines = static_cast<size_t>(record_lines_);
    for (int64_t panel = range_.panel; panel < range_.panel_end;) {
      const size_t log = FloorLog2(std::min(best, range_.panel_end - panel));
      for (int64_t record = 0; record < records_; ++record) {
        tile_.steps = StartRecord(record);
        tile_.sums = sums_ + (panel - range_.panel) * kPanelCols;
        tile_.a = a_ + record * product_.a_chunk();
        tile_.b = RecordAt(panel, record);
        if constexpr (kHasGroups) tile_.groups = &groups_.Of(panel);
        tile_.prefetch[0] = {tile_.b + part_.ahead_bytes, tile_.panel_bytes,
                             lines};
        MultiplyFused(rows, log);
      }
      panel += int64_t{1} << log;
    }
  }

  void MultiplyRow() {
    PanelArgs args = {};
    args.a = a_;
    args.a_stride = static_cast<size_t>(product_.a_chunk());
    args.record_bytes = static_cast<size_t>(record_bytes_);
    args.blocks = static_cast<size_t>(part_.layout.blocks());
    args.ahead_bytes = part_.ahead_bytes;
    args.sums = sums_;
    for (int64_t panel = range_.panel; panel < range_.panel_end; ++panel) {
      args.b = RecordAt(panel, 0);
      part_.kernels.one_row(args);
      args.sums += kPanelCols;
    }
  }

  // Takes the rows in powers of two, the largest first. Changes tile_ in place:
  // to copy it waits for the stores of what was just written there, which took
  // a third of the time of one row (Zen 5, 2026).
  void MultiplyFused(int64_t all_rows, size_t log) {
    const TileTable& fused = part_.kernels.fused;
    int64_t rows = 0;
    for (int64_t left = all_rows; left > 0; left -= rows) {
      for (rows = 4; rows > left || fused.tiles[rows][0] == nullptr;) rows /= 2;
      fused.tiles[rows][log](tile_);
      tile_.a += rows * row_pitch_;
      tile_.sums = static_cast<float*>(tile_.sums) + rows * stride_;
      tile_.prefetch[0].lines = 0;
    }
  }

  void MultiplyRecords() {
    const auto best = static_cast<int64_t>(std::min(
        part_.kernels.decoded.panels[static_cast<size_t>(tiles_.max_size())],
        kBlockPanels));
    ForEachBlock(range_, best,
                 [&](const WeightBlock& block, const BlockStart& next) {
                   if (block.starts_chunk) blocks_ = StartRecord(block.chunk);
                   MultiplyDecoded(block, RecordAt(next.panel, next.chunk));
                 });
  }

  // Returns the number of blocks of the record, which is the first or follows
  // the one before.
  size_t StartRecord(int64_t record) {
    tile_.add = record > 0;
    if constexpr (kHasGroups) {
      if (record == 0) {
        groups_.Start();
      } else {
        groups_.Next();
      }
    }
    return static_cast<size_t>(part_.layout.RecordBlocks(record));
  }

  // Decodes the block, a record of some panels, and multiplies all tiles of
  // rows by it. Meanwhile fetches the records from `fetch` on, which may be any
  // address.
  // Nothing here may take long, because it is done for each tile: three
  // divisions and fetches in odd numbers took a tenth of the time.
  void MultiplyDecoded(const WeightBlock& block, const uint8_t* fetch) {
    for (int64_t p = 0; p < block.panels(); ++p) {
      const uint8_t* from = RecordAt(block.panel + p, block.chunk);
      if constexpr (kHasGroups) {
        part_.kernels.decode(from, blocks_, groups_.Of(block.panel + p),
                             &decoded_[p]);
      } else {
        part_.kernels.decode(from, blocks_, &decoded_[p]);
      }
    }
    tile_.steps = blocks_ * static_cast<size_t>(Kind::kBlockSteps);
    int64_t share = share_;
    if constexpr (Kind::kBlockSteps > 1) {
      // These tiles fetch at most one line in a step.
      share = std::min(share, static_cast<int64_t>(tile_.steps));
      tile_.prefetch_steps = tile_.steps / static_cast<size_t>(share);
    }
    tile_.b = reinterpret_cast<const uint8_t*>(&decoded_[0]);
    tile_.a = a_ + range_.tile * a_tile_ + block.chunk * product_.a_chunk();
    tile_.sums = sums_ + (block.panel - range_.panel) * kPanelCols;
    int64_t lines = record_lines_;
    Sizes sizes = first_sizes_;
    for (int64_t tile = range_.tile; tile < range_.tile_end; ++tile) {
      const int64_t count = std::min(share, lines);
      tile_.prefetch[0] = {fetch, static_cast<size_t>(panel_bytes_),
                           static_cast<size_t>(count)};
      fetch += count * kLineBytes;
      lines -= count;
      const int64_t rows = sizes.Next();
      part_.kernels.decoded.tiles[rows][block.log](tile_);
      tile_.a += a_tile_;
      tile_.sums = static_cast<float*>(tile_.sums) + rows * stride_;
    }
  }

  const BlockPart<Kernels> part_;
  const PackedProduct<float>& product_;
  const RowTiles tiles_;
  const uint32_t* const a_;
  const TileRange range_;
  float* const sums_;
  const int64_t stride_;
  const int64_t record_bytes_;
  const int64_t record_lines_;
  const int64_t panel_bytes_;
  const int64_t records_;
  const int64_t row_pitch_;  // 32-bit elements from row to row of a record
  const int64_t a_tile_;     // 32-bit elements from tile to tile
  const Sizes first_sizes_;
  std::conditional_t<kHasGroups, GroupCursor, NoGroups> groups_;
  int64_t share_;      // lines of each panel that a tile fetches
  size_t blocks_ = 0;  // of the record
  TileArgs tile_ = {};
  Decoded decoded_[kBlockPanels];
};

}  // namespace

template <class Kernels>
void MultiplyBlocks(const BlockPart<Kernels>& part,
                    const PackedProduct<float>& product, const uint32_t* a,
                    const TileRange& range, float* sums, int64_t stride) {
  Multiplier<Kernels>(part, product, a, range, sums, stride).Run();
}

template void MultiplyBlocks(const BlockPart<BlockKernels>&,
                             const PackedProduct<float>&, const uint32_t*,
                             const TileRange&, float*, int64_t);
template void MultiplyBlocks(const BlockPart<I4BlockKernels>&,
                             const PackedProduct<float>&, const uint32_t*,
                             const TileRange&, float*, int64_t);
template void MultiplyBlocks(const BlockPart<ExactBlockKernels>&,
                             const PackedProduct<float>&, const uint32_t*,
                             const TileRange&, float*, int64_t);

}  // namespace quern
