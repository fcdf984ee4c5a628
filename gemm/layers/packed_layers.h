#ifndef QUERN_GEMM_LAYERS_PACKED_LAYERS_H_
#define QUERN_GEMM_LAYERS_PACKED_LAYERS_H_

// Private: the packed implementation of gemm/linear.h, one layer for each kind
// of arithmetic. All are gemm/layers/packed_layer_of.h with a way to pack a row
// of a, a way to multiply it and a way to finish sums.

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/grouped_rows.h"

namespace quern {

// A layer, and the pieces of its Execute for gemm/grouped_linear.h.
class PackedLayer : public LinearLayer {
 public:
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
};

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

}  // namespace quern

#endif  // QUERN_GEMM_LAYERS_PACKED_LAYERS_H_
