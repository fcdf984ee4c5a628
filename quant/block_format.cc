#include "quern/quant/block_format.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

using block_fields::FirstBit;
using block_fields::FirstByte;
using block_fields::kIQ4Table;
using block_fields::kTwiceE2M1;

constexpr char kOp[] = "decode_blocks";

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float LoadF16(const uint8_t* from) { return ToF32(Load<Float16>(from)); }

int Bit(uint32_t word, int bit) { return static_cast<int>(word >> bit & 1); }
// Bits [bit, bit + 2).
int TwoBits(uint32_t word, int bit) {
  return static_cast<int>(word >> bit & 3);
}
// The lower half of a byte for an even `half`, the upper one for an odd one.
int Nibble(uint8_t byte, int half) { return byte >> 4 * (half % 2) & 15; }

// Calls value(i, code) for the 32 codes of 4 bits in 16 bytes, and writes what
// it returns.
template <typename Value>
void DecodeNibbles(const uint8_t* codes, const Value& value, float* out) {
  for (int j = 0; j < 16; ++j) {
    out[j] = value(j, Nibble(codes[j], 0));
    out[j + 16] = value(j + 16, Nibble(codes[j], 1));
  }
}

void DecodeQ4_0(const uint8_t* in, float* out) {
  const float d = LoadF16(in);
  DecodeNibbles(
      in + 2, [d](int, int q) { return d * static_cast<float>(q - 8); }, out);
}

void DecodeQ4_1(const uint8_t* in, float* out) {
  const float d = LoadF16(in), m = LoadF16(in + 2);
  DecodeNibbles(
      in + 4, [d, m](int, int q) { return d * static_cast<float>(q) + m; },
      out);
}

void DecodeQ5_0(const uint8_t* in, float* out) {
  const float d = LoadF16(in);
  const auto high = Load<uint32_t>(in + 2);
  DecodeNibbles(
      in + 6,
      [d, high](int i, int q) {
        return d * static_cast<float>(q + 16 * Bit(high, i) - 16);
      },
      out);
}

void DecodeQ5_1(const uint8_t* in, float* out) {
  const float d = LoadF16(in), m = LoadF16(in + 2);
  const auto high = Load<uint32_t>(in + 4);
  DecodeNibbles(
      in + 8,
      [d, m, high](int i, int q) {
        return d * static_cast<float>(q + 16 * Bit(high, i)) + m;
      },
      out);
}

void DecodeQ8_0(const uint8_t* in, float* out) {
  const float d = LoadF16(in);
  for (int i = 0; i < 32; ++i) {
    out[i] = d * static_cast<float>(static_cast<int8_t>(in[2 + i]));
  }
}

// 32 values: scale * table[code].
void DecodeTable(float scale, const std::array<float, 16>& table,
                 const uint8_t* codes, float* out) {
  DecodeNibbles(
      codes,
      [scale, &table](int, int q) {
        return scale * table[static_cast<size_t>(q)];
      },
      out);
}

void DecodeIQ4_NL(const uint8_t* in, float* out) {
  DecodeTable(LoadF16(in), kIQ4Table, in + 2, out);
}

void DecodeMXFP4(const uint8_t* in, float* out) {
  // 2^(e - 128), because the table has twice the values. It is subnormal for
  // e < 2.
  const uint32_t e = in[0];
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  DecodeTable(hwy::BitCastScalar<float>(bits), kTwiceE2M1, in + 1, out);
}

void DecodeQ2_K(const uint8_t* in, float* out) {
  const float d = LoadF16(in + 80), dmin = LoadF16(in + 82);
  for (int b = 0; b < 16; ++b) {
    const float scale = d * static_cast<float>(Nibble(in[b], 0));
    const float min = dmin * static_cast<float>(Nibble(in[b], 1));
    const uint8_t* codes = in + 16 + FirstByte(b);
    for (int j = 0; j < 16; ++j) {
      const int q = TwoBits(codes[j], FirstBit(b));
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void DecodeQ3_K(const uint8_t* in, float* out) {
  const uint8_t* scales = in + 96;
  const float d = LoadF16(in + 108);
  for (int b = 0; b < 16; ++b) {
    const int low = Nibble(scales[b % 8], b / 8);
    const int high = TwoBits(scales[8 + b % 4], b / 4 * 2);
    const float scale = d * static_cast<float>(low + 16 * high - 32);
    const uint8_t* codes = in + 32 + FirstByte(b);
    const uint8_t* third = in + b % 2 * 16;
    for (int j = 0; j < 16; ++j) {
      const int q =
          TwoBits(codes[j], FirstBit(b)) + 4 * Bit(third[j], b / 2) - 4;
      *out++ = scale * static_cast<float>(q);
    }
  }
}

struct ScaleAndMin {
  float scale, min;
};

// d * s[b] and dmin * t[b] of Q4_K and Q5_K, whose blocks begin alike.
ScaleAndMin ScaleAndMinOf(const uint8_t* in, int b) {
  const uint8_t* scales = in + 4;
  const int s = b < 4 ? scales[b] & 63
                      : Nibble(scales[b + 4], 0) + 16 * (scales[b - 4] >> 6);
  const int t = b < 4 ? scales[b + 4] & 63
                      : Nibble(scales[b + 4], 1) + 16 * (scales[b] >> 6);
  return {LoadF16(in) * static_cast<float>(s),
          LoadF16(in + 2) * static_cast<float>(t)};
}

void DecodeQ4_K(const uint8_t* in, float* out) {
  for (int b = 0; b < 8; ++b) {
    const auto [scale, min] = ScaleAndMinOf(in, b);
    const uint8_t* codes = in + 16 + b / 2 * 32;
    for (int j = 0; j < 32; ++j) {
      const int q = Nibble(codes[j], b);
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void DecodeQ5_K(const uint8_t* in, float* out) {
  const uint8_t* fifth = in + 16;
  for (int b = 0; b < 8; ++b) {
    const auto [scale, min] = ScaleAndMinOf(in, b);
    const uint8_t* codes = in + 48 + b / 2 * 32;
    for (int j = 0; j < 32; ++j) {
      const int q = Nibble(codes[j], b) + 16 * Bit(fifth[j], b);
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void DecodeQ6_K(const uint8_t* in, float* out) {
  const float d = LoadF16(in + 208);
  for (int b = 0; b < 16; ++b) {
    const float scale =
        d * static_cast<float>(static_cast<int8_t>(in[192 + b]));
    const uint8_t* codes = in + b / 8 * 64 + b % 4 * 16;
    const uint8_t* high = in + 128 + FirstByte(b);
    for (int j = 0; j < 16; ++j) {
      const int low = Nibble(codes[j], b / 4);
      const int q = low + 16 * TwoBits(high[j], FirstBit(b)) - 32;
      *out++ = scale * static_cast<float>(q);
    }
  }
}

void DecodeIQ4_XS(const uint8_t* in, float* out) {
  const float d = LoadF16(in);
  const auto high = Load<uint16_t>(in + 2);
  for (int b = 0; b < 8; ++b) {
    const int s = Nibble(in[4 + b / 2], b) + 16 * TwoBits(high, 2 * b) - 32;
    DecodeTable(d * static_cast<float>(s), kIQ4Table, in + 8 + 16 * b,
                out + 32 * b);
  }
}

// Decodes one block.
using BlockDecoder = void (*)(const uint8_t* in, float* out);

BlockDecoder DecoderOf(BlockFormat format) {
  switch (format) {
    case BlockFormat::kQ4_0:
      return &DecodeQ4_0;
    case BlockFormat::kQ4_1:
      return &DecodeQ4_1;
    case BlockFormat::kQ5_0:
      return &DecodeQ5_0;
    case BlockFormat::kQ5_1:
      return &DecodeQ5_1;
    case BlockFormat::kQ8_0:
      return &DecodeQ8_0;
    case BlockFormat::kQ2_K:
      return &DecodeQ2_K;
    case BlockFormat::kQ3_K:
      return &DecodeQ3_K;
    case BlockFormat::kQ4_K:
      return &DecodeQ4_K;
    case BlockFormat::kQ5_K:
      return &DecodeQ5_K;
    case BlockFormat::kQ6_K:
      return &DecodeQ6_K;
    case BlockFormat::kIQ4_NL:
      return &DecodeIQ4_NL;
    case BlockFormat::kIQ4_XS:
      return &DecodeIQ4_XS;
    case BlockFormat::kMXFP4:
      return &DecodeMXFP4;
  }
  return nullptr;
}

constexpr BlockFormatInfo kFormats[] = {
    {BlockFormat::kQ4_0, "Q4_0", 32, 18},
    {BlockFormat::kQ4_1, "Q4_1", 32, 20},
    {BlockFormat::kQ5_0, "Q5_0", 32, 22},
    {BlockFormat::kQ5_1, "Q5_1", 32, 24},
    {BlockFormat::kQ8_0, "Q8_0", 32, 34},
    {BlockFormat::kQ2_K, "Q2_K", 256, 84},
    {BlockFormat::kQ3_K, "Q3_K", 256, 110},
    {BlockFormat::kQ4_K, "Q4_K", 256, 144},
    {BlockFormat::kQ5_K, "Q5_K", 256, 176},
    {BlockFormat::kQ6_K, "Q6_K", 256, 210},
    {BlockFormat::kIQ4_NL, "IQ4_NL", 32, 18},
    {BlockFormat::kIQ4_XS, "IQ4_XS", 256, 136},
    {BlockFormat::kMXFP4, "MXFP4", 32, 17},
};

}  // namespace

absl::Span<const BlockFormatInfo> BlockFormats() { return kFormats; }

const BlockFormatInfo* FindBlockFormat(uint32_t gguf_type) {
  for (const BlockFormatInfo& info : kFormats) {
    if (static_cast<uint32_t>(info.format) == gguf_type) return &info;
  }
  return nullptr;
}

absl::Status CheckDecodeBlocks(BlockFormat format,
                               absl::Span<const uint8_t> blocks,
                               absl::Span<const float> out) {
  const BlockFormatInfo* info = FindBlockFormat(static_cast<uint32_t>(format));
  if (info == nullptr) {
    return InvalidArgument(kOp, "format=", static_cast<uint32_t>(format),
                           "; need one of BlockFormats()");
  }
  const auto values = static_cast<int64_t>(out.size());
  if (values % info->values != 0) {
    return InvalidArgument(kOp, "out has ", values,
                           " values; need a multiple of ", info->values,
                           ", the values of a block of ", info->name);
  }
  const int64_t bytes = values / info->values * info->bytes;
  if (static_cast<int64_t>(blocks.size()) == bytes) return absl::OkStatus();
  return InvalidArgument(kOp, "blocks has ", blocks.size(), " bytes; need ",
                         bytes, " for ", values, " values of ", info->name);
}

void DecodeBlocks(BlockFormat format, absl::Span<const uint8_t> blocks,
                  absl::Span<float> out) noexcept {
  QUERN_DCHECK_OK(CheckDecodeBlocks(format, blocks, out));
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  const auto values = static_cast<size_t>(info.values);
  const BlockDecoder decode = DecoderOf(format);
  const uint8_t* in = blocks.data();
  for (size_t done = 0; done < out.size(); done += values, in += info.bytes) {
    decode(in, out.data() + done);
  }
}

}  // namespace quern
