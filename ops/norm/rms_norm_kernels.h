#ifndef QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
#define QUERN_OPS_NORM_RMS_NORM_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

struct RmsNormScale {
  const void* weight;  // null for NormWeight::kNone
  float offset;
  float scale;
  bool stream;
  // Rows of n elements to prefetch meanwhile, of the type of h. Any addresses,
  // or null.
  const void* next;
  const void* next2;
};

// Kernels of one row of n elements; `void` stands for the dtypes they were
// chosen for.
struct RmsNormKernels {
  const char* target;
  // Sum of x[i]^2.
  float (*sum_squares)(const void* x, size_t n);
  // residual_out[i] = round(x[i] + residual[i]). Returns the sum of
  // residual_out[i]^2.
  float (*add_sum_squares)(const void* x, const void* residual,
                           void* residual_out, size_t n);
  // out[i] = round(h[i] * scale * (weight[i] + offset)), where h has the type
  // of x. Without a weight, out[i] = round(h[i] * scale). With `stream`, stores
  // bypass the caches and are complete after flush().
  void (*scale_x)(const void* h, const RmsNormScale& scale, void* out,
                  size_t n);
  // Like scale_x, where h has the type of residual_out.
  void (*scale_residual)(const void* h, const RmsNormScale& scale, void* out,
                         size_t n);
  // Sum of (x[i] + residual[i])^2. Like add_scale, for x and residual of bf16
  // or of f16, and a weight of that type or f32.
  float (*sum_squares_of_sum)(const void* x, const void* residual, size_t n);
  // h[i] = x[i] + residual[i] in f32, residual_out[i] = round(h[i]), and out[i]
  // = round(h[i] * scale * (weight[i] + offset)) of the type of x. Each of
  // residual_out and out may be x or residual. Does not stream.
  void (*add_scale)(const void* x, const void* residual,
                    const RmsNormScale& scale, void* residual_out, void* out,
                    size_t n);
  void (*flush)();
};

// Whether kernels exist for these dtypes: each is f32 or bf16; or x and
// residual are f16, and weight and out are each f16 or f32.
bool HasRmsNormKernels(DType x, DType weight, DType out, DType residual);

// The kernels of the best instruction set this CPU supports.
RmsNormKernels GetRmsNormKernels(DType x, DType weight, DType out,
                                 DType residual);

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_KERNELS_H_
