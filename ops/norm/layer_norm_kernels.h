#ifndef QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
#define QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// What n numbers x[i] are summed to, in an order that depends on n alone.
struct LayerNormMoments {
  float mean;     // of x[i], with the error of an f32 sum
  float rest;     // sum of x[i] - mean
  float squares;  // sum of (x[i] - mean)^2
};

struct LayerNormScale {
  float mean, rest;  // what is subtracted from each number
  float scale;
};

// x, w, b and out are of one dtype, any of f32, bf16 and f16, and need no
// alignment.
struct LayerNormKernels {
  const char* target;
  // v[i] += r[i] of blocks of f32 (ops/row_block_kernels.h)
  void (*add)(const float* r, size_t n, float* v);
  LayerNormMoments (*moments)(const void* x, size_t n);
  // out[i] = round((x[i] - mean - rest) * scale * w[i] + b[i]). Without w it is
  // 1, and without b 0. out may be x. With `stream`, out must be aligned to 64
  // bytes, and is complete after RowBlockKernels::flush().
  void (*scale)(const LayerNormScale& scale, const void* x, const void* w,
                const void* b, size_t n, bool stream, void* out);
};

// The kernels of the best instruction set this CPU supports.
LayerNormKernels GetLayerNormKernels(DType dtype);

}  // namespace quern

#endif  // QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
