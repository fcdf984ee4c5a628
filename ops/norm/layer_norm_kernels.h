#ifndef QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
#define QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit: the
// functions that are applied to the blocks of ops/row_block_kernels.h.

#include <cstddef>

namespace quern {

// Sums are taken in an order that depends on n alone.
struct LayerNormKernels {
  const char* target;
  // v[i] += r[i]
  void (*add)(const float* r, size_t n, float* v);
  // Sum of v[i].
  float (*sum)(const float* v, size_t n);
  // Sums of v[i] - mean and of (v[i] - mean)^2.
  void (*deviations)(const float* v, size_t n, float mean, float* sum,
                     float* squares);
  // v[i] = (v[i] - mean - rest) * scale
  void (*scale)(float mean, float rest, float scale, size_t n, float* v);
  // v[i] *= w[i]
  void (*multiply)(const float* w, size_t n, float* v);
};

// The kernels of the best instruction set this CPU supports.
LayerNormKernels GetLayerNormKernels();

}  // namespace quern

#endif  // QUERN_OPS_NORM_LAYER_NORM_KERNELS_H_
