#ifndef QUERN_QUANT_BLOCK_FIELDS_H_
#define QUERN_QUANT_BLOCK_FIELDS_H_

// Private: the fields of the blocks of quant/block_format.h, for what reads,
// writes and packs them.
//
// Block<format> is one block as it lies in a file: bytes alone, so that it may
// lie at any address and has no padding. f16 and whole numbers of several bytes
// are arrays of their bytes. Fields that share bytes are found by a Place.
//
// A new format is a number of BlockFormat, a Block here that BlockFormatList
// names, a Decode (block_format.cc), a Quantize (block_quantize.cc), its traits
// (gemm/weights/block_traits.h) and its packing
// (gemm/weights/block_pack_simd.cc). Without one of the first four it does not
// compile.

#include <array>
#include <cstdint>
#include <type_traits>

#include "quern/quant/block_format.h"

namespace quern {
namespace block_fields {

inline constexpr std::array<float, 16> kIQ4Table = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice the values of e2m1.
inline constexpr std::array<float, 16> kTwiceE2M1 = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Where a number of a few bits begins: a byte of its field, and a bit there.
// The codes of a sub-block lie in consecutive bytes, at the same bit of each.
struct Place {
  int byte, bit;
};

// The lower half of a byte for an even b, the upper half for an odd one.
constexpr Place HalfByte(int byte, int b) { return {byte, b % 2 * 4}; }

// The fields of 2 bits of sub-block b of 16 values, in Q2_K, Q3_K, Q6_K and
// TQ2_0, whose sub-blocks share a scale.
constexpr Place PairsOfBits(int b) {
  return {b / 8 * 32 + b % 2 * 16, b / 2 % 4 * 2};
}

// A number of 6 bits: the lower four, or all of them, and the upper two.
struct SplitPlace {
  Place low, high;
};
// Sub-block b >= 4 of the scales[12] of Q4_K and Q5_K. Those of b < 4 are the
// six lower bits of bytes b and b + 4.
constexpr SplitPlace SixBitScale(int b) { return {{b + 4, 0}, {b - 4, 6}}; }
constexpr SplitPlace SixBitMin(int b) { return {{b + 4, 4}, {b, 6}}; }

template <BlockFormat kFormat>
struct Block;

// ---- Blocks of 32 values. `codes` of 16 bytes are the codes 0 to 15 in lower
// halves and 16 to 31 in upper ones; bit i of `high` is of value i.

template <>
struct Block<BlockFormat::kQ4_0> {
  static constexpr char kName[] = "Q4_0";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  uint8_t codes[16];
};

template <>
struct Block<BlockFormat::kQ4_1> {
  static constexpr char kName[] = "Q4_1";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  uint8_t m[2];
  uint8_t codes[16];
};

template <>
struct Block<BlockFormat::kQ5_0> {
  static constexpr char kName[] = "Q5_0";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  uint8_t high[4];
  uint8_t codes[16];
};

template <>
struct Block<BlockFormat::kQ5_1> {
  static constexpr char kName[] = "Q5_1";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  uint8_t m[2];
  uint8_t high[4];
  uint8_t codes[16];
};

template <>
struct Block<BlockFormat::kQ8_0> {
  static constexpr char kName[] = "Q8_0";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  int8_t codes[32];
};

template <>
struct Block<BlockFormat::kIQ4_NL> {
  static constexpr char kName[] = "IQ4_NL";
  static constexpr int64_t kValues = 32;
  uint8_t d[2];
  uint8_t codes[16];
};

template <>
struct Block<BlockFormat::kMXFP4> {
  static constexpr char kName[] = "MXFP4";
  static constexpr int64_t kValues = 32;
  uint8_t e;
  uint8_t codes[16];
};

// ---- Blocks of 256 values; b is the number of a sub-block.

template <>
struct Block<BlockFormat::kQ2_K> {
  static constexpr char kName[] = "Q2_K";
  static constexpr int64_t kValues = 256;
  static constexpr Place Scale(int b) { return HalfByte(b, 0); }
  static constexpr Place Min(int b) { return HalfByte(b, 1); }
  static constexpr Place Codes(int b) { return PairsOfBits(b); }
  uint8_t scales[16];  // and minima
  uint8_t codes[64];
  uint8_t d[2];
  uint8_t dmin[2];
};

template <>
struct Block<BlockFormat::kQ3_K> {
  static constexpr char kName[] = "Q3_K";
  static constexpr int64_t kValues = 256;
  static constexpr SplitPlace Scale(int b) {
    return {HalfByte(b % 8, b / 8), {8 + b % 4, b / 4 * 2}};
  }
  static constexpr Place Codes(int b) { return PairsOfBits(b); }
  static constexpr Place High(int b) { return {b % 2 * 16, b / 2}; }
  uint8_t high[32];
  uint8_t codes[64];
  uint8_t scales[12];
  uint8_t d[2];
};

template <>
struct Block<BlockFormat::kQ4_K> {
  static constexpr char kName[] = "Q4_K";
  static constexpr int64_t kValues = 256;
  static constexpr Place Codes(int b) { return HalfByte(b / 2 * 32, b); }
  uint8_t d[2];
  uint8_t dmin[2];
  uint8_t scales[12];  // and minima
  uint8_t codes[128];
};

template <>
struct Block<BlockFormat::kQ5_K> {
  static constexpr char kName[] = "Q5_K";
  static constexpr int64_t kValues = 256;
  static constexpr Place Codes(int b) { return HalfByte(b / 2 * 32, b); }
  static constexpr Place High(int b) { return {0, b}; }
  uint8_t d[2];
  uint8_t dmin[2];
  uint8_t scales[12];  // and minima
  uint8_t high[32];
  uint8_t codes[128];
};

template <>
struct Block<BlockFormat::kQ6_K> {
  static constexpr char kName[] = "Q6_K";
  static constexpr int64_t kValues = 256;
  static constexpr Place Codes(int b) {
    return HalfByte(b / 8 * 64 + b % 4 * 16, b / 4);
  }
  static constexpr Place High(int b) { return PairsOfBits(b); }
  uint8_t codes[128];
  uint8_t high[64];
  int8_t scales[16];
  uint8_t d[2];
};

template <>
struct Block<BlockFormat::kIQ4_XS> {
  static constexpr char kName[] = "IQ4_XS";
  static constexpr int64_t kValues = 256;
  static constexpr SplitPlace Scale(int b) {
    return {HalfByte(b / 2, b), {b / 4, b % 4 * 2}};
  }
  uint8_t d[2];
  uint8_t high[2];
  uint8_t low[4];
  uint8_t codes[8][16];
};

template <>
struct Block<BlockFormat::kTQ2_0> {
  static constexpr char kName[] = "TQ2_0";
  static constexpr int64_t kValues = 256;
  static constexpr Place Codes(int b) { return PairsOfBits(b); }
  uint8_t codes[64];
  uint8_t d[2];
};

// ---- All formats

template <BlockFormat... kFormats>
struct ListOfFormats {};

// In the order of their numbers.
using BlockFormatList =
    ListOfFormats<BlockFormat::kQ4_0, BlockFormat::kQ4_1, BlockFormat::kQ5_0,
                  BlockFormat::kQ5_1, BlockFormat::kQ8_0, BlockFormat::kQ2_K,
                  BlockFormat::kQ3_K, BlockFormat::kQ4_K, BlockFormat::kQ5_K,
                  BlockFormat::kQ6_K, BlockFormat::kIQ4_NL,
                  BlockFormat::kIQ4_XS, BlockFormat::kTQ2_0,
                  BlockFormat::kMXFP4>;

template <int64_t kValues, class Fn, BlockFormat kFirst, BlockFormat... kRest>
auto WithFormatOf(ListOfFormats<kFirst, kRest...> /*list*/, BlockFormat format,
                  const Fn& fn) {
  using Rest = ListOfFormats<kRest...>;
  if constexpr (kValues != 0 && Block<kFirst>::kValues != kValues) {
    return WithFormatOf<kValues>(Rest(), format, fn);
  } else {
    constexpr bool kMore =
        ((kValues == 0 || Block<kRest>::kValues == kValues) || ...);
    if constexpr (kMore) {
      if (format != kFirst) return WithFormatOf<kValues>(Rest(), format, fn);
    }
    return fn(std::integral_constant<BlockFormat, kFirst>());
  }
}
// Calls fn(std::integral_constant<BlockFormat, f>()) with the f of the list
// that is `format`, among those with blocks of kValues values, or of any for 0.
// For a format that is not there, f is the last one.
template <int64_t kValues = 0, class Fn>
auto WithBlockFormat(BlockFormat format, const Fn& fn) {
  return WithFormatOf<kValues>(BlockFormatList(), format, fn);
}

}  // namespace block_fields
}  // namespace quern

#endif  // QUERN_QUANT_BLOCK_FIELDS_H_
