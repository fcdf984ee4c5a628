#ifndef QUERN_GEMM_BLOCK_UNPACK_H_
#define QUERN_GEMM_BLOCK_UNPACK_H_

// Private: from the blocks of a file to what packing/block_panels.h packs.

#include <cstdint>

#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

namespace quern {

// Reads `blocks` blocks of 32 k from the first byte of the file's block that
// holds them on: a whole block of 256 k, or up to eight blocks of 32. Nothing
// is rounded: BlockTraitsOf(format) says what the fields mean.
void UnpackRecord(BlockFormat format, const uint8_t* from, int64_t blocks,
                  BlockRecord* to);

// Bytes of so many blocks of 32 k in a file.
inline int64_t BlockFileBytes(BlockFormat format, int64_t blocks) {
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  return blocks * BlockPanels::kBlockK / info.values * info.bytes;
}

}  // namespace quern

#endif  // QUERN_GEMM_BLOCK_UNPACK_H_
