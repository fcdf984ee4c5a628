#include "quern/gemm/schedule/codes_product.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/math_util.h"
#include "quern/gemm/kernels/codes_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

constexpr int64_t kChunkK = CodePieces::kChunkK;
constexpr int64_t kLineBytes = VnniLayout::kLineBytes;
constexpr int64_t kPanelCols = VnniLayout::kPanelCols;
// Number of sums of one tile, at most: vectors of 16 that fit in registers.
constexpr int64_t kTileSums = 32 * kPanelCols;

class Multiplier {
 public:
  Multiplier(const CodesPart& part, const PackedProduct<float>& product,
             const uint32_t* a, const float* row_sums, uint8_t* decoded,
             const TileRange& range, float* sums, int64_t stride)
      : part_(part),
        product_(product),
        tiles_(product.tiles()),
        a_(a),
        row_sums_(row_sums),
        decoded_(decoded),
        range_(range),
        sums_(sums),
        stride_(stride),
        panel_bytes_(part.layout.panel_bytes()),
        line_k_(part.layout.line_k()),
        a_tile_(product.chunks() * product.a_chunk()),
        whole_chunks_(range.tile_end - range.tile > 1) {
    tile_.sums = tile_sums_;
    tile_.prefetch_steps = 1;  // a line of codes at each step
    tile_.panel_bytes =
        static_cast<size_t>(part.fused ? panel_bytes_ : kDecodedPanelBytes);
    scale_.sums = tile_sums_;
    scale_.unit = part.codes_kernels.unit;
    scale_.panel_stride = static_cast<size_t>(part.groups * kPanelCols);
    scale_.row_sums_stride = static_cast<size_t>(part.piece_count);
    scale_.to_stride = static_cast<size_t>(stride);
  }

  void Run() {
    const auto best = static_cast<int64_t>(
        part_.table().panels[static_cast<size_t>(tiles_.max_size())]);
    int64_t first_piece = 0, next_piece = 0;
    ForEachBlock(range_, best,
                 [&](const WeightBlock& block, const BlockStart& /*next*/) {
                   if (block.starts_chunk) {
                     first_piece = block.chunk == 0 ? 0 : next_piece;
                   }
                   next_piece = MultiplyBlock(block, first_piece);
                 });
  }

 private:
  // Multiplies all tiles of rows by the block, whose first piece of k is
  // `first_piece`. Returns the piece of k that follows the block's last one.
  int64_t MultiplyBlock(const WeightBlock& block, int64_t first_piece) {
    const int64_t chunk_k = block.chunk * kChunkK;
    const int64_t chunk_end = std::min(chunk_k + kChunkK, part_.pieces.k);
    if (!part_.fused && whole_chunks_) Decode(block, chunk_k, chunk_end);
    scale_.panels = static_cast<size_t>(block.panels());
    tile_.sums_stride = static_cast<size_t>(block.panels() * kPanelCols);
    int64_t piece = first_piece;
    for (int64_t tile = range_.tile; tile < range_.tile_end; ++tile) {
      const int64_t row = tiles_.begin(tile);
      scale_.rows = static_cast<size_t>(tiles_.size(tile));
      scale_.to = sums_ + (row - tiles_.begin(range_.tile)) * stride_ +
                  (block.panel - range_.panel) * kPanelCols;
      piece = first_piece;
      for (int64_t k = chunk_k; k < chunk_end; ++piece) {
        const int64_t end = part_.pieces.End(k);
        MultiplyPiece(block, tile, k, end);
        ScalePiece(block, row, k, piece);
        k = end;
      }
    }
    return piece;
  }

  // Writes the sums of one tile over [k, end) to tile_sums_.
  void MultiplyPiece(const WeightBlock& block, int64_t tile, int64_t k,
                     int64_t end) {
    const int64_t pairs = (k - block.chunk * kChunkK) / 2;
    tile_.a = a_ + tile * a_tile_ + block.chunk * product_.a_chunk() +
              pairs * static_cast<int64_t>(part_.linear.elements_per_line);
    if (part_.fused) {
      tile_.b =
          part_.codes + block.panel * panel_bytes_ + k / line_k_ * kLineBytes;
      tile_.steps = static_cast<size_t>(DivCeil(end - k, line_k_));
      tile_.prefetch[0] = {};
      if (tile == range_.tile) {
        tile_.prefetch[0] = Ahead(block, end);
        tile_.prefetch[0].lines =
            std::min(tile_.prefetch[0].lines, tile_.steps);
      }
    } else {
      // One tile of rows decodes no more than it multiplies next, which then
      // stays in L1.
      if (!whole_chunks_) Decode(block, k, end);
      tile_.b = decoded_ + pairs * kLineBytes;
      tile_.steps =
          static_cast<size_t>(DivCeil(end - k, part_.codes_kernels.decoded_k));
    }
    part_.table().tiles[scale_.rows][block.log](tile_);
  }

  // Adds tile_sums_, scaled, to the sums of the product.
  void ScalePiece(const WeightBlock& block, int64_t row, int64_t k,
                  int64_t piece) {
    const int64_t at =
        (block.panel * part_.groups + k / part_.pieces.group_size) * kPanelCols;
    scale_.scales = part_.scales + at;
    if (part_.zeros != nullptr) {
      scale_.zeros = part_.zeros + at;
      scale_.row_sums = row_sums_ + row * part_.piece_count + piece;
    }
    scale_.add = k > 0;
    part_.codes_kernels.scale(scale_);
  }

  // Decodes [k, end) of the block's panels to where the lines of the chunk lie.
  void Decode(const WeightBlock& block, int64_t k, int64_t end) {
    const uint8_t* from =
        part_.codes + block.panel * panel_bytes_ + k / line_k_ * kLineBytes;
    uint8_t* to = decoded_ + (k - block.chunk * kChunkK) / 2 * kLineBytes;
    const auto lines = static_cast<size_t>(DivCeil(end - k, line_k_));
    const auto decode = part_.codes_kernels.decode;
    for (int64_t p = 0; p < block.panels(); ++p) {
      decode(from, lines, to);
      from += panel_bytes_;
      to += kDecodedPanelBytes;
    }
  }

  // Returns what to prefetch: the piece of k that follows in the block's
  // panels, or the first piece of the next panels.
  TilePrefetch Ahead(const WeightBlock& block, int64_t k) const {
    int64_t panel = block.panel;
    if (k == part_.pieces.k) {
      panel += block.panels();
      k = 0;
      if (panel + block.panels() > part_.layout.panels()) return {};
    }
    return {part_.codes + panel * panel_bytes_ + k / line_k_ * kLineBytes,
            static_cast<size_t>(panel_bytes_),
            static_cast<size_t>(DivCeil(part_.pieces.End(k) - k, line_k_))};
  }

  const CodesPart part_;
  const PackedProduct<float>& product_;
  const RowTiles tiles_;
  const uint32_t* const a_;
  const float* const row_sums_;
  uint8_t* const decoded_;
  const TileRange range_;
  float* const sums_;
  const int64_t stride_;
  const int64_t panel_bytes_;
  const int64_t line_k_;
  const int64_t a_tile_;
  const bool whole_chunks_;
  TileArgs tile_ = {};
  ScaleArgs scale_ = {};
  alignas(64) float tile_sums_[kTileSums];
};

}  // namespace

void MultiplyCodes(const CodesPart& part, const PackedProduct<float>& product,
                   const uint32_t* a, const float* row_sums, uint8_t* decoded,
                   const TileRange& range, float* sums, int64_t stride) {
  Multiplier(part, product, a, row_sums, decoded, range, sums, stride).Run();
}

}  // namespace quern
