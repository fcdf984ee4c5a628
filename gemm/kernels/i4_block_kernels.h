#ifndef QUERN_GEMM_KERNELS_I4_BLOCK_KERNELS_H_
#define QUERN_GEMM_KERNELS_I4_BLOCK_KERNELS_H_

// Private seam between gemm/schedule/block_product.cc (plain C++) and the SIMD
// file: rows of int8 in blocks by weights of kI4Group, which are packed as for
// rows that are not rounded.
//
//   sums[m, n] = sum over blocks b of 32 k, in order, of
//       (scale[g, n] * ax[m, b]) * dot[m, n, b],  where b lies in group g
//
//   dot = sum over k in b of (code[k, n] - zero[g, n]) * qa[m, k]    exact
//
// Sums are the chains of gemm/kernels/block_kernels.h, whose rows these are,
// too: p = fl(scale * ax), sum = fma(p, dot, sum). Zero points are subtracted
// from codes in integers, so that they add no rounding.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/weights/block_traits.h"

namespace quern {

// Scales and zero points of one panel, from the group on in which a record
// begins: 16 of each group, those of the next group behind them. What a kernel
// reads are those of the record's groups.
struct I4Groups {
  const float* scales;
  const float* zeros;   // less 8; null: all are 8
  size_t group_blocks;  // blocks of 32 k in a group
  size_t first;         // how many of those come before the record
};

struct I4BlockKernels {
  const char* target;
  const char* arithmetic;  // "int8 dot" or "int8 pairs"
  TileSums sums;           // in all tiles of both tables
  BlockTerms terms;
  // Writes a BlockRow as BlockKernels::pack_row does, but the codes of each
  // eight k lie in the order kI4Order, which is that of the panels, and terms
  // are sums in it.
  void (*pack_row)(const void* a, size_t k, const BlockTerms& terms,
                   uint32_t* to);
  // Tiles have the arguments of those of BlockKernels; TileArgs::groups belongs
  // to the panel that a tile of `fused` reads.
  TileTable fused;
  TileTable decoded;
  // Decodes `blocks` blocks of a panel.
  void (*decode)(const uint8_t* lines, size_t blocks, const I4Groups& groups,
                 DecodedRecord* to);
};

// Chosen by whether there are zero points, without which I4Groups::zeros is not
// read, and by a: f32, bf16 or f16.
using I4BlockKernelSet = KernelSet<I4BlockKernels, bool, DType>;

// All sets, best first.
absl::Span<const I4BlockKernelSet> I4BlockKernelSets();
// The kernels of the first that runs on this CPU.
I4BlockKernels GetI4BlockKernels(bool zero_points, DType a);
// A row of the list: AVX2 with AVX-VNNI. Defined where QUERN_AVX_VNNI is 1.
I4BlockKernels GetI4BlockAvxVnniKernels(bool zero_points, DType a);

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_I4_BLOCK_KERNELS_H_
