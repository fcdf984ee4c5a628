#ifndef QUERN_ATTENTION_KERNELS_MERGE_STATES_KERNELS_H_
#define QUERN_ATTENTION_KERNELS_MERGE_STATES_KERNELS_H_

// The private seam between MergeStatesPlan and its SIMD kernels.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

struct MergeStatesKernels {
  const char* target;

  // Computes for each of `heads` rows what to multiply a.out and b.out by, and
  // the log-sum-exp of both. `lse` may be a or b, or null: not wanted.
  void (*weights)(const float* a, const float* b, size_t heads, float* weight_a,
                  float* weight_b, float* lse);

  // out[d] = weight_a * a[d] + weight_b * b[d], d < count. A part of weight 0
  // is not read. `out` may be a or b where the types have one size.
  void (*merge)(const void* a, float weight_a, const void* b, float weight_b,
                size_t count, void* out);
};

// The kernels of the best instruction set this CPU supports. Types are kF32,
// kBF16 or kF16.
MergeStatesKernels GetMergeStatesKernels(DType dtype, DType out_dtype);

}  // namespace quern

#endif  // QUERN_ATTENTION_KERNELS_MERGE_STATES_KERNELS_H_
