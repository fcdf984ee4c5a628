#ifndef QUERN_QUANT_BLOCK_QUANTIZE_H_
#define QUERN_QUANT_BLOCK_QUANTIZE_H_

// Rounds numbers to the block formats of quant/block_format.h:
//
//   QUERN_RETURN_IF_ERROR(QuantizeBlocks(BlockFormat::kQ4_K, x, blocks));
//
// DecodeBlocks(blocks) then differs from x[i] by at most half a step: |d| / 2,
// or |d * s[b]| / 2 with sub-blocks. In IQ4_NL and IQ4_XS the step is the gap
// of the table at x[i], in MXFP4 that of e2m1. Codes are the nearest ones;
// scales, but for that of TQ2_0, are the smallest for which this holds:
//
//   Q4_0, Q5_0, Q3_K, Q6_K   codes have one more negative number than positive
//                            ones, so the scale has the sign that makes it
//                            smaller; the ends may lie half a step outside
//   Q8_0                     d = largest |x| / 127
//   Q4_1, Q5_1               m = smallest x, d = (largest x - m) / (codes - 1)
//   Q2_K, Q4_K, Q5_K         dmin * t[b] = -min(smallest x of b, 0),
//                            d * s[b] = what is left / (codes - 1)
//   IQ4_NL, IQ4_XS           the ends of the table, with the better sign
//   TQ2_0                    d = largest |x|, so that ternary numbers come back
//   MXFP4                    the smallest e for which |x| <= 7 * 2^(e - 127)
//
// Numbers in f16 and sub-scales are rounded away from the nearer side, so that
// the codes still reach every x. There is no search for a smaller squared error
// and there are no weights of importance: a file of the same format from a
// program that has them is nearer to its source.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/quant/block_format.h"

namespace quern {

// Writes the blocks of x. InvalidArgument, before anything is written: sizes
// that CheckDecodeBlocks refuses; an x that is NaN or beyond the largest f16
// (65504) in magnitude. `blocks` must not overlap x. Any number of threads may
// call it.
absl::Status QuantizeBlocks(BlockFormat format, absl::Span<const float> x,
                            absl::Span<uint8_t> blocks);

}  // namespace quern

#endif  // QUERN_QUANT_BLOCK_QUANTIZE_H_
