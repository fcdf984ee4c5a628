#ifndef QUERN_GEMM_BLOCK_LINEAR_KERNELS_H_
#define QUERN_GEMM_BLOCK_LINEAR_KERNELS_H_

// Private seam between gemm/block_linear.cc (plain C++) and the SIMD file.

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "gemm/tile.h"

namespace quern {

// What a code means.
enum class BlockCodes : uint8_t {
  kE4M3,  // fp8 e4m3fn
  kI8,    // -128 .. 127
  kI4,    // q - 8, q = 0 .. 15
};

constexpr int64_t BitsOf(BlockCodes codes) {
  return codes == BlockCodes::kI4 ? 4 : 8;
}
// The byte of codes that mean zero.
constexpr uint8_t ZeroByte(BlockCodes codes) {
  return codes == BlockCodes::kI4 ? 0x88 : 0;
}

// to[r, p, c] (+)= scales[p, c] * (sums[r, p, c] - zeros[p, c] * row_sums[r])
// for r < rows, p < panels, c < 16.
struct ScaleArgs {
  const float* sums;  // dense
  size_t rows;
  size_t panels;
  const float* scales;
  const float* zeros;   // or null
  size_t panel_stride;  // of scales and zeros
  const float* row_sums;
  size_t row_sums_stride;
  float* to;
  size_t to_stride;
  bool add;  // to what `to` holds; else it is overwritten
};

struct BlockKernels {
  const char* target;
  // `lines` of packing/code_layout.h to 2 (8 bits) or 4 times as many lines of
  // pairs of bf16.
  void (*decode)(const uint8_t* codes, size_t lines, uint8_t* to);
  // Tiles that decode in registers, for up to fused.max_rows rows of packed
  // bf16: TileArgs::b and steps are of codes. None, max_rows = 0, where there
  // is no bf16 dot product.
  TileTable fused;
  void (*scale)(const ScaleArgs&);
  // The sum of a[k], in one order for all.
  float (*sum)(const void* a, size_t k);
};

// Of the best instruction set that this CPU supports. a: f32, bf16 or f16.
BlockKernels GetBlockKernels(BlockCodes codes, DType a);

}  // namespace quern

#endif  // QUERN_GEMM_BLOCK_LINEAR_KERNELS_H_
