#ifndef QUERN_GEMM_WEIGHTS_BLOCK_TRAITS_H_
#define QUERN_GEMM_WEIGHTS_BLOCK_TRAITS_H_

// Private: the block formats of quant/block_format.h in one shape,
//
//   w[k, n] = s[b, n] * (value(u[k, n]) - zero) - t[b, n],  b = k / sub_block,
//
// as int8 dot products want them. u is the code in the packed form
// (packing/block_panels.h); s and t are exact in f32:
//
//   scales          s                   t
//   kF16            d                   0
//   kF16AndMin      d                   m, the negative of the file's
//   kE8M0           2^(e - 128)         0
//   kBytes          d * s[b]            0        s[b] in [-128, 127]
//   kBytesAndMins   d * s[b]            m * t[b]
//   kNibbles        d * s[b]            m * t[b]
//   kRecordF16      d                   0
//
// A table gives value(u); else it is u, which the packed form holds as such, or
// of 8 bits in two's complement.

#include <array>
#include <cstddef>
#include <cstdint>

#include "quern/packing/block_panels.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"

namespace quern {

enum class BlockTable : uint8_t {
  kNone,
  kIQ4,        // of quant/block_format.h
  kTwiceE2M1,  // twice the values of e2m1, plus 12: 0 to 24
};

struct BlockTraits {
  BlockCodes codes;
  BlockTable table;
  int zero;
  int max_value;  // value(u) is in [0, max_value], or if that is 0, int8

  constexpr bool has_mins() const {
    return codes.scales == BlockScales::kF16AndMin ||
           codes.scales == BlockScales::kBytesAndMins ||
           codes.scales == BlockScales::kNibbles;
  }
  constexpr bool is_int8() const { return max_value == 0; }
};

constexpr BlockTraits BlockTraitsOf(BlockFormat format) {
  using S = BlockScales;
  using T = BlockTable;
  switch (format) {
    case BlockFormat::kQ4_0:
      return {{4, 0, 32, S::kF16}, T::kNone, 8, 15};
    case BlockFormat::kQ4_1:
      return {{4, 0, 32, S::kF16AndMin}, T::kNone, 0, 15};
    case BlockFormat::kQ5_0:
      return {{4, 1, 32, S::kF16}, T::kNone, 16, 31};
    case BlockFormat::kQ5_1:
      return {{4, 1, 32, S::kF16AndMin}, T::kNone, 0, 31};
    case BlockFormat::kQ8_0:
      return {{8, 0, 32, S::kF16}, T::kNone, 0, 0};
    case BlockFormat::kQ2_K:
      return {{2, 0, 16, S::kNibbles}, T::kNone, 0, 3};
    case BlockFormat::kQ3_K:
      return {{2, 1, 16, S::kBytes}, T::kNone, 4, 7};
    case BlockFormat::kQ4_K:
      return {{4, 0, 32, S::kBytesAndMins}, T::kNone, 0, 15};
    case BlockFormat::kQ5_K:
      return {{4, 1, 32, S::kBytesAndMins}, T::kNone, 0, 31};
    case BlockFormat::kQ6_K:
      return {{4, 2, 16, S::kBytes}, T::kNone, 32, 63};
    case BlockFormat::kIQ4_NL:
      return {{4, 0, 32, S::kF16}, T::kIQ4, 0, 0};
    case BlockFormat::kIQ4_XS:
      return {{4, 0, 32, S::kBytes}, T::kIQ4, 0, 0};
    case BlockFormat::kTQ2_0:
      return {{2, 0, 32, S::kRecordF16}, T::kNone, 1, 3};
    case BlockFormat::kMXFP4:
      break;
  }
  return {{4, 0, 32, S::kE8M0}, T::kTwiceE2M1, 12, 24};
}

// The tables of quant/block_fields.h plus a number, as bytes.
struct alignas(16) TableBytes {
  constexpr TableBytes(const std::array<float, 16>& table, int plus) : bytes() {
    for (size_t i = 0; i < 16; ++i) {
      bytes[i] = static_cast<uint8_t>(static_cast<int>(table[i]) + plus);
    }
  }
  uint8_t bytes[16];
};
inline constexpr TableBytes kIQ4Bytes(block_fields::kIQ4Table, 0);
inline constexpr TableBytes kE2M1Bytes(block_fields::kTwiceE2M1, 12);

// The sums of a row's codes that a format needs: of each sub-block, times the
// zero point in integers or times the scale of the row's block in f32.
struct BlockTerms {
  int sub_block;
  int zero;   // 0: none are needed for it
  bool mins;  // then zero is 0
};

// A row of int8 codes in blocks, as tiles read it: 256 k.
struct BlockRow {
  int8_t codes[BlockPanels::kRecordK];
  float scales[BlockPanels::kRecordBlocks];
  // For each sub-block: -zero times the sum of its codes, as one i32 or as two
  // i16 (kernels know), or the f32 fl(scale * sum of codes); or nothing.
  uint32_t terms[BlockPanels::kRecordK / 16];
};
static_assert(sizeof(BlockRow) == 352, "has no padding");

// Such a row with codes of 16 bits, for kernels that multiply those. Codes k to
// k + 3 of each four lie in the order k, k + 2, k + 1, k + 3.
struct WordRow {
  int16_t codes[BlockPanels::kRecordK];
  float scales[BlockPanels::kRecordBlocks];
};
static_assert(sizeof(WordRow) == 544, "has no padding");

// What one column of one record is multiplied from: decoded, by sub-block.
struct alignas(64) DecodedRecord {
  // One of each quad of bytes, or two of words.
  uint8_t lines[BlockPanels::kRecordK / 2][BlockPanels::kLineBytes];
  float s[BlockPanels::kRecordK / 16][BlockPanels::kPanelCols];
  float t[BlockPanels::kRecordK / 16][BlockPanels::kPanelCols];
};
static_assert(sizeof(DecodedRecord) % BlockPanels::kLineBytes == 0,
              "a record ends where a line does");

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_BLOCK_TRAITS_H_
