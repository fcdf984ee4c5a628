#ifndef QUERN_GEMM_WEIGHTS_BLOCK_PACK_KERNELS_H_
#define QUERN_GEMM_WEIGHTS_BLOCK_PACK_KERNELS_H_

// Private seam between gemm/weights/block_pack.cc (plain C++) and the SIMD
// translation unit.

#include <cstddef>
#include <cstdint>

#include "quern/quant/block_format.h"

namespace quern {

// Consecutive records of one panel.
struct BlockPackTask {
  const uint8_t* const* rows;  // where the first record of each column begins
  size_t cols;                 // columns that exist, 1 to 16
  size_t record_bytes;         // from one record of a column to the next
  size_t blocks;               // of 32 k; all records but the last have eight
  uint8_t* to;                 // the first record, aligned to 64
};

struct BlockPackKernels {
  using Pack = void (*)(const BlockPackTask& task);

  const char* target;
  Pack pack;    // cached stores
  Pack stream;  // non-temporal stores, fenced at the end of the task
};

// The kernels of the best instruction set that this CPU supports.
BlockPackKernels GetBlockPackKernels(BlockFormat format);

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_BLOCK_PACK_KERNELS_H_
