#ifndef QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
#define QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit: the
// functions that are applied to the blocks of ops/row_block_kernels.h.

#include <cstddef>

namespace quern {

// What n numbers v[i] are summed to, in an order that depends on n alone.
struct LayerNormMoments {
  float mean;     // of v[i], with the error of an f32 sum
  float rest;     // sum of v[i] - mean
  float squares;  // sum of (v[i] - mean)^2
};

struct LayerNormScale {
  float mean, rest;  // what is subtracted from each number
  float scale;
};

struct LayerNormKernels {
  const char* target;
  // v[i] += r[i]
  void (*add)(const float* r, size_t n, float* v);
  LayerNormMoments (*moments)(const float* v, size_t n);
  // v[i] = (v[i] - mean - rest) * scale * w[i] + b[i]. Without w it is 1, and
  // without b 0.
  void (*scale)(const LayerNormScale& scale, const float* w, const float* b,
                size_t n, float* v);
};

// The kernels of the best instruction set this CPU supports.
LayerNormKernels GetLayerNormKernels();

}  // namespace quern

#endif  // QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
