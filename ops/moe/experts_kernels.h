#ifndef QUERN_OPS_MOE_EXPERTS_KERNELS_H_
#define QUERN_OPS_MOE_EXPERTS_KERNELS_H_

// Private seam between ops/moe/experts.cc (plain C++) and experts_simd.cc.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

// out[i] = round(sum over j < count of weights[j] * rows[j][i] + add[i]), i <
// n: f32, fused, in the order of j, `add` last.
struct CombineArgs {
  const float* const* rows;
  const float* weights;
  size_t count;
  const void* add;  // of out's dtype, or null; may be out
  void* out;
  size_t n;
};

struct ExpertsKernels {
  const char* target;
  void (*combine)(const CombineArgs&);
  // to[i] = round(weight * from[i]), i < n, of x's dtype.
  void (*scale)(float weight, const void* from, void* to, size_t n);
};

// Kernels of the best instruction set that this CPU supports. x and out: f32,
// bf16 or f16.
ExpertsKernels GetExpertsKernels(DType x, DType out);

}  // namespace quern

#endif  // QUERN_OPS_MOE_EXPERTS_KERNELS_H_
