#ifndef QUERN_QUANT_BLOCK_FORMAT_H_
#define QUERN_QUANT_BLOCK_FORMAT_H_

// The block formats of GGUF files: weights of 2 to 8 bits, N of them in a block
// of B bytes that has its own scale.
//
//   w[i] = d * (q[i] - z)                       a scale, and a fixed zero
//   w[i] = d * q[i] + m                         a scale and a minimum
//   w[i] = (d * s[b]) * q[i] - dmin * t[b]      K: s and t of each sub-block b
//   w[i] = (d * s[b]) * table[q[i]]             IQ: codes index a table
//
// Below, i is the number of a value within its block, lo(x) is x & 15, hi(x) is
// x >> 4, and bits(x, n) is bits n and n + 1 of a byte. Fields are listed in
// the order of their bytes, without padding. f16 is IEEE binary16; f16, u16 and
// u32 are little-endian.
//
// Blocks of 32 values. n(i) is lo(codes[i]) for i < 16 and hi(codes[i - 16])
// for the others; h(i) is bit i of `high`.
//
//   Q4_0     f16 d, u8 codes[16]                    d * (n(i) - 8)
//   Q4_1     f16 d, f16 m, u8 codes[16]             d * n(i) + m
//   Q5_0     f16 d, u32 high, u8 codes[16]          d * (n(i) + 16 h(i) - 16)
//   Q5_1     f16 d, f16 m, u32 high, u8 codes[16]   d * (n(i) + 16 h(i)) + m
//   Q8_0     f16 d, s8 codes[32]                    d * codes[i]
//   IQ4_NL   f16 d, u8 codes[16]                    d * table[n(i)]
//   MXFP4    u8 e, u8 codes[16]                     2^(e - 127) * e2m1[n(i)]
//
//   table = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
//   e2m1  = 0 0.5 1 1.5 2 3 4 6, then 0 and the negatives of the others
//
// Code 8 of MXFP4 is +0, and e = 255 is 2^128, as files are written; OCP's
// microscaling formats have -0 and NaN there.
//
// Blocks of 256 values. b is i / 16 in Q2_K, Q3_K and Q6_K, and i / 32 in Q4_K,
// Q5_K and IQ4_XS.
//
//   Q2_K     u8 scales[16], u8 codes[64], f16 d, f16 dmin
//            (d * lo(scales[b])) * q - dmin * hi(scales[b])
//            q = bits(codes[32 (i / 128) + i % 32], 2 (i / 32 % 4))
//   Q3_K     u8 high[32], u8 codes[64], u8 scales[12], f16 d
//            (d * (s[b] - 32)) * (q + 4 h - 4)
//            q as in Q2_K; h = bit i / 32 of high[i % 32]
//            s[b] = (lo(scales[b]), or hi(scales[b - 8]) for b >= 8)
//                   + 16 bits(scales[8 + b % 4], 2 (b / 4))
//   Q4_K     f16 d, f16 dmin, u8 scales[12], u8 codes[128]
//            (d * s[b]) * q - dmin * t[b]
//            q = lo(codes[32 (i / 64) + i % 32]), or hi for odd b
//   Q5_K     f16 d, f16 dmin, u8 scales[12], u8 high[32], u8 codes[128]
//            (d * s[b]) * (q + 16 h) - dmin * t[b]
//            q, s and t as in Q4_K; h = bit b of high[i % 32]
//   Q6_K     u8 codes[128], u8 high[64], s8 scales[16], f16 d
//            (d * scales[b]) * (q + 16 h - 32)
//            q = lo(codes[64 (i / 128) + i % 64]), or hi for i % 128 >= 64
//            h = bits(high[32 (i / 128) + i % 32], 2 (i / 32 % 4))
//   IQ4_XS   f16 d, u16 high, u8 low[4], u8 codes[128]
//            (d * (s[b] - 32)) * table[n]
//            n = lo(codes[16 b + i % 16]), or hi for i % 32 >= 16
//            s[b] = (lo(low[b / 2]), or hi for odd b)
//                   + 16 * (bits 2b and 2b + 1 of high)
//   TQ2_0    u8 codes[64], f16 d
//            d * (q - 1), q as in Q2_K
//
// TQ2_0 is for ternary weights, whose q are 0, 1 and 2. A q of 3 is 2 d.
//
// The scales[12] of Q4_K and Q5_K hold eight s and eight t of 6 bits:
//
//   b < 4    s[b] = scales[b] & 63
//            t[b] = scales[b + 4] & 63
//   b >= 4   s[b] = lo(scales[b + 4]) + 16 (scales[b - 4] >> 6)
//            t[b] = hi(scales[b + 4]) + 16 (scales[b] >> 6)
//
// Rounding: f16 has 11 significant bits, and a sub-scale and a code of one
// format 12 at most together (IQ4_XS: 5 and 7, Q6_K: 7 and 5), so every product
// above is exact in f32, in the order of the parentheses
// (MXFP4: exact or, beyond the largest f32, infinite). The one sum or
// difference of Q4_1, Q5_1, Q2_K, Q4_K and Q5_K is rounded once, to nearest
// even; all other formats decode exactly. A fused multiply-add therefore gives
// the same bits. A scale that is infinite or NaN follows IEEE 754: infinity
// times 0 is NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quern {

// The numbers are those of the tensor types in GGUF files.
enum class BlockFormat : uint32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kTQ2_0 = 35,
  kMXFP4 = 39,
};

struct BlockFormatInfo {
  BlockFormat format;
  absl::string_view name;  // "Q4_K"
  int64_t values;          // N, values of a block: 32 or 256
  int64_t bytes;           // B, bytes of a block

  constexpr double bits_per_weight() const {
    return 8.0 * static_cast<double>(bytes) / static_cast<double>(values);
  }
};

// All formats, in the order of their numbers.
absl::Span<const BlockFormatInfo> BlockFormats();

// The format of a GGUF tensor type; null for a type that is not listed above.
const BlockFormatInfo* FindBlockFormat(uint32_t gguf_type);

// What DecodeBlocks needs: a format of BlockFormats(); out of whole blocks;
// `blocks` of exactly their bytes. InvalidArgument otherwise.
absl::Status CheckDecodeBlocks(BlockFormat format,
                               absl::Span<const uint8_t> blocks,
                               absl::Span<const float> out);

// Writes w of consecutive blocks to `out`. Sizes may be 0; `blocks` needs no
// alignment and must not overlap `out`. Allocates nothing. Any number of
// threads may call it. Results and e = 0 and 1 of MXFP4 may be subnormal, so it
// assumes that the CPU does not flush subnormal numbers to zero.
void DecodeBlocks(BlockFormat format, absl::Span<const uint8_t> blocks,
                  absl::Span<float> out) noexcept;

}  // namespace quern

#endif  // QUERN_QUANT_BLOCK_FORMAT_H_
