#include "quern/models/decoder/split_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

using Q4_0 = block_fields::Block<BlockFormat::kQ4_0>;
using Q8_0 = block_fields::Block<BlockFormat::kQ8_0>;
static_assert(Q4_0::kValues == SplitBlocks::kGroup &&
                  Q8_0::kValues == SplitBlocks::kGroup,
              "a block is a group");

void CopyCodes(const Q4_0& block, uint8_t* codes) {
  for (int j = 0; j < 16; ++j) {
    codes[j] = block.codes[j] & 15;
    codes[j + 16] = block.codes[j] >> 4;
  }
}
void CopyCodes(const Q8_0& block, uint8_t* codes) {
  std::memcpy(codes, block.codes, sizeof(block.codes));
}

template <class Block>
void SplitRows(const Block* blocks, int64_t n, int64_t k, SplitBlocks& to,
               Executor& executor) {
  // The scales of one group of a task's columns are a cache line.
  constexpr int64_t kTaskCols = 32;
  const int64_t groups = k / SplitBlocks::kGroup;
  executor.ParallelFor(DivCeil(n, kTaskCols), [&](int64_t task, int) {
    const int64_t first = task * kTaskCols;
    const int64_t last = std::min(n, first + kTaskCols);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t col = first; col < last; ++col) {
        const Block& block = blocks[col * groups + g];
        CopyCodes(block, to.codes.data() + col * k + g * SplitBlocks::kGroup);
        std::memcpy(to.scales.data<uint16_t>() + g * n + col, block.d,
                    sizeof(block.d));
      }
    }
  });
}

}  // namespace

absl::StatusOr<SplitBlocks> Split(BlockFormat format, const uint8_t* blocks,
                                  int64_t n, int64_t k, Executor& executor) {
  SplitBlocks split;
  QUERN_ASSIGN_OR_RETURN(split.codes, AlignedBuffer::Create(n * k));
  QUERN_ASSIGN_OR_RETURN(
      split.scales, AlignedBuffer::Create(n * (k / SplitBlocks::kGroup) * 2));
  if (format == BlockFormat::kQ4_0) {
    SplitRows(reinterpret_cast<const Q4_0*>(blocks), n, k, split, executor);
  } else {
    SplitRows(reinterpret_cast<const Q8_0*>(blocks), n, k, split, executor);
  }
  return split;
}

}  // namespace quern
