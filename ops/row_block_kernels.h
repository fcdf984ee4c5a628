#ifndef QUERN_OPS_ROW_BLOCK_KERNELS_H_
#define QUERN_OPS_ROW_BLOCK_KERNELS_H_

// Private seam between plans (plain C++) and the SIMD translation unit.
//
// A row goes through blocks of f32 that stay in L1: loads and stores know
// dtypes, what a family computes knows f32, so there is one of each and no
// product of both. A pass over L1 costs a cycle a vector beside the 20 of a
// silu.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// Elements of a block: a multiple of every vector, 16 cache lines of f32.
inline constexpr size_t kRowBlock = 256;

// Each kernel takes 0 < n <= kRowBlock elements. A block is aligned to 64
// bytes. What is behind its n elements is unspecified but for the zeros that
// fill the last vector, and may be computed on.
struct RowBlockKernels {
  // block[i] = x[i]
  void (*load)(const void* x, size_t n, float* block);
  // even[i] = x[2 i], odd[i] = x[2 i + 1]
  void (*load_pairs)(const void* x, size_t n, float* even, float* odd);
  // out[i] = round(v[i]), round(g[i] * u[i]). With `stream`, out is aligned to
  // 64 bytes, and what was written is complete after flush().
  void (*store)(const float* v, size_t n, bool stream, void* out);
  void (*mul_store)(const float* g, const float* u, size_t n, bool stream,
                    void* out);
  void (*flush)();
};

// The kernels of the best instruction set this CPU supports. Each dtype is f32,
// bf16 or f16.
RowBlockKernels GetRowBlockKernels(DType x, DType out);

}  // namespace quern

#endif  // QUERN_OPS_ROW_BLOCK_KERNELS_H_
