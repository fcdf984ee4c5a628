#ifndef QUERN_OPS_ROW_BLOCK_KERNELS_H_
#define QUERN_OPS_ROW_BLOCK_KERNELS_H_

// Private seam between plans (plain C++) and the SIMD translation unit.
//
// A row is processed in blocks of f32 that stay in L1. Loads and stores know
// the dtypes, and the arithmetic of an operator family knows only f32, so no
// kernel is needed for each combination. A pass over L1 costs a cycle per
// vector, against 20 for silu.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// Elements of a block: a multiple of every vector's length, 16 cache lines of
// f32.
inline constexpr size_t kRowBlock = 256;

// Each kernel takes 0 < n <= kRowBlock elements. Blocks are aligned to 64
// bytes. The elements after the first n are zero up to a whole vector and
// unspecified beyond it; kernels may compute on them.
struct RowBlockKernels {
  // block[i] = x[i]
  void (*load)(const void* x, size_t n, float* block);
  // even[i] = x[2 i], odd[i] = x[2 i + 1]
  void (*load_pairs)(const void* x, size_t n, float* even, float* odd);
  // store: out[i] = round(v[i]). mul_store: out[i] = round(g[i] * u[i]). With
  // `stream`, out must be aligned to 64 bytes, and is complete after flush().
  void (*store)(const float* v, size_t n, bool stream, void* out);
  void (*mul_store)(const float* g, const float* u, size_t n, bool stream,
                    void* out);
  void (*flush)();
};

// The kernels of the best instruction set this CPU supports. x and out are each
// f32, bf16 or f16.
RowBlockKernels GetRowBlockKernels(DType x, DType out);

}  // namespace quern

#endif  // QUERN_OPS_ROW_BLOCK_KERNELS_H_
