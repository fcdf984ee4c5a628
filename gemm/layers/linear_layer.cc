#include "quern/gemm/layers/linear_layer.h"

#include "quern/core/dtype.h"
#include "quern/core/stores.h"
#include "quern/gemm/linear.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

Int8QuantizeSpec QuantizeSpecOf(const LinearSpec& spec) {
  Int8QuantizeSpec quantize;
  if (spec.a != DType::kI8) quantize.dtype = spec.a;
  quantize.granularity = spec.granularity;
  quantize.zero_points = spec.zero_points;
  quantize.scale = spec.a_scale;
  quantize.zero_point = spec.a_zero_point;
  quantize.stores = Stores::kCached;
  return quantize;
}

}  // namespace quern
