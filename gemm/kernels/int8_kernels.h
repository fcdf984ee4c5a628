#ifndef QUERN_GEMM_KERNELS_INT8_KERNELS_H_
#define QUERN_GEMM_KERNELS_INT8_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {

// sums[r, i] = sum over k of (a[r, k] + 128) * b[k, i], modulo 2^32. Then
//
//   dot = sums[r, i] - a_offset[r] * col_sums[i]       modulo 2^32: exact
//   c[r, i] = round(a_scale[r] * (b_scale[i] * dot) + bias[i])
//
// for r < rows, i < cols. a_offset is 128 plus the zero point of the row.
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
  TileTable table;  // a: what store_row writes; b: quads of s8; sums: i32
  // 32-bit words of a packed row for each quad of k.
  size_t row_words;
  // Writes k >= 1 elements of a row, u8, as DivCeil(k, 4) * row_words words.
  void (*store_row)(const uint8_t* q, size_t k, uint32_t* to);
  void (*finish)(const Int8FinishArgs&);
  void (*finish_f32)(const Int8FinishArgs&);  // c is f32: for an epilogue
};

// The kernels of the best instruction set that this CPU supports. c: f32, bf16
// or f16.
Int8Kernels GetInt8Kernels(DType c);
// Kernels for AVX2 with AVX-VNNI, which GetInt8Kernels returns where
// core/avx_vnni.h says so. Defined where QUERN_AVX_VNNI is 1.
Int8Kernels GetInt8AvxVnniKernels(DType c);

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_INT8_KERNELS_H_
