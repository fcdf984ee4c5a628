#ifndef QUERN_OPS_ACTIVATION_SILU_AND_MUL_KERNELS_H_
#define QUERN_OPS_ACTIVATION_SILU_AND_MUL_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "core/dtype.h"

namespace quern {

struct SiluAndMulKernels {
  const char* target;
  // out[i] = round(silu(gate[i]) * up[i]), i < n; void is the dtype the kernel
  // was chosen for. out may be gate or up.
  void (*row)(const void* gate, const void* up, void* out, size_t n);
};

// The kernel of the best instruction set this CPU supports. Each dtype is f32
// or bf16.
SiluAndMulKernels GetSiluAndMulKernels(DType x, DType out);

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_SILU_AND_MUL_KERNELS_H_
