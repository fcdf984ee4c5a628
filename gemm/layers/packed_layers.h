#ifndef QUERN_GEMM_LAYERS_PACKED_LAYERS_H_
#define QUERN_GEMM_LAYERS_PACKED_LAYERS_H_

// Private: the packed implementation of gemm/linear.h, one class for each kind
// of arithmetic. All are gemm/schedule/packed_product.h with a way to pack a
// row of a and a way to finish sums.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/grouped_rows.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

class PackedLayer;
using PackedLayerOr = absl::StatusOr<std::unique_ptr<const PackedLayer>>;

PackedLayerOr CreatePackedFloat(const LinearSpec& spec,
                                const LinearWeights& weights);
PackedLayerOr CreatePackedInt8(const LinearSpec& spec,
                               const LinearWeights& weights);
PackedLayerOr CreatePackedCodes(const LinearSpec& spec,
                                const LinearWeights& weights);
PackedLayerOr CreatePackedBlocks(const LinearSpec& spec,
                                 const LinearWeights& weights);
// kI4Group by rows of int8 in blocks.
PackedLayerOr CreatePackedI4Blocks(const LinearSpec& spec,
                                   const LinearWeights& weights);
// Calls the one of these that the weights' format needs. The spec has been
// proved.
PackedLayerOr CreatePackedLayer(const LinearSpec& spec,
                                const LinearWeights& weights);

// "8 x 32", the tiles of m rows.
inline std::string TilesOf(int64_t m, const TileTable& table) {
  const RowTiles tiles(std::clamp<int64_t>(m, 1, kBlockRows), table,
                       TileCount::kEven);
  const int64_t rows = tiles.max_size();
  return absl::StrCat(
      rows, " x ",
      table.panels[static_cast<size_t>(rows)] * VnniLayout::kPanelCols);
}

// Copies elements order[i], i < k, of a row, each of 2 or 4 bytes.
void Gather(const uint8_t* row, int64_t element_bytes, const int32_t* order,
            int64_t k, uint8_t* to);

// What the packed layers share: weights, and scratch for a block of rows.
class PackedLayer : public LinearLayer {
 public:
  explicit PackedLayer(const LinearWeights& weights) : weights_(weights) {}

  int64_t packed_bytes() const override {
    return static_cast<int64_t>(weights_.bytes().size());
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    return MostWorkspaceBytes(max_m, max_workers,
                              [&](int64_t rows, int64_t workers) {
                                WorkspaceLayout layout;
                                CountScratch(layout, rows, workers);
                                return layout.bytes();
                              });
  }

  // The pieces of Execute for gemm/grouped_linear.h.
  //
  // Panels of one part, and cache lines that all parts have of one panel.
  virtual int64_t panels() const = 0;
  virtual int64_t lines() const = 0;
  // Adds what the workspace of GroupedRows must have, whatever their blocks.
  virtual void CountGroups(WorkspaceLayout& layout, int64_t rows,
                           int64_t workers) const = 0;
  // Packs the k elements at `from` as row `row` of the block.
  virtual void PackRow(const GroupedRows& all, const RowsBlock& block,
                       int64_t row, const uint8_t* from, int worker) const = 0;
  // Writes what panels [panel, panel_end) give: those columns of rows
  // block.first and following of args.c. Nothing else of args is read.
  virtual void MultiplyBlock(const GroupedRows& all, const RowsBlock& block,
                             int64_t panel, int64_t panel_end,
                             const LinearArgs& args, int worker) const = 0;

 protected:
  const LinearWeights& weights() const { return weights_; }

 private:
  // Adds what Execute takes for a block of so many rows.
  virtual void CountScratch(WorkspaceLayout& layout, int64_t rows,
                            int64_t workers) const = 0;

  LinearWeights weights_;
};

// Where finished rows go: c, or f32 that the epilogue reads.
struct FinishTo {
  int64_t rows, cols;
  void* c;
  ptrdiff_t c_row_bytes;
  bool before_epilogue;
};

// Turns a block of sums into rows of c: finish(part, row, col, to) writes the
// layer's results from that row and column of the block on, then come
// activation and residual. `first` is the row of c that the block's rows are
// counted from.
template <typename Sum, typename FinishRows>
void FinishBlock(LinearActivation activation, const EpilogueKernels& epilogue,
                 const SumsBlock<Sum>& block, int64_t first,
                 const LinearArgs& args, const FinishRows& finish) {
  const EpilogueRows to = RowsOfC(block.rows, block.cols, first + block.row,
                                  block.col, args.c, args.residual);
  if (activation == LinearActivation::kNone && to.residual == nullptr) {
    finish(0, 0, 0,
           FinishTo{block.rows, block.cols, to.c,
                    static_cast<ptrdiff_t>(to.c_row_bytes), false});
    return;
  }
  ApplyEpilogue(
      epilogue, PartsOf(activation), to,
      [&](int64_t part, int64_t row, int64_t col, int64_t cols, float* v) {
        finish(part, row, col, FinishTo{1, cols, v, 0, true});
      });
}

// Turns f32 sums into rows of c.
class FinishFloats {
 public:
  FinishFloats(const LinearSpec& spec, const LinearWeights& weights)
      : activation_(spec.activation),
        bias_(weights.bias()),
        part_n_(weights.spec().n / PartsOf(spec.activation)),
        finish_(GetFinish(spec.c)),
        finish_f32_(GetFinish(DType::kF32)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)) {}

  void operator()(const SumsBlock<float>& block, int64_t first,
                  const LinearArgs& args) const;

 private:
  LinearActivation activation_;
  const float* bias_;
  int64_t part_n_;
  Finish finish_;
  Finish finish_f32_;  // before the epilogue, if there is one
  EpilogueKernels epilogue_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LAYERS_PACKED_LAYERS_H_
