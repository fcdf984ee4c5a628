#ifndef QUERN_OPS_ACTIVATION_SIGMOID_MUL_KERNELS_H_
#define QUERN_OPS_ACTIVATION_SIGMOID_MUL_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit: a
// function of the blocks of ops/row_block_kernels.h.

#include <cstddef>

namespace quern {

struct SigmoidMulKernels {
  const char* target;
  // g[i] = 1 / (1 + e^-g[i]), i < n, in place.
  void (*sigmoid)(size_t n, float* g);
};

// The kernels of the best instruction set this CPU supports.
SigmoidMulKernels GetSigmoidMulKernels();

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_SIGMOID_MUL_KERNELS_H_
