#include "quern/gemm/layers/packed_layers.h"

#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"

namespace quern {

PackedLayerOr CreatePackedLayer(const LinearSpec& spec,
                                const LinearWeights& weights) {
  const WeightFormat format = weights.spec().format;
  if (format == WeightFormat::kBlocks) {
    return CreatePackedBlocks(spec, weights);
  }
  if (spec.activations == LinearActivations::kInt8Blocks) {
    return CreatePackedI4Blocks(spec, weights);
  }
  if (HasGroups(format)) return CreatePackedCodes(spec, weights);
  if (format == WeightFormat::kI8Channel) {
    return CreatePackedInt8(spec, weights);
  }
  return CreatePackedFloat(spec, weights);
}

}  // namespace quern
