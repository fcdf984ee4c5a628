#ifndef QUERN_OPS_NORM_RMS_NORM_GATED_KERNELS_H_
#define QUERN_OPS_NORM_RMS_NORM_GATED_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit: the
// functions that are applied to the blocks of ops/row_block_kernels.h.

#include <cstddef>
#include <cstdint>

namespace quern {

enum class NormGate : uint8_t { kSilu, kSigmoid };

struct RmsNormGatedKernels {
  const char* target;
  // v[i] *= act(z[i])
  void (*gate)(const float* z, size_t n, float* v);
  // Sum of v[i]^2, in an order that depends on n alone.
  float (*sum_squares)(const float* v, size_t n);
  // v[i] *= scale
  void (*scale)(float scale, size_t n, float* v);
};

// The kernels of the best instruction set this CPU supports.
RmsNormGatedKernels GetRmsNormGatedKernels(NormGate gate);

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_GATED_KERNELS_H_
