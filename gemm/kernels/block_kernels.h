#ifndef QUERN_GEMM_KERNELS_BLOCK_KERNELS_H_
#define QUERN_GEMM_KERNELS_BLOCK_KERNELS_H_

// Private seam between gemm/schedule/block_product.cc (plain C++) and the SIMD
// files: rows of int8 in blocks by weights in block formats
// (gemm/weights/block_traits.h).
//
//   sums[m, n] = sum over sub-blocks b, in order, of
//       (s[b, n] * ax[m, b]) * dot[m, n, b] - t[b, n] * xs[m, b]
//
//   dot = sum over k in b of (value(u[k, n]) - zero) * qa[m, k]    exact
//   xs  = fl(ax * sum over k in b of qa[m, k])
//
// Each sum is one chain over b: p = fl(s * ax), sum = fma(p, dot, sum), then
// sum = fma(-t, xs, sum) where there are minima (two roundings each where the
// CPU has no fused multiply-add). Its bits do not depend on the number of rows
// and panels of a tile, nor on where codes were decoded.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/quant/block_format.h"

namespace quern {

// Panels of one tile, at most.
inline constexpr size_t kBlockPanels = 2;

// One row by one panel, all of k.
struct PanelArgs {
  const uint32_t* a;    // what pack_row has written of each record
  size_t a_stride;      // 32-bit elements from record to record
  const uint8_t* b;     // the panel's packed records
  size_t record_bytes;  // from record to record; a multiple of a line
  size_t blocks;        // of 32 k; records of eight, the last of up to eight
  int64_t ahead_bytes;  // what is fetched lies so far behind what is read
  float* sums;          // [16], overwritten
};

struct BlockKernels {
  const char* target;
  const char* arithmetic;  // "int8 dot", "int8 pairs" or "int16 pairs"
  TileSums sums;           // in all tiles of both tables
  BlockTerms terms;
  size_t row_pitch;  // 32-bit elements of a row of one record
  // Quantises k elements of a row, a multiple of 32 and at most a record, to
  // the BlockRow or, with "int16 pairs", the WordRow at `to`.
  //
  //   ax = max(fl(max|x| / 127), 2^-125), or 1 where all x are zero
  //   qa = rint(x * fl(1 / ax))      the product not rounded before
  //
  // so |x - ax * qa| <= ax * (1/2 + 2^-16), as in quant/int8_quantize.h. A NaN
  // or an infinity gives ax = NaN and qa = 0: its row of the product is NaN.
  void (*pack_row)(const void* a, size_t k, const BlockTerms& terms,
                   uint32_t* to);
  // Tiles of one record, with TileArgs::steps in blocks of 32 k and a what
  // pack_row has written of one row after the other. `fused` has one panel,
  // whose packed record is at b; it has tiles for the first powers of two,
  // which together take up to max_rows rows: with more, decoding once for all
  // is faster. `decoded` multiplies one DecodedRecord of each panel, which
  // follow each other from b on. TileArgs::add says whether the chain of sums
  // goes on from `sums`. An eighth of prefetch[0], of as many streams as the
  // tile has panels, goes with each block. The rest of TileArgs is not read.
  TileTable fused;
  TileTable decoded;
  // The bits of `fused` with one row, one record after the other, with sums
  // that stay in registers. Null where `fused` is faster.
  void (*one_row)(const PanelArgs&);
  // Decodes a packed record of `blocks` blocks.
  void (*decode)(const uint8_t* record, size_t blocks, DecodedRecord* to);
};

// Chosen by the format and by a: f32, bf16 or f16.
using BlockKernelSet = KernelSet<BlockKernels, BlockFormat, DType>;

// All sets, best first, for formats with blocks of 32 values and of 256.
absl::Span<const BlockKernelSet> Block32KernelSets();
absl::Span<const BlockKernelSet> Block256KernelSets();
// The kernels of the first that runs on this CPU.
BlockKernels GetBlock32Kernels(BlockFormat format, DType a);
BlockKernels GetBlock256Kernels(BlockFormat format, DType a);
// A row of each list: AVX2 with AVX-VNNI. Defined where QUERN_AVX_VNNI is 1.
BlockKernels GetBlock32AvxVnniKernels(BlockFormat format, DType a);
BlockKernels GetBlock256AvxVnniKernels(BlockFormat format, DType a);

inline BlockKernels GetBlockKernels(BlockFormat format, DType a) {
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  return info.values == 32 ? GetBlock32Kernels(format, a)
                           : GetBlock256Kernels(format, a);
}

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_BLOCK_KERNELS_H_
