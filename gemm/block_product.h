#ifndef QUERN_GEMM_BLOCK_PRODUCT_H_
#define QUERN_GEMM_BLOCK_PRODUCT_H_

// Private: the product of rows that are int8 in blocks with weights in a block
// format, as gemm/block_kernels.h defines it. With few rows, codes are decoded
// in registers; with more, each record once for all of them, to scratch that
// stays in L1.

#include <cstddef>
#include <cstdint>

#include "quern/gemm/block_kernels.h"
#include "quern/gemm/block_traits.h"
#include "quern/gemm/packed_product.h"
#include "quern/gemm/tile.h"
#include "quern/gemm/tile_loop.h"
#include "quern/packing/block_panels.h"

namespace quern {

// One part of the weights and what multiplies it.
struct BlockPart {
  const BlockPanels& layout;
  const BlockKernels& kernels;
  bool fused;  // codes are decoded in registers
  const uint8_t* panels;
};

// Overwrites `sums` of the rows and panels of `range`, all k. `a` are the rows
// packed by `product`, whose chunks are records. Takes 20 KB of stack: what is
// written again and again does not lie beside what another worker writes, whose
// prefetchers would fetch it.
void MultiplyBlocks(const BlockPart& part, const PackedProduct<float>& product,
                    const uint32_t* a, const TileRange& range, float* sums,
                    int64_t stride);

}  // namespace quern

#endif  // QUERN_GEMM_BLOCK_PRODUCT_H_
