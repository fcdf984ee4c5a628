#ifndef QUERN_GEMM_KERNELS_INT8_KERNELS_H_
#define QUERN_GEMM_KERNELS_INT8_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {

// sums[r, i] = sum over k of (a[r, k] + shift) * b[k, i], modulo 2^32. Then
//
//   dot = sums[r, i] - a_offset[r] * col_sums[i]       modulo 2^32: exact
//   c[r, i] = round(a_scale[r] * (b_scale[i] * dot) + bias[i])
//
// for r < rows, i < cols. a_offset is shift, 128 or 0, plus the zero point of
// the row.
struct Int8FinishArgs {
  const int32_t* sums;
  size_t sums_stride;
  const int32_t* col_sums;
  const float* b_scale;
  const float* bias;  // or null
  const float* a_scale;
  const int32_t* a_offset;
  size_t rows;
  size_t cols;
  void* c;
  ptrdiff_t c_row_bytes;
};

struct Int8Kernels {
  const char* target;
  const char* arithmetic;
  TileSums sums;    // kExact
  TileTable table;  // a: what store_row writes; b: quads of s8; sums: i32
  // 32-bit words of a packed row for each quad of k.
  size_t row_words;
  // 128: rows are a + 128, u8. 0: rows are a itself, s8.
  uint8_t row_shift;
  // Writes k >= 1 elements of a row as DivCeil(k, 4) * row_words words.
  void (*store_row)(const uint8_t* q, size_t k, uint32_t* to);
  void (*finish)(const Int8FinishArgs&);
  void (*finish_f32)(const Int8FinishArgs&);  // c is f32: for an epilogue
};

// Chosen by c: f32, bf16 or f16.
using Int8KernelSet = KernelSet<Int8Kernels, DType>;

// All sets, best first.
absl::Span<const Int8KernelSet> Int8KernelSets();
// The kernels of the first that runs on this CPU.
Int8Kernels GetInt8Kernels(DType c);
// Rows of the list: AVX2 with AVX-VNNI, and with AVX-VNNI-INT8. Defined where
// QUERN_AVX_VNNI is 1.
Int8Kernels GetInt8AvxVnniKernels(DType c);
Int8Kernels GetInt8AvxVnniInt8Kernels(DType c);

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_INT8_KERNELS_H_
