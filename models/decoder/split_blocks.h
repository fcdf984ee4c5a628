#ifndef QUERN_MODELS_DECODER_SPLIT_BLOCKS_H_
#define QUERN_MODELS_DECODER_SPLIT_BLOCKS_H_

// Private: codes and scales of blocks of Q4_0 and Q8_0 (quant/block_format.h),
// apart.
//
// Rows that are not rounded multiply the codes of these two formats, and scales
// multiply sums of 32 products: WeightFormat::kI4Group and kI8Group in
// WeightLayout::kNK. As WeightFormat::kBlocks their values would become f32
// first, which rounds other sums and is slower for rows of bf16.

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/quant/block_format.h"

namespace quern {

struct SplitBlocks {
  static constexpr int64_t kGroup = 32;  // the k of one scale

  AlignedBuffer codes;   // u8[n, k], 0 to 15, of Q4_0; i8[n, k] of Q8_0
  AlignedBuffer scales;  // f16[k / kGroup, n]
};

// Takes n dense rows of blocks of k values apart. `format` is Q4_0 or Q8_0, and
// k is a multiple of kGroup. ResourceExhausted: no memory. An executor that
// skips tasks leaves their columns unspecified.
absl::StatusOr<SplitBlocks> Split(BlockFormat format, const uint8_t* blocks,
                                  int64_t n, int64_t k, Executor& executor);

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_SPLIT_BLOCKS_H_
