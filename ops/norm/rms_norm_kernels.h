#ifndef QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
#define QUERN_OPS_NORM_RMS_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

struct RmsNormScale {
  const void* weight;  // or null
  float offset;
  float scale;
  bool stream;
  // Rows of n elements to prefetch meanwhile, of h's type; any addresses, or
  // null.
  const void* next;
  const void* next2;
};

// Kernels of one row of n elements; void is the dtype they were chosen for.
struct RmsNormKernels {
  const char* target;
  // Sum of x[i]^2.
  float (*sum_squares)(const void* x, size_t n);
  // h[i] = round(x[i] + residual[i]) -> residual_out; sum of h[i]^2.
  float (*add_sum_squares)(const void* x, const void* residual,
                           void* residual_out, size_t n);
  // out[i] = round(h[i] * scale * (weight[i] + offset)), h being x; without a
  // weight, round(h[i] * scale). With `stream`, stores go around the caches,
  // and are complete after flush().
  void (*scale_x)(const void* h, const RmsNormScale& scale, void* out,
                  size_t n);
  // The same, h being residual_out.
  void (*scale_residual)(const void* h, const RmsNormScale& scale, void* out,
                         size_t n);
  void (*flush)();
};

// Whether there are kernels of these: each f32 or bf16; or x and residual f16,
// and weight and out f16 or f32.
bool HasRmsNormKernels(DType x, DType weight, DType out, DType residual);

// The kernels of the best instruction set this CPU supports.
RmsNormKernels GetRmsNormKernels(DType x, DType weight, DType out,
                                 DType residual);

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
