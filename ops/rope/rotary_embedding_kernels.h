#ifndef QUERN_OPS_ROPE_ROTARY_EMBEDDING_KERNELS_H_
#define QUERN_OPS_ROPE_ROTARY_EMBEDDING_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// The heads of one token: x[heads, rot_dim] -> out[heads, rot_dim]. `void`
// stands for the dtype the kernel was chosen for; out may be x.
struct RotaryHeads {
  const void* x;
  void* out;
  size_t x_stride;    // elements between the heads of x
  size_t out_stride;  // elements between the heads of out
  size_t heads;
  size_t rot_dim;
  // The row of the table for the token's position. For kHalves: cos[rot_dim /
  // 2], then sin[rot_dim / 2]. For kPairs: c0 c0 c1 c1 ... [rot_dim], then -s0
  // s0 -s1 s1 ... [rot_dim].
  const float* cos;
  const float* sin;
};

struct RotaryEmbeddingKernels {
  const char* target;
  void (*halves)(const RotaryHeads& heads);
  void (*pairs)(const RotaryHeads& heads);
};

// The kernels of the best instruction set this CPU supports, for f32, bf16
// or f16.
RotaryEmbeddingKernels GetRotaryEmbeddingKernels(DType dtype);

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_EMBEDDING_KERNELS_H_
