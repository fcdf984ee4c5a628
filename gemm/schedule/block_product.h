#ifndef QUERN_GEMM_SCHEDULE_BLOCK_PRODUCT_H_
#define QUERN_GEMM_SCHEDULE_BLOCK_PRODUCT_H_

// Private: the product of rows with weights in a block format, as
// gemm/kernels/block_kernels.h defines it for rows that are int8 in blocks, and
// gemm/kernels/exact_block_kernels.h for rows of f32; and with weights of
// kI4Group, as gemm/kernels/i4_block_kernels.h does for rows that are int8 in
// blocks. With few rows, codes are decoded in registers; with more, each record
// once for all of them, to scratch that stays in L1 or L2.

#include <cstddef>
#include <cstdint>

#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/i4_block_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"

namespace quern {

// How the kinds of kernels differ.
template <class Kernels>
struct BlockKind;
template <>
struct BlockKind<BlockKernels> {
  using Decoded = DecodedRecord;
  // 32-bit elements from a row of a to the next, within one record.
  static int64_t RowPitch(const BlockKernels& kernels) {
    return static_cast<int64_t>(kernels.row_pitch);
  }
  // TileArgs::steps of a block of 32 k in the decoded tiles.
  static constexpr int64_t kBlockSteps = 1;
};
template <>
struct BlockKind<I4BlockKernels> {
  using Decoded = DecodedRecord;
  static int64_t RowPitch(const I4BlockKernels& /*kernels*/) {
    return static_cast<int64_t>(sizeof(BlockRow) / sizeof(uint32_t));
  }
  static constexpr int64_t kBlockSteps = 1;
};
template <>
struct BlockKind<ExactBlockKernels> {
  using Decoded = ExactRecord;
  static int64_t RowPitch(const ExactBlockKernels& /*kernels*/) {
    return static_cast<int64_t>(PackedRowPitch(1));
  }
  static constexpr int64_t kBlockSteps = BlockPanels::kBlockK;
};

// Scales and zero points of weights whose panels have none: those of a panel,
// 16 of each group, lie behind those of the panel before.
struct PanelGroups {
  const float* scales;
  const float* zeros;    // less 8; or null
  int64_t groups;        // of a panel
  int64_t group_blocks;  // blocks of 32 k in a group
};

// One part of the weights and what multiplies it: BlockKernels, I4BlockKernels
// or ExactBlockKernels.
template <class Kernels>
struct BlockPart {
  const BlockPanels& layout;
  const Kernels& kernels;
  bool fused;  // codes are decoded in registers
  const uint8_t* panels;
  PanelGroups groups;   // only I4BlockKernels have any
  int64_t ahead_bytes;  // FusedAheadBytes of prefetch_policy.h
};

// Overwrites `sums` of the rows and panels of `range`, all k. `a` are the rows
// packed by `product`, whose chunks are records. Takes 24 KB of stack, or 40 KB
// with ExactBlockKernels: what is written again and again does not lie beside
// what another worker writes, whose prefetchers would fetch it.
template <class Kernels>
void MultiplyBlocks(const BlockPart<Kernels>& part,
                    const PackedProduct<float>& product, const uint32_t* a,
                    const TileRange& range, float* sums, int64_t stride);

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_BLOCK_PRODUCT_H_
