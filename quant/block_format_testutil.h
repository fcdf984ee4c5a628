#ifndef QUERN_QUANT_BLOCK_FORMAT_TESTUTIL_H_
#define QUERN_QUANT_BLOCK_FORMAT_TESTUTIL_H_

// An oracle of quant/block_format.h, in double, and random blocks. The oracle
// reads every field by the number of its first bit within the block, and
// computes each value alone.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// A block as a row of bits. Bit 0 is the lowest of the first byte.
class BlockBits {
 public:
  explicit BlockBits(const uint8_t* block) : block_(block) {}

  // The number in bits [first, first + count), the lowest bit first.
  int64_t Number(int64_t first, int64_t count) const {
    int64_t number = 0;
    for (int64_t bit = first + count; bit-- > first;) {
      number = 2 * number + block_[bit / 8] / (1 << bit % 8) % 2;
    }
    return number;
  }
  // A number of 8 bits in two's complement.
  int64_t Signed(int64_t first) const {
    return Number(first, 7) - 128 * Number(first + 7, 1);
  }
  double Half(int64_t first) const {
    return Decode(FormatOf<Float16>(),
                  static_cast<uint32_t>(Number(first, 16)));
  }

  // The code of 4 bits of value i. Each `run` values share run / 2 bytes from
  // bit `base` on: the first half of them has the lower halves of the bytes.
  int64_t Four(int64_t base, int64_t run, int64_t i) const {
    const int64_t byte = i / run * (run / 2) + i % (run / 2);
    return Number(base + 8 * byte + 4 * (i % run / (run / 2)), 4);
  }
  // The code of 2 bits of value i: four values, 32 apart, share a byte.
  int64_t Two(int64_t base, int64_t i) const {
    return Number(base + 8 * (i / 128 * 32 + i % 32) + i % 128 / 32 * 2, 2);
  }
  // The bit of value i: eight values, 32 apart, share a byte.
  int64_t One(int64_t base, int64_t i) const {
    return Number(base + 8 * (i % 32) + i / 32, 1);
  }

 private:
  const uint8_t* block_;
};

struct ReferenceBlockValue {
  int64_t code;        // all bits of the value's code
  int64_t scale, min;  // all bits of those of its sub-block
  double step;         // d, or d * s: what the code multiplies
  double value;        // before it is rounded to f32
};

inline double Times(double d, int64_t q) { return d * static_cast<double>(q); }

inline double ReferenceIQ4(int64_t code) {
  static constexpr int kTable[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
  return kTable[code];
}

// Sign, two bits of exponent, one of mantissa; a bias of 1, and no negative
// zero.
inline double ReferenceE2M1(int64_t code) {
  const int64_t exponent = code / 2 % 4, mantissa = code % 2;
  const double magnitude =
      exponent == 0 ? 0.5 * static_cast<double>(mantissa)
                    : std::ldexp(1 + 0.5 * static_cast<double>(mantissa),
                                 static_cast<int>(exponent - 1));
  return code > 8 ? -magnitude : magnitude;
}

// The scale and the minimum of sub-block b in Q4_K and Q5_K, both of 6 bits.
struct ReferenceSixBits {
  int64_t scale, min;
};
inline ReferenceSixBits ReferenceScales(const BlockBits& bits, int64_t b) {
  constexpr int64_t kScales = 32, kMins = 64, kLow = 96;  // bits
  if (b < 4) {
    return {bits.Number(kScales + 8 * b, 6), bits.Number(kMins + 8 * b, 6)};
  }
  const int64_t at = 8 * (b - 4);
  return {bits.Number(kLow + at, 4) + 16 * bits.Number(kScales + at + 6, 2),
          bits.Number(kLow + at + 4, 4) + 16 * bits.Number(kMins + at + 6, 2)};
}

inline ReferenceBlockValue ReferenceValueOf32(BlockFormat format,
                                              const BlockBits& bits,
                                              int64_t i) {
  const double d = bits.Half(0);
  switch (format) {
    case BlockFormat::kQ4_0: {
      const int64_t q = bits.Four(16, 32, i);
      return {q, 0, 0, d, Times(d, q - 8)};
    }
    case BlockFormat::kQ4_1: {
      const int64_t q = bits.Four(32, 32, i);
      return {q, 0, 0, d, Times(d, q) + bits.Half(16)};
    }
    case BlockFormat::kQ5_0: {
      const int64_t q = bits.Four(48, 32, i) + 16 * bits.Number(16 + i, 1);
      return {q, 0, 0, d, Times(d, q - 16)};
    }
    case BlockFormat::kQ5_1: {
      const int64_t q = bits.Four(64, 32, i) + 16 * bits.Number(32 + i, 1);
      return {q, 0, 0, d, Times(d, q) + bits.Half(16)};
    }
    case BlockFormat::kQ8_0: {
      const int64_t q = bits.Signed(16 + 8 * i);
      return {q + 128, 0, 0, d, Times(d, q)};
    }
    case BlockFormat::kIQ4_NL: {
      const int64_t q = bits.Four(16, 32, i);
      return {q, 0, 0, d, d * ReferenceIQ4(q)};
    }
    default: {  // kMXFP4
      const int64_t q = bits.Four(8, 32, i), e = bits.Number(0, 8);
      const double power = std::ldexp(1.0, static_cast<int>(e) - 127);
      return {q, e, 0, power, power * ReferenceE2M1(q)};
    }
  }
}

// Value i of a block.
inline ReferenceBlockValue ReferenceValue(BlockFormat format,
                                          const uint8_t* block, int64_t i) {
  const BlockBits bits(block);
  switch (format) {
    case BlockFormat::kQ2_K: {
      const int64_t q = bits.Two(128, i), b = i / 16;
      const int64_t s = bits.Number(8 * b, 4), t = bits.Number(8 * b + 4, 4);
      const double step = Times(bits.Half(640), s);
      return {q, s, t, step, Times(step, q) - Times(bits.Half(656), t)};
    }
    case BlockFormat::kQ3_K: {
      const int64_t b = i / 16;
      const int64_t q = bits.Two(256, i) + 4 * bits.One(0, i);
      const int64_t s = bits.Number(768 + 8 * (b % 8) + 4 * (b / 8), 4) +
                        16 * bits.Number(832 + 8 * (b % 4) + 2 * (b / 4), 2);
      const double step = Times(bits.Half(864), s - 32);
      return {q, s, 0, step, Times(step, q - 4)};
    }
    case BlockFormat::kQ4_K:
    case BlockFormat::kQ5_K: {
      const auto [s, t] = ReferenceScales(bits, i / 32);
      const int64_t q = format == BlockFormat::kQ4_K
                            ? bits.Four(128, 64, i)
                            : bits.Four(384, 64, i) + 16 * bits.One(128, i);
      const double step = Times(bits.Half(0), s);
      return {q, s, t, step, Times(step, q) - Times(bits.Half(16), t)};
    }
    case BlockFormat::kQ6_K: {
      const int64_t q = bits.Four(0, 128, i) + 16 * bits.Two(1024, i);
      const int64_t s = bits.Signed(1536 + 8 * (i / 16));
      const double step = Times(bits.Half(1664), s);
      return {q, s + 128, 0, step, Times(step, q - 32)};
    }
    case BlockFormat::kIQ4_XS: {
      const int64_t q = bits.Four(64, 32, i), b = i / 32;
      const int64_t s =
          bits.Number(32 + 4 * b, 4) + 16 * bits.Number(16 + 2 * b, 2);
      const double step = Times(bits.Half(0), s - 32);
      return {q, s, 0, step, step * ReferenceIQ4(q)};
    }
    case BlockFormat::kTQ2_0: {
      const int64_t q = bits.Two(0, i);
      const double d = bits.Half(512);
      return {q, 0, 0, d, Times(d, q - 1)};
    }
    default:
      return ReferenceValueOf32(format, bits, i);
  }
}

// A number of f16 in a block: its first byte, and what it is in blocks whose
// values lie within [-1, 1] and have a mean of about 0.
struct BlockHalf {
  size_t byte;
  double unit;
};
inline std::vector<BlockHalf> HalvesOf(BlockFormat format) {
  switch (format) {
    case BlockFormat::kQ4_0:
      return {{0, 1 / 8.0}};
    case BlockFormat::kQ4_1:
      return {{0, 2 / 15.0}, {2, -1}};
    case BlockFormat::kQ5_0:
      return {{0, 1 / 16.0}};
    case BlockFormat::kQ5_1:
      return {{0, 2 / 31.0}, {2, -1}};
    case BlockFormat::kQ8_0:
      return {{0, 1 / 128.0}};
    case BlockFormat::kQ2_K:
      return {{80, 2 / (15 * 3.0)}, {82, 1 / 15.0}};
    case BlockFormat::kQ3_K:
      return {{108, 1 / (32 * 4.0)}};
    case BlockFormat::kQ4_K:
      return {{0, 2 / (63 * 15.0)}, {2, 1 / 63.0}};
    case BlockFormat::kQ5_K:
      return {{0, 2 / (63 * 31.0)}, {2, 1 / 63.0}};
    case BlockFormat::kQ6_K:
      return {{208, 1 / (128 * 32.0)}};
    case BlockFormat::kIQ4_NL:
      return {{0, 1 / 127.0}};
    case BlockFormat::kIQ4_XS:
      return {{0, 1 / (32 * 127.0)}};
    case BlockFormat::kTQ2_0:
      return {{64, 1 / 2.0}};
    case BlockFormat::kMXFP4:
      break;
  }
  return {};
}

inline void PutHalf(Float16 value, size_t byte, uint8_t* block) {
  const uint32_t bits = BitsOf(value);
  block[byte] = static_cast<uint8_t>(bits);
  block[byte + 1] = static_cast<uint8_t>(bits >> 8);
}

// `count` random blocks, whose values lie in about [-reach, reach]. Each block
// has scales of its own, so that a kernel that takes another's is caught.
inline std::vector<uint8_t> RandomBlocks(Rng& rng, BlockFormat format,
                                         int64_t count, double reach) {
  const int64_t bytes = FindBlockFormat(static_cast<uint32_t>(format))->bytes;
  std::vector<uint8_t> blocks(static_cast<size_t>(count * bytes));
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(rng.Next());
  for (int64_t n = 0; n < count; ++n) {
    uint8_t* block = blocks.data() + n * bytes;
    for (const BlockHalf& half : HalvesOf(format)) {
      const double part = static_cast<double>(rng.Next() % 49 + 16) / 64;
      PutHalf(FromDouble<Float16>(half.unit * reach * part), half.byte, block);
    }
    // The largest value is 6 * 2^(e - 127).
    if (format == BlockFormat::kMXFP4) {
      const int less = static_cast<int>(rng.Next() % 3);
      block[0] = static_cast<uint8_t>(127 + std::ilogb(reach / 6) - less);
    }
  }
  return blocks;
}

}  // namespace quern

#endif  // QUERN_QUANT_BLOCK_FORMAT_TESTUTIL_H_
