#ifndef QUERN_GEMM_KERNELS_EXACT_BLOCK_KERNELS_H_
#define QUERN_GEMM_KERNELS_EXACT_BLOCK_KERNELS_H_

// Private seam between gemm/schedule/block_product.cc (plain C++) and the SIMD
// files: rows of f32 by weights in block formats, which become f32.
//
//   w[k, n]     the f32 that quant/block_format.h says, with its one rounding
//   sums[m, n]  sum over k of a[m, k] * w[k, n]
//
// Each sum is the one that gemm/kernels/tile-inl.h makes of lines of f32: one
// chain of fused multiply-adds over the k of a record, from zero on, which is
// then added to the sum of the records before it. Its bits depend neither on
// the number of rows and panels of a tile nor on where codes were decoded.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

namespace quern {

// A record of one panel as weights: a line of f32 for each k.
struct alignas(64) ExactRecord {
  float w[BlockPanels::kRecordK][BlockPanels::kPanelCols];
};

struct ExactBlockKernels {
  const char* target;
  const char* arithmetic;  // "f32 fma"
  TileSums sums;           // in all tiles of both tables
  PackRow pack_row;        // to f32
  // Tiles of one record that decode in registers, for the first powers of two
  // of rows, which together take up to max_rows rows. No rows: there are none.
  // TileArgs::steps is in blocks of 32 k, and b the packed record of the first
  // panel. An eighth of prefetch[0] goes with each block.
  TileTable fused;
  // Tiles of gemm/kernels/linear_kernels.h for lines of f32.
  TileTable decoded;
  // Decodes a packed record of `blocks` blocks.
  void (*decode)(const uint8_t* record, size_t blocks, ExactRecord* to);
};

// Chosen by the format. GetExactBlockKernels sets `arithmetic`, pack_row and
// `decoded`.
using ExactBlockKernelSet = KernelSet<ExactBlockKernels, BlockFormat>;

// All sets, best first, for formats with blocks of 32 values and of 256.
absl::Span<const ExactBlockKernelSet> ExactBlock32KernelSets();
absl::Span<const ExactBlockKernelSet> ExactBlock256KernelSets();
// The kernels of the first that runs on this CPU.
ExactBlockKernels GetExactBlock32Kernels(BlockFormat format);
ExactBlockKernels GetExactBlock256Kernels(BlockFormat format);

// a: f32, bf16 or f16.
inline ExactBlockKernels GetExactBlockKernels(BlockFormat format, DType a) {
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  ExactBlockKernels kernels = info.values == 32
                                  ? GetExactBlock32Kernels(format)
                                  : GetExactBlock256Kernels(format);
  const LinearKernels linear = GetLinearKernelsF32(a);
  kernels.arithmetic = linear.arithmetic;
  kernels.pack_row = linear.pack_row;
  kernels.decoded = linear.table;
  return kernels;
}

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_EXACT_BLOCK_KERNELS_H_
