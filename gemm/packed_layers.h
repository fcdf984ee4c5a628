#ifndef QUERN_GEMM_PACKED_LAYERS_H_
#define QUERN_GEMM_PACKED_LAYERS_H_

// Private: the packed implementation of gemm/linear.h, one class for each kind
// of arithmetic. All are gemm/packed_product.h with a way to pack a row of a
// and a way to finish sums.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/epilogue_kernels.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_kernels.h"
#include "quern/gemm/linear_layer.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/packed_product.h"
#include "quern/gemm/tile.h"
#include "quern/gemm/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

using LinearLayerOr = absl::StatusOr<std::unique_ptr<const LinearLayer>>;

LinearLayerOr CreatePackedFloat(const LinearSpec& spec,
                                const LinearWeights& weights);
LinearLayerOr CreatePackedInt8(const LinearSpec& spec,
                               const LinearWeights& weights);
LinearLayerOr CreatePackedCodes(const LinearSpec& spec,
                                const LinearWeights& weights);

// "8 x 32", the tiles of m rows.
inline std::string TilesOf(int64_t m, const TileTable& table) {
  const RowTiles tiles(std::clamp<int64_t>(m, 1, kBlockRows), table);
  const int64_t rows = tiles.max_size();
  return absl::StrCat(
      rows, " x ",
      table.panels[static_cast<size_t>(rows)] * VnniLayout::kPanelCols);
}

// Turns f32 sums into rows of c: bias, activation and residual.
class FinishFloats {
 public:
  FinishFloats(const LinearSpec& spec, const LinearWeights& weights)
      : spec_(spec),
        bias_(weights.bias()),
        part_n_(weights.spec().n / PartsOf(spec.activation)),
        finish_(GetFinish(spec.c)),
        finish_f32_(GetFinish(DType::kF32)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)) {}

  // `first` is the row of c that the block's rows are counted from.
  void operator()(const SumsBlock<float>& block, int64_t first,
                  const LinearArgs& args) const;

 private:
  LinearSpec spec_;
  const float* bias_;
  int64_t part_n_;
  Finish finish_;
  Finish finish_f32_;  // before the epilogue, if there is one
  EpilogueKernels epilogue_;
};

}  // namespace quern

#endif  // QUERN_GEMM_PACKED_LAYERS_H_
