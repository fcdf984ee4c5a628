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

using block_fields::Block;
using block_fields::BlockFormatList;
using block_fields::kIQ4Table;
using block_fields::kTwiceE2M1;
using block_fields::ListOfFormats;
using block_fields::Place;
using block_fields::SplitPlace;
using F = BlockFormat;

constexpr char kOp[] = "decode_blocks";

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float LoadF16(const uint8_t* from) { return ToF32(Load<Float16>(from)); }

// Bits [bit, bit + count) of a word.
int Bits(uint32_t word, int bit, int count) {
  return static_cast<int>(word >> bit & ((1u << count) - 1));
}
int Bits(const uint8_t* field, Place place, int count) {
  return Bits(field[place.byte], place.bit, count);
}
// A number whose two parts lie in two fields.
int SixBits(const uint8_t* low, const uint8_t* high, SplitPlace place) {
  return Bits(low, place.low, 4) + 16 * Bits(high, place.high, 2);
}

// Calls value(i, code) for the 32 codes of 4 bits in 16 bytes, and writes what
// it returns.
template <typename Value>
void DecodeNibbles(const uint8_t* codes, const Value& value, float* out) {
  for (int j = 0; j < 16; ++j) {
    out[j] = value(j, codes[j] & 15);
    out[j + 16] = value(j + 16, codes[j] >> 4);
  }
}

void Decode(const Block<F::kQ4_0>& in, float* out) {
  const float d = LoadF16(in.d);
  DecodeNibbles(
      in.codes, [d](int, int q) { return d * static_cast<float>(q - 8); }, out);
}

void Decode(const Block<F::kQ4_1>& in, float* out) {
  const float d = LoadF16(in.d), m = LoadF16(in.m);
  DecodeNibbles(
      in.codes, [d, m](int, int q) { return d * static_cast<float>(q) + m; },
      out);
}

void Decode(const Block<F::kQ5_0>& in, float* out) {
  const float d = LoadF16(in.d);
  const auto high = Load<uint32_t>(in.high);
  DecodeNibbles(
      in.codes,
      [d, high](int i, int q) {
        return d * static_cast<float>(q + 16 * Bits(high, i, 1) - 16);
      },
      out);
}

void Decode(const Block<F::kQ5_1>& in, float* out) {
  const float d = LoadF16(in.d), m = LoadF16(in.m);
  const auto high = Load<uint32_t>(in.high);
  DecodeNibbles(
      in.codes,
      [d, m, high](int i, int q) {
        return d * static_cast<float>(q + 16 * Bits(high, i, 1)) + m;
      },
      out);
}

void Decode(const Block<F::kQ8_0>& in, float* out) {
  const float d = LoadF16(in.d);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(in.codes[i]);
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

void Decode(const Block<F::kIQ4_NL>& in, float* out) {
  DecodeTable(LoadF16(in.d), kIQ4Table, in.codes, out);
}

void Decode(const Block<F::kMXFP4>& in, float* out) {
  // 2^(e - 128), because the table has twice the values. It is subnormal for
  // e < 2.
  const uint32_t e = in.e;
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  DecodeTable(hwy::BitCastScalar<float>(bits), kTwiceE2M1, in.codes, out);
}

void Decode(const Block<F::kQ2_K>& in, float* out) {
  const float d = LoadF16(in.d), dmin = LoadF16(in.dmin);
  for (int b = 0; b < 16; ++b) {
    const float scale = d * static_cast<float>(Bits(in.scales, in.Scale(b), 4));
    const float min = dmin * static_cast<float>(Bits(in.scales, in.Min(b), 4));
    const auto [byte, bit] = in.Codes(b);
    for (int j = 0; j < 16; ++j) {
      const int q = Bits(in.codes[byte + j], bit, 2);
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void Decode(const Block<F::kQ3_K>& in, float* out) {
  const float d = LoadF16(in.d);
  for (int b = 0; b < 16; ++b) {
    const int s = SixBits(in.scales, in.scales, in.Scale(b)) - 32;
    const float scale = d * static_cast<float>(s);
    const auto [byte, bit] = in.Codes(b);
    const auto [high, third] = in.High(b);
    for (int j = 0; j < 16; ++j) {
      const int q = Bits(in.codes[byte + j], bit, 2) +
                    4 * Bits(in.high[high + j], third, 1) - 4;
      *out++ = scale * static_cast<float>(q);
    }
  }
}

struct ScaleAndMin {
  float scale, min;
};

// d * s[b] and dmin * t[b] of Q4_K and Q5_K.
template <class B>
ScaleAndMin ScaleAndMinOf(const B& in, int b) {
  const uint8_t* scales = in.scales;
  int s = scales[b % 4] & 63, t = scales[b % 4 + 4] & 63;
  if (b >= 4) {
    s = SixBits(scales, scales, block_fields::SixBitScale(b));
    t = SixBits(scales, scales, block_fields::SixBitMin(b));
  }
  return {LoadF16(in.d) * static_cast<float>(s),
          LoadF16(in.dmin) * static_cast<float>(t)};
}

void Decode(const Block<F::kQ4_K>& in, float* out) {
  for (int b = 0; b < 8; ++b) {
    const auto [scale, min] = ScaleAndMinOf(in, b);
    const auto [byte, bit] = in.Codes(b);
    for (int j = 0; j < 32; ++j) {
      const int q = Bits(in.codes[byte + j], bit, 4);
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void Decode(const Block<F::kQ5_K>& in, float* out) {
  for (int b = 0; b < 8; ++b) {
    const auto [scale, min] = ScaleAndMinOf(in, b);
    const auto [byte, bit] = in.Codes(b);
    const auto [high, fifth] = in.High(b);
    for (int j = 0; j < 32; ++j) {
      const int q = Bits(in.codes[byte + j], bit, 4) +
                    16 * Bits(in.high[high + j], fifth, 1);
      *out++ = scale * static_cast<float>(q) - min;
    }
  }
}

void Decode(const Block<F::kQ6_K>& in, float* out) {
  const float d = LoadF16(in.d);
  for (int b = 0; b < 16; ++b) {
    const float scale = d * static_cast<float>(in.scales[b]);
    const auto [byte, bit] = in.Codes(b);
    const auto [high, pair] = in.High(b);
    for (int j = 0; j < 16; ++j) {
      const int q = Bits(in.codes[byte + j], bit, 4) +
                    16 * Bits(in.high[high + j], pair, 2) - 32;
      out[16 * b + j] = scale * static_cast<float>(q);
    }
  }
}

void Decode(const Block<F::kIQ4_XS>& in, float* out) {
  const float d = LoadF16(in.d);
  for (int b = 0; b < 8; ++b) {
    const int s = SixBits(in.low, in.high, in.Scale(b)) - 32;
    DecodeTable(d * static_cast<float>(s), kIQ4Table, in.codes[b],
                out + 32 * b);
  }
}

void Decode(const Block<F::kTQ2_0>& in, float* out) {
  const float d = LoadF16(in.d);
  for (int b = 0; b < 16; ++b) {
    const auto [byte, bit] = in.Codes(b);
    for (int j = 0; j < 16; ++j) {
      *out++ = d * static_cast<float>(Bits(in.codes[byte + j], bit, 2) - 1);
    }
  }
}

// Decodes consecutive blocks into n values.
template <F kFormat>
void DecodeAll(const uint8_t* in, size_t n, float* out) {
  using B = Block<kFormat>;
  const auto* blocks = reinterpret_cast<const B*>(in);
  constexpr auto kValues = static_cast<size_t>(B::kValues);
  for (size_t i = 0; i < n / kValues; ++i) {
    Decode(blocks[i], out + i * kValues);
  }
}

template <F... kFormat>
constexpr std::array<BlockFormatInfo, sizeof...(kFormat)> InfosOf(
    ListOfFormats<kFormat...> /*list*/) {
  return {{{kFormat, Block<kFormat>::kName, Block<kFormat>::kValues,
            static_cast<int64_t>(sizeof(Block<kFormat>))}...}};
}
constexpr auto kFormats = InfosOf(BlockFormatList());

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
  block_fields::WithBlockFormat(format, [&](auto f) {
    DecodeAll<decltype(f)::value>(blocks.data(), out.size(), out.data());
  });
}

}  // namespace quern
