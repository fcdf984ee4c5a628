#include "quern/gemm/block_unpack.h"

#include <cstdint>
#include <cstring>

#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

uint16_t Load16(const uint8_t* from) {
  return static_cast<uint16_t>(from[0] | from[1] << 8);
}
uint32_t Load32(const uint8_t* from) {
  return Load16(from) | static_cast<uint32_t>(Load16(from + 2)) << 16;
}
uint8_t Nibble(uint8_t byte, int64_t half) {
  return static_cast<uint8_t>(byte >> 4 * (half % 2) & 15);
}
int TwoBits(uint32_t word, int64_t bit) {
  return static_cast<int>(word >> bit & 3);
}

// 32 codes of 4 bits in 16 bytes, and 16 times the bits of `high`.
void UnpackNibbles(const uint8_t* from, uint32_t high, uint8_t* to) {
  for (int64_t i = 0; i < 32; ++i) {
    const auto fifth = static_cast<int>(high >> i & 1);
    to[i] = static_cast<uint8_t>(Nibble(from[i % 16], i / 16) | fifth << 4);
  }
}

// The formats whose blocks have 32 k.
void UnpackBlock32(BlockFormat format, const uint8_t* from, int64_t b,
                   BlockRecord* to) {
  uint8_t* codes = to->codes + 32 * b;
  constexpr uint16_t kSign = 0x8000;
  switch (format) {
    case BlockFormat::kQ4_0:
    case BlockFormat::kIQ4_NL:
      to->d[b] = Load16(from);
      return UnpackNibbles(from + 2, 0, codes);
    case BlockFormat::kQ4_1:
      to->d[b] = Load16(from);
      to->m[b] = Load16(from + 2) ^ kSign;
      return UnpackNibbles(from + 4, 0, codes);
    case BlockFormat::kQ5_0:
      to->d[b] = Load16(from);
      return UnpackNibbles(from + 6, Load32(from + 2), codes);
    case BlockFormat::kQ5_1:
      to->d[b] = Load16(from);
      to->m[b] = Load16(from + 2) ^ kSign;
      return UnpackNibbles(from + 8, Load32(from + 4), codes);
    case BlockFormat::kQ8_0:
      to->d[b] = Load16(from);
      std::memcpy(codes, from + 2, 32);
      return;
    default:  // kMXFP4
      to->s[b] = from[0];
      return UnpackNibbles(from + 1, 0, codes);
  }
}

// The two bits of value i in Q2_K and Q3_K: four values, 32 apart, share a
// byte.
int TwoBitCode(const uint8_t* codes, int64_t i) {
  return TwoBits(codes[i / 128 * 32 + i % 32], i % 128 / 32 * 2);
}

void UnpackQ2_K(const uint8_t* from, BlockRecord* to) {
  to->d[0] = Load16(from + 80);
  to->m[0] = Load16(from + 82);
  for (int64_t b = 0; b < 16; ++b) {
    to->s[b] = Nibble(from[b], 0);
    to->t[b] = Nibble(from[b], 1);
  }
  for (int64_t i = 0; i < 256; ++i) {
    to->codes[i] = static_cast<uint8_t>(TwoBitCode(from + 16, i));
  }
}

void UnpackQ3_K(const uint8_t* from, BlockRecord* to) {
  const uint8_t* scales = from + 96;
  to->d[0] = Load16(from + 108);
  for (int64_t b = 0; b < 16; ++b) {
    const int s = Nibble(scales[b % 8], b / 8) +
                  16 * TwoBits(scales[8 + b % 4], b / 4 * 2);
    to->s[b] = static_cast<uint8_t>(s - 32);
  }
  for (int64_t i = 0; i < 256; ++i) {
    const int third = from[i % 32] >> i / 32 & 1;
    to->codes[i] = static_cast<uint8_t>(TwoBitCode(from + 32, i) | third << 2);
  }
}

// The scales of Q4_K and Q5_K, and 4 bits of the codes.
void UnpackQ45_K(const uint8_t* from, const uint8_t* nibbles, BlockRecord* to) {
  const uint8_t* scales = from + 4;
  to->d[0] = Load16(from);
  to->m[0] = Load16(from + 2);
  for (int64_t b = 0; b < 4; ++b) {
    to->s[b] = scales[b] & 63;
    to->t[b] = scales[b + 4] & 63;
    to->s[b + 4] =
        static_cast<uint8_t>(Nibble(scales[b + 8], 0) | scales[b] >> 6 << 4);
    to->t[b + 4] = static_cast<uint8_t>(Nibble(scales[b + 8], 1) |
                                        scales[b + 4] >> 6 << 4);
  }
  for (int64_t i = 0; i < 256; ++i) {
    to->codes[i] = Nibble(nibbles[i / 64 * 32 + i % 32], i / 32);
  }
}

void UnpackQ5_K(const uint8_t* from, BlockRecord* to) {
  UnpackQ45_K(from, from + 48, to);
  for (int64_t i = 0; i < 256; ++i) {
    const int fifth = from[16 + i % 32] >> i / 32 & 1;
    to->codes[i] = static_cast<uint8_t>(to->codes[i] | fifth << 4);
  }
}

void UnpackQ6_K(const uint8_t* from, BlockRecord* to) {
  to->d[0] = Load16(from + 208);
  std::memcpy(to->s, from + 192, 16);
  for (int64_t i = 0; i < 256; ++i) {
    const int low = Nibble(from[i / 128 * 64 + i % 64], i % 128 / 64);
    const int high = TwoBitCode(from + 128, i);
    to->codes[i] = static_cast<uint8_t>(low | high << 4);
  }
}

void UnpackIQ4_XS(const uint8_t* from, BlockRecord* to) {
  to->d[0] = Load16(from);
  const uint32_t high = Load16(from + 2);
  for (int64_t b = 0; b < 8; ++b) {
    const int s = Nibble(from[4 + b / 2], b) + 16 * TwoBits(high, 2 * b);
    to->s[b] = static_cast<uint8_t>(s - 32);
    UnpackNibbles(from + 8 + 16 * b, 0, to->codes + 32 * b);
  }
}

}  // namespace

void UnpackRecord(BlockFormat format, const uint8_t* from, int64_t blocks,
                  BlockRecord* to) {
  switch (format) {
    case BlockFormat::kQ2_K:
      return UnpackQ2_K(from, to);
    case BlockFormat::kQ3_K:
      return UnpackQ3_K(from, to);
    case BlockFormat::kQ4_K:
      return UnpackQ45_K(from, from + 16, to);
    case BlockFormat::kQ5_K:
      return UnpackQ5_K(from, to);
    case BlockFormat::kQ6_K:
      return UnpackQ6_K(from, to);
    case BlockFormat::kIQ4_XS:
      return UnpackIQ4_XS(from, to);
    default:
      for (int64_t b = 0; b < blocks; ++b) {
        UnpackBlock32(format, from + BlockFileBytes(format, b), b, to);
      }
  }
}

}  // namespace quern
