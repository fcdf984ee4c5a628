#ifndef QUERN_GEMM_LINEAR_KERNELS_H_
#define QUERN_GEMM_LINEAR_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation units.

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "gemm/tile.h"

namespace quern {

// Rows of a, for one chunk of k, to the form that tiles read: 32-bit elements,
// either pairs of bf16 or f32.
struct PackRowsArgs {
  const void* a;        // row 0
  ptrdiff_t row_bytes;  // from row to row
  size_t rows;
  size_t k;         // elements of each row that exist
  size_t elements;  // 32-bit elements to write; zeros for what is beyond k
  uint32_t* to;
  size_t to_pitch;  // 32-bit elements from row to row
};

// c[r, i] = round(epilogue(sums[r, i] + bias[i])), r < rows, i < cols.
struct FinishArgs {
  const float* sums;
  size_t sums_stride;
  const float* bias;  // or null
  size_t rows;
  size_t cols;
  void* c;
  ptrdiff_t c_row_bytes;
};

struct LinearKernels {
  const char* target;
  const char* arithmetic;  // "bf16 dot" or "f32 fma"
  // 32-bit elements of packed a that one line of b meets: 2 where pairs are
  // multiplied as f32, else 1.
  size_t elements_per_line;
  TileTable table;
  void (*pack_rows)(const PackRowsArgs&);
  void (*finish)(const FinishArgs&);
};

// The kernels of the best instruction set that this CPU supports. a and c: f32,
// bf16 or f16.
LinearKernels GetLinearKernelsBF16(DType a, DType c);
LinearKernels GetLinearKernelsF16(DType a, DType c);
LinearKernels GetLinearKernelsF32(DType a, DType c);

// The parts that do not depend on the weights: pack_rows to pairs of bf16 (a is
// bf16) or to f32, and finish.
using PackRows = void (*)(const PackRowsArgs&);
using Finish = void (*)(const FinishArgs&);
PackRows GetPackPairs();
PackRows GetPackF32(DType a);
Finish GetFinish(DType c);

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_KERNELS_H_
