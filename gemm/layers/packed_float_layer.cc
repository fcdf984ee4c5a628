#include <cstddef>
#include <cstdint>
#include <memory>

#include "quern/core/dtype.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/finish_sums.h"
#include "quern/gemm/layers/packed_layer_of.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

LinearKernels KernelsOf(WeightFormat b, DType a) {
  if (b == WeightFormat::kBF16) return GetLinearKernelsBF16(a);
  if (b == WeightFormat::kF16) return GetLinearKernelsF16(a);
  return GetLinearKernelsF32(a);
}

// Rows and weights of floats: f32 sums.
class FloatArithmetic : public PackedArithmetic {
 public:
  using Sum = float;

  FloatArithmetic(const LinearSpec& spec, const LinearWeights& weights,
                  const VnniLayout& layout)
      : PackedArithmetic(weights, spec.a, layout, PartsOf(spec.activation)),
        kernels_(
            InOneStream(KernelsOf(weights.spec().format, spec.a), weights)),
        finish_(spec, weights) {}

  const char* target() const { return kernels_.target; }
  const char* name() const { return kernels_.arithmetic; }
  const TileTable& TableFor(int64_t /*rows*/) const { return kernels_.table; }
  int64_t row_pitch() const {
    return static_cast<int64_t>(PackedRowPitch(kernels_.elements_per_line));
  }
  size_t max_tile_rows() const { return kernels_.table.max_rows; }

  void PackRow(const PackedProduct<float>& product, const RowToPack& row,
               const Terms& /*terms*/) const {
    ForEachChunk(product, row.to, [&](int64_t k, int64_t count, uint32_t* to) {
      kernels_.pack_row(row.a + k * a_size(), static_cast<size_t>(count), to);
    });
  }
  void Finish(const SumsBlock<float>& block, int64_t first,
              const LinearArgs& args, const Terms& /*terms*/) const {
    finish_(block, first, args);
  }

 private:
  LinearKernels kernels_;
  FinishFloats finish_;
};

}  // namespace

PackedLayerOr CreatePackedFloat(const LinearSpec& spec,
                                const LinearWeights& weights) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(FloatOrI8(w.format), w.k,
                                            w.n / PartsOf(spec.activation)));
  return std::make_unique<const PackedLayerOf<FloatArithmetic>>(
      FloatArithmetic(spec, weights, layout));
}

}  // namespace quern
