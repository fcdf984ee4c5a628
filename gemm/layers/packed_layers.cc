#include "quern/gemm/layers/packed_layers.h"

#include <cstdint>
#include <cstring>

#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"

namespace quern {
namespace {

template <typename T>
void GatherAs(const uint8_t* row, const int32_t* order, int64_t k,
              uint8_t* to) {
  for (int64_t i = 0; i < k; ++i) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)),
                row + order[i] * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

}  // namespace

void Gather(const uint8_t* row, int64_t element_bytes, const int32_t* order,
            int64_t k, uint8_t* to) {
  if (element_bytes == 4) {
    GatherAs<uint32_t>(row, order, k, to);
  } else {
    GatherAs<uint16_t>(row, order, k, to);
  }
}

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
