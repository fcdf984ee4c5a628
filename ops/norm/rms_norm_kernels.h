#ifndef QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
#define QUERN_OPS_NORM_RMS_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "core/dtype.h"

namespace quern {

// Kernels of one row of n elements; void is the dtype they were chosen for.
struct RmsNormKernels {
  const char* target;
  // Sum of x[i]^2.
  float (*sum_squares)(const void* x, size_t n);
  // h[i] = round(x[i] + residual[i]) -> residual_out; sum of h[i]^2.
  float (*add_sum_squares)(const void* x, const void* residual,
                           void* residual_out, size_t n);
  // out[i] = round(h[i] * scale * weight[i]), h being x.
  void (*scale_x)(const void* h, const void* weight, float scale, void* out,
                  size_t n);
  // The same, h being residual_out.
  void (*scale_residual)(const void* h, const void* weight, float scale,
                         void* out, size_t n);
};

// The kernels of the best instruction set this CPU supports. Each dtype is f32
// or bf16.
RmsNormKernels GetRmsNormKernels(DType x, DType weight, DType out,
                                 DType residual);

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
