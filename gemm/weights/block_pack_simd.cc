// Packs rows of GGUF blocks (quant/block_format.h) into records
// (packing/block_panels.h).
//
// A record is read in strips: 16 bytes of each of 16 columns, whose transpose
// is four lines. Dword c of a line then belongs to column c, as in the packed
// form, so the rest is arithmetic between whole lines: it moves bits from line
// to line, and never from column to column.

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"  // FlushStream
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3.h"
#include "quern/core/stores.h"
#include "quern/gemm/weights/block_pack_kernels.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/weights/block_pack_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/packing/transpose-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// ---- Strips

constexpr size_t kStrip = 16;  // bytes of a column

// Writes the strip of the bytes from `at` on to four lines.
template <Stores kStores>
HWY_INLINE void PutStrip(const uint8_t* const* HWY_RESTRICT rows, size_t at,
                         uint8_t* HWY_RESTRICT to) {
  for (size_t c = 0; c < kCols; c += kLanes) {
    const Quad strip = LoadStrip(rows + c, at);
    Put<kStores>(strip.l0, to + 4 * c);
    Put<kStores>(strip.l1, to + kLine + 4 * c);
    Put<kStores>(strip.l2, to + 2 * kLine + 4 * c);
    Put<kStores>(strip.l3, to + 3 * kLine + 4 * c);
  }
}

// kCount strips in L1.
template <size_t kCount>
struct Strips {
  HWY_INLINE Strips(const uint8_t* const* HWY_RESTRICT rows, size_t at) {
    for (size_t i = 0; i < kCount; ++i) {
      PutStrip<Stores::kCached>(rows, at + kStrip * i, lines + 4 * i * kLine);
    }
  }
  HWY_INLINE const uint8_t* line(size_t i) const { return lines + i * kLine; }

  alignas(kLine) uint8_t lines[4 * kCount * kLine];
};

HWY_INLINE V32 Bytes(uint8_t byte) {
  return hn::BitCast(D32(), hn::Set(D8(), byte));
}

// ---- Scales

// 16 bytes to an address that is a multiple of 16.
template <Stores kStores, class D>
HWY_INLINE void PutPart(hn::Vec<D> v, D d, uint8_t* HWY_RESTRICT to) {
  auto* at = reinterpret_cast<hn::TFromD<D>*>(to);
  if constexpr (kStores == Stores::kStream) {
    hn::Stream(v, d, at);
  } else {
    hn::Store(v, d, at);
  }
}

// Words of 16 bits: halves 0 of all columns, and then halves 1.
template <Stores kStores>
HWY_INLINE void PutHalves(const uint8_t* HWY_RESTRICT line,
                          uint8_t* HWY_RESTRICT to) {
  const hn::FixedTag<uint16_t, 8> d;
  const auto* from = reinterpret_cast<const uint16_t*>(line);
  const auto a = hn::Load(d, from), b = hn::Load(d, from + 8);
  const auto e = hn::Load(d, from + 16), f = hn::Load(d, from + 24);
  PutPart<kStores>(hn::ConcatEven(d, b, a), d, to);
  PutPart<kStores>(hn::ConcatEven(d, f, e), d, to + 16);
  PutPart<kStores>(hn::ConcatOdd(d, b, a), d, to + 32);
  PutPart<kStores>(hn::ConcatOdd(d, f, e), d, to + 48);
}

// Bytes 0 to 3 of all columns, 16 bytes each.
struct ByteColumns {
  using D = hn::FixedTag<uint8_t, 16>;
  using V = hn::Vec<D>;
  V j0, j1, j2, j3;
};

HWY_INLINE ByteColumns LoadBytes(const uint8_t* HWY_RESTRICT line) {
  const ByteColumns::D d;
  const hn::FixedTag<uint16_t, 8> d16;
  const auto* from = reinterpret_cast<const uint16_t*>(line);
  const auto a = hn::Load(d16, from), b = hn::Load(d16, from + 8);
  const auto e = hn::Load(d16, from + 16), f = hn::Load(d16, from + 24);
  const auto ab = hn::BitCast(d, hn::ConcatEven(d16, b, a));
  const auto ef = hn::BitCast(d, hn::ConcatEven(d16, f, e));
  const auto ab_odd = hn::BitCast(d, hn::ConcatOdd(d16, b, a));
  const auto ef_odd = hn::BitCast(d, hn::ConcatOdd(d16, f, e));
  return {hn::ConcatEven(d, ef, ab), hn::ConcatOdd(d, ef, ab),
          hn::ConcatEven(d, ef_odd, ab_odd), hn::ConcatOdd(d, ef_odd, ab_odd)};
}

template <Stores kStores>
HWY_INLINE void PutLine(ByteColumns::V a, ByteColumns::V b, ByteColumns::V c,
                        ByteColumns::V e, uint8_t* HWY_RESTRICT to) {
  const ByteColumns::D d;
  PutPart<kStores>(a, d, to);
  PutPart<kStores>(b, d, to + 16);
  PutPart<kStores>(c, d, to + 32);
  PutPart<kStores>(e, d, to + 48);
}

template <Stores kStores>
HWY_INLINE void PutBytes(const uint8_t* HWY_RESTRICT line,
                         uint8_t* HWY_RESTRICT to) {
  const ByteColumns v = LoadBytes(line);
  PutLine<kStores>(v.j0, v.j1, v.j2, v.j3, to);
}

// The scales s and the minima t of four blocks, to the sections of blocks 0 and
// 1 and of blocks 2 and 3.
template <Stores kStores>
HWY_INLINE void PutBytesAndMins(const uint8_t* HWY_RESTRICT s_line,
                                const uint8_t* HWY_RESTRICT t_line,
                                uint8_t* HWY_RESTRICT to01,
                                uint8_t* HWY_RESTRICT to23) {
  const ByteColumns s = LoadBytes(s_line), t = LoadBytes(t_line);
  PutLine<kStores>(s.j0, t.j0, s.j1, t.j1, to01);
  PutLine<kStores>(s.j2, t.j2, s.j3, t.j3, to23);
}

// ---- Codes

// Two lines whose bytes are two codes of 4 bits: the quads 2 i and 2 i + 1 of
// two blocks, or of both halves of a block.
template <Stores kStores>
HWY_INLINE void PutNibbles(const uint8_t* HWY_RESTRICT from,
                           uint8_t* HWY_RESTRICT lower,
                           uint8_t* HWY_RESTRICT upper) {
  const V32 mask = Bytes(15);
  for (size_t c = 0; c < kCols; c += kLanes) {
    const V32 even = Get(from + 4 * c), odd = Get(from + kLine + 4 * c);
    Put<kStores>(
        hn::Or(hn::And(even, mask), hn::ShiftLeft<4>(hn::And(odd, mask))),
        lower + 4 * c);
    Put<kStores>(
        hn::Or(hn::And(hn::ShiftRight<4>(even), mask), hn::AndNot(mask, odd)),
        upper + 4 * c);
  }
}

// The 16 bytes from `at` on, whose lower halves are codes 0 to 15 of a block.
template <Stores kStores>
HWY_INLINE void PutBlockNibbles(const uint8_t* const* HWY_RESTRICT rows,
                                size_t at, uint8_t* HWY_RESTRICT to) {
  const Strips<1> strip(rows, at);
  PutNibbles<kStores>(strip.line(0), to, to + 2 * kLine);
  PutNibbles<kStores>(strip.line(2), to + kLine, to + 3 * kLine);
}

// Exchanges bits of two lines: those of `a` that lie kShift above `mask` for
// those of `b` in `mask`.
template <int kShift>
HWY_INLINE void SwapBits(V32& a, V32& b, V32 mask) {
  const V32 differ = hn::And(hn::Xor(hn::ShiftRight<kShift>(a), b), mask);
  b = hn::Xor(b, differ);
  a = hn::Xor(a, hn::ShiftLeft<kShift>(differ));
}

// Exchanges bits of lines that are kShift / (8 / kBlocks) apart, then of lines
// half as far apart, and so on.
template <size_t kShift, size_t kBlocks>
HWY_INLINE void TransposeBits(V32 (&v)[kBlocks]) {
  constexpr size_t kApart = kShift * kBlocks / 8;
  if constexpr (kApart > 0) {
    constexpr uint8_t kMask = kShift == 4 ? 0x0F : kShift == 2 ? 0x33 : 0x55;
    HWY_UNROLL(8)
    for (size_t i = 0; i < kBlocks; ++i) {
      if ((i & kApart) == 0) {
        SwapBits<static_cast<int>(kShift)>(v[i], v[i + kApart], Bytes(kMask));
      }
    }
    TransposeBits<kShift / 2>(v);
  }
}

// Byte j of line i has 8 / kBlocks bits of each of kBlocks blocks. They become
// kBlocks bytes, of so many bits of each line: block i goes to to[i].
template <Stores kStores, size_t kBlocks>
HWY_INLINE void PutBits(const uint8_t* HWY_RESTRICT from,
                        uint8_t* const (&to)[kBlocks]) {
  for (size_t c = 0; c < kCols; c += kLanes) {
    V32 v[kBlocks];
    HWY_UNROLL(8)
    for (size_t i = 0; i < kBlocks; ++i) v[i] = Get(from + i * kLine + 4 * c);
    TransposeBits<4>(v);
    HWY_UNROLL(8)
    for (size_t i = 0; i < kBlocks; ++i) Put<kStores>(v[i], to[i] + 4 * c);
  }
}

// Swaps bits kHigh and kLow of each bit's number within a word of 32 bits.
template <int kHigh, int kLow>
HWY_INLINE V32 SwapBitsOfNumbers(V32 v) {
  constexpr int kShift = (1 << kHigh) - (1 << kLow);
  // Bits in whose number kLow is set and kHigh is not.
  constexpr uint32_t kOfLow[] = {0xAAAAAAAAu, 0xCCCCCCCCu, 0xF0F0F0F0u,
                                 0xFF00FF00u, 0xFFFF0000u};
  const V32 mask = hn::Set(D32(), kOfLow[kLow] & ~kOfLow[kHigh]);
  const V32 differ = hn::And(hn::Xor(hn::ShiftRight<kShift>(v), v), mask);
  return hn::Xor3(v, differ, hn::ShiftLeft<kShift>(differ));
}

// Bit 4 i + j of a word, the high bit of the code k = 4 i + j, becomes bit i of
// byte j. In the bits of their numbers, i2 i1 i0 j1 j0 becomes j1 j0 i2 i1 i0.
HWY_INLINE V32 QuadBits(V32 v) {
  v = SwapBitsOfNumbers<4, 1>(v);  // j1 i1 i0 i2 j0
  v = SwapBitsOfNumbers<3, 0>(v);  // j1 j0 i0 i2 i1
  v = SwapBitsOfNumbers<2, 1>(v);  // j1 j0 i2 i0 i1
  return SwapBitsOfNumbers<1, 0>(v);
}

// ---- Records

// What a record is packed from. Columns that do not exist are rows of zeros;
// their dwords of `mask` are zeros, too, because not every scale of 0 in a file
// is one in the packed form.
struct Record {
  const uint8_t* rows[kCols];
  size_t blocks;
  alignas(kLine) uint8_t mask[kLine];
};

template <BlockFormat kFormat, Stores kStores>
struct Packer {
  using Block = block_fields::Block<kFormat>;
  static constexpr BlockCodes kCodes = BlockTraitsOf(kFormat).codes;
  static constexpr size_t kBlockBytes =
      static_cast<size_t>(kCodes.low_bits + kCodes.high_bits) * kLine;
  static constexpr bool kHalves = kCodes.scales == BlockScales::kF16;
  static constexpr bool kE8M0 = kCodes.scales == BlockScales::kE8M0;
  // Whether the record after the next one is fetched. It makes these formats 15
  // to 45 % faster, and the others up to a quarter slower (Zen 3, 2026).
  static constexpr bool kFetches =
      kFormat == BlockFormat::kQ2_K || kFormat == BlockFormat::kQ3_K ||
      kFormat == BlockFormat::kQ6_K || kFormat == BlockFormat::kTQ2_0;

  // ---- Blocks of 32 values

  static HWY_INLINE void PackRecord32(const Record& from, uint8_t* to) {
    constexpr auto kSection =
        static_cast<size_t>(BlockPanels::SectionBlocks(kCodes));
    for (size_t b = 0; b < from.blocks; b += kSection) {
      const size_t count = HWY_MIN(kSection, from.blocks - b);
      const uint8_t* rows[kCols];
      for (size_t c = 0; c < kCols; ++c) {
        rows[c] = from.rows[c] + b * sizeof(Block);
      }
      PackSection32(rows, count, from.mask, to);
      to += kLine + kSection * kBlockBytes;
    }
  }

  // A line of scales, and the blocks that it is for. The first words of each
  // block are kept for its bits.
  static HWY_INLINE void PackSection32(const uint8_t* const* rows,
                                       size_t blocks, const uint8_t* mask,
                                       uint8_t* HWY_RESTRICT to) {
    constexpr auto kSection =
        static_cast<size_t>(BlockPanels::SectionBlocks(kCodes));
    alignas(kLine) uint8_t scales[kLine];
    alignas(kLine) uint8_t high[kSection * kLine];
    for (size_t c = 0; c < kCols; c += kLanes) {
      V32 scale = hn::Zero(D32());
      for (size_t b = 0; b < blocks; ++b) {
        const Quad head = LoadStrip(rows + c, b * sizeof(Block));
        if constexpr (kHalves) {
          const V32 d = hn::And(head.l0, hn::Set(D32(), 0xFFFFu));
          scale = hn::Or(scale, b == 0 ? d : hn::ShiftLeft<16>(d));
        } else if constexpr (kE8M0) {
          const V32 e = hn::And(head.l0, hn::Set(D32(), 0xFFu));
          scale = hn::Or(scale, hn::ShiftLeftSame(e, static_cast<int>(8 * b)));
        } else {
          // The packed form has the negative of the file's minimum.
          scale = hn::Xor(head.l0, hn::Set(D32(), 0x80000000u));
        }
        if constexpr (kCodes.high_bits != 0) {
          static_assert(offsetof(Block, high) == (kHalves ? 2 : 4), "");
          const V32 bits = kHalves ? hn::Or(hn::ShiftRight<16>(head.l0),
                                            hn::ShiftLeft<16>(head.l1))
                                   : head.l1;
          Put<Stores::kCached>(QuadBits(bits), high + b * kLine + 4 * c);
        }
      }
      Put<Stores::kCached>(hn::And(scale, Get(mask + 4 * c)), scales + 4 * c);
    }
    if constexpr (kE8M0) {
      PutBytes<kStores>(scales, to);
    } else {
      PutHalves<kStores>(scales, to);
    }
    to += kLine;
    for (size_t b = 0; b < blocks; ++b, to += kBlockBytes) {
      const size_t codes = b * sizeof(Block) + offsetof(Block, codes);
      if constexpr (kCodes.low_bits == 8) {
        PutStrip<kStores>(rows, codes, to);
        PutStrip<kStores>(rows, codes + 16, to + 4 * kLine);
      } else if constexpr (kCodes.high_bits == 0) {
        PutBlockNibbles<kStores>(rows, codes, to);
      } else {
        for (size_t c = 0; c < kCols; c += kLanes) {
          Put<kStores>(Get(high + b * kLine + 4 * c), to + 4 * c);
        }
        PutBlockNibbles<kStores>(rows, codes, to + kLine);
      }
    }
  }

  // ---- Blocks of 256 values: a record each

  static HWY_INLINE uint8_t* Low(uint8_t* to, size_t block, size_t quad) {
    return to + BlockPanels::BlockAt(kCodes, static_cast<int64_t>(block)) +
           BlockPanels::LowLine(kCodes, static_cast<int64_t>(quad)) *
               static_cast<int64_t>(kLine);
  }
  static HWY_INLINE uint8_t* High(uint8_t* to, size_t block, size_t quad) {
    return to + BlockPanels::BlockAt(kCodes, static_cast<int64_t>(block)) +
           BlockPanels::HighLine(kCodes, static_cast<int64_t>(quad)) *
               static_cast<int64_t>(kLine);
  }
  static HWY_INLINE uint8_t* Scales(uint8_t* to, size_t sub) {
    return to + BlockPanels::ScalesAt(kCodes, static_cast<int64_t>(sub));
  }

  // Bytes of d, or of d and m, in the upper or lower halves of a strip's line.
  template <int kShift>
  static HWY_INLINE void PutHead(const uint8_t* line, uint8_t* to) {
    alignas(kLine) uint8_t head[kLine];
    for (size_t c = 0; c < kCols; c += kLanes) {
      Put<Stores::kCached>(hn::ShiftRight<kShift>(Get(line + 4 * c)),
                           head + 4 * c);
    }
    PutHalves<kStores>(head, to);
  }

  // The codes of 2 bits, or the high bits, of blocks `block` to block + 3: 32
  // bytes from `at` on.
  template <bool kLow>
  static HWY_INLINE void PackPairsOfBits(const Record& from, size_t at,
                                         size_t block, uint8_t* to) {
    const Strips<2> strips(from.rows, at);
    for (size_t quad = 0; quad < 8; quad += 4) {
      uint8_t* lines[4];
      for (size_t i = 0; i < 4; ++i) {
        lines[i] = kLow ? Low(to, block + i, quad) : High(to, block + i, quad);
      }
      PutBits<kStores>(strips.line(quad), lines);
    }
  }

  // The codes of Q2_K, Q3_K and TQ2_0, without the high bits.
  static HWY_INLINE void PackTwoBitCodes(const Record& from, uint8_t* to) {
    PackPairsOfBits<true>(from, offsetof(Block, codes), 0, to);
    PackPairsOfBits<true>(from, offsetof(Block, codes) + 32, 4, to);
  }

  // The high bits of eight blocks: 32 bytes from `at` on.
  static HWY_INLINE void PackHighBits(const Record& from, size_t at,
                                      uint8_t* to) {
    const Strips<2> strips(from.rows, at);
    uint8_t* lines[8];
    for (size_t i = 0; i < 8; ++i) lines[i] = High(to, i, 0);
    PutBits<kStores>(strips.line(0), lines);
  }

  static HWY_INLINE void PackQ2_K(const Record& from, uint8_t* to) {
    // A byte of scales is that of the packed form. The strip that ends the
    // block ends with d and dmin.
    static_assert(offsetof(Block, d) == sizeof(Block) - 4, "");
    const Strips<1> scales(from.rows, offsetof(Block, scales));
    const Strips<1> tail(from.rows, sizeof(Block) - kStrip);
    PutHead<0>(tail.line(3), to);
    for (size_t i = 0; i < 4; ++i) {
      PutBytes<kStores>(scales.line(i), Scales(to, 4 * i));
    }
    PackTwoBitCodes(from, to);
  }

  static HWY_INLINE void PackTQ2_0(const Record& from, uint8_t* to) {
    // The strip that ends the block ends with d.
    static_assert(offsetof(Block, d) == sizeof(Block) - 2, "");
    const Strips<1> tail(from.rows, sizeof(Block) - kStrip);
    PutHead<16>(tail.line(3), to);
    PackTwoBitCodes(from, to);
  }

  static HWY_INLINE void PackQ3_K(const Record& from, uint8_t* to) {
    // The strip that ends the block ends with the scales and d, 14 bytes.
    static_assert(offsetof(Block, scales) == sizeof(Block) - 14, "");
    const Strips<1> tail(from.rows, sizeof(Block) - kStrip);
    PutHead<16>(tail.line(3), to);
    alignas(kLine) uint8_t scales[4][kLine];
    const V32 four = Bytes(15), two = Bytes(0x30);
    for (size_t c = 0; c < kCols; c += kLanes) {
      const auto word = [&](size_t i) HWY_ATTR {
        return hn::Or(hn::ShiftRight<16>(Get(tail.line(i) + 4 * c)),
                      hn::ShiftLeft<16>(Get(tail.line(i + 1) + 4 * c)));
      };
      const V32 a = word(0), b = word(1), high = word(2);
      const auto put = [&](V32 low, V32 bits, size_t i) HWY_ATTR {
        const auto s = hn::Sub(
            hn::BitCast(D8(), hn::Or(hn::And(low, four), hn::And(bits, two))),
            hn::Set(D8(), 32));
        Put<Stores::kCached>(
            hn::And(hn::BitCast(D32(), s), Get(from.mask + 4 * c)),
            scales[i] + 4 * c);
      };
      put(a, hn::ShiftLeft<4>(high), 0);
      put(b, hn::ShiftLeft<2>(high), 1);
      put(hn::ShiftRight<4>(a), high, 2);
      put(hn::ShiftRight<4>(b), hn::ShiftRight<2>(high), 3);
    }
    for (size_t i = 0; i < 4; ++i) {
      PutBytes<kStores>(scales[i], Scales(to, 4 * i));
    }
    PackHighBits(from, offsetof(Block, high), to);
    PackTwoBitCodes(from, to);
  }

  static HWY_INLINE void PackQ45_K(const Record& from, uint8_t* to) {
    // d, dmin, and the scales and minima.
    static_assert(offsetof(Block, d) == 0 && offsetof(Block, scales) == 4, "");
    const Strips<1> head(from.rows, 0);
    PutHead<0>(head.line(0), to);
    alignas(kLine) uint8_t s[2][kLine], t[2][kLine];
    const V32 six = Bytes(63), four = Bytes(15), two = Bytes(0x30);
    for (size_t c = 0; c < kCols; c += kLanes) {
      const V32 a = Get(head.line(1) + 4 * c), b = Get(head.line(2) + 4 * c);
      const V32 both = Get(head.line(3) + 4 * c);
      Put<Stores::kCached>(hn::And(a, six), s[0] + 4 * c);
      Put<Stores::kCached>(hn::And(b, six), t[0] + 4 * c);
      Put<Stores::kCached>(
          hn::Or(hn::And(both, four), hn::And(hn::ShiftRight<2>(a), two)),
          s[1] + 4 * c);
      Put<Stores::kCached>(hn::Or(hn::And(hn::ShiftRight<4>(both), four),
                                  hn::And(hn::ShiftRight<2>(b), two)),
                           t[1] + 4 * c);
    }
    for (size_t i = 0; i < 2; ++i) {
      PutBytesAndMins<kStores>(s[i], t[i], Scales(to, 4 * i),
                               Scales(to, 4 * i + 2));
    }
    if constexpr (kCodes.high_bits != 0) {
      PackHighBits(from, offsetof(Block, high), to);
    }
    for (size_t b = 0; b < 8; b += 2) {
      const Strips<2> codes(from.rows, offsetof(Block, codes) + 16 * b);
      for (size_t quad = 0; quad < 8; quad += 2) {
        PutNibbles<kStores>(codes.line(quad), Low(to, b, quad),
                            Low(to, b + 1, quad));
      }
    }
  }

  static HWY_INLINE void PackQ6_K(const Record& from, uint8_t* to) {
    // The strip that ends the block ends with d.
    static_assert(offsetof(Block, d) == sizeof(Block) - 2, "");
    const Strips<1> scales(from.rows, offsetof(Block, scales));
    const Strips<1> tail(from.rows, sizeof(Block) - kStrip);
    PutHead<16>(tail.line(3), to);
    for (size_t i = 0; i < 4; ++i) {
      PutBytes<kStores>(scales.line(i), Scales(to, 4 * i));
    }
    for (size_t half = 0; half < 2; ++half) {
      PackPairsOfBits<false>(from, offsetof(Block, high) + 32 * half, 4 * half,
                             to);
      for (size_t i = 0; i < 2; ++i) {
        const size_t block = 4 * half + i;
        const Strips<2> codes(from.rows,
                              offsetof(Block, codes) + 64 * half + 32 * i);
        for (size_t quad = 0; quad < 8; quad += 2) {
          PutNibbles<kStores>(codes.line(quad), Low(to, block, quad),
                              Low(to, block + 2, quad));
        }
      }
    }
  }

  static HWY_INLINE void PackIQ4_XS(const Record& from, uint8_t* to) {
    // d and the scales.
    static_assert(offsetof(Block, high) == 2 && offsetof(Block, low) == 4, "");
    const Strips<1> head(from.rows, 0);
    alignas(kLine) uint8_t d[kLine], scales[2][kLine];
    const D32 d32;
    for (size_t c = 0; c < kCols; c += kLanes) {
      const V32 first = Get(head.line(0) + 4 * c);
      const V32 low = Get(head.line(1) + 4 * c);
      Put<Stores::kCached>(hn::And(first, hn::Set(d32, 0xFFFFu)), d + 4 * c);
      // The four scales whose fields are bits 0 to 15 of `fours` and 0 to 7 of
      // `twos`.
      const auto put = [&](V32 fours, V32 twos, size_t i) HWY_ATTR {
        V32 f = hn::And(fours, hn::Set(d32, 0xFFFFu));
        f = hn::And(hn::Or(f, hn::ShiftLeft<8>(f)), hn::Set(d32, 0x00FF00FFu));
        f = hn::And(hn::Or(f, hn::ShiftLeft<4>(f)), Bytes(15));
        V32 t = hn::And(twos, hn::Set(d32, 0xFFu));
        t = hn::And(hn::Or(t, hn::ShiftLeft<12>(t)), hn::Set(d32, 0x000F000Fu));
        t = hn::And(hn::Or(t, hn::ShiftLeft<6>(t)), Bytes(3));
        const auto s =
            hn::Sub(hn::BitCast(D8(), hn::Or(f, hn::ShiftLeft<4>(t))),
                    hn::Set(D8(), 32));
        Put<Stores::kCached>(
            hn::And(hn::BitCast(d32, s), Get(from.mask + 4 * c)),
            scales[i] + 4 * c);
      };
      put(low, hn::ShiftRight<16>(first), 0);
      put(hn::ShiftRight<16>(low), hn::ShiftRight<24>(first), 1);
    }
    PutHalves<kStores>(d, to);
    PutBytes<kStores>(scales[0], Scales(to, 0));
    PutBytes<kStores>(scales[1], Scales(to, 4));
    for (size_t b = 0; b < 8; ++b) {
      PutBlockNibbles<kStores>(from.rows, offsetof(Block, codes) + 16 * b,
                               Low(to, b, 0));
    }
  }

  static HWY_INLINE void PackRecord(const Record& from, uint8_t* to) {
    if constexpr (kFormat == BlockFormat::kQ2_K) {
      PackQ2_K(from, to);
    } else if constexpr (kFormat == BlockFormat::kQ3_K) {
      PackQ3_K(from, to);
    } else if constexpr (kFormat == BlockFormat::kQ4_K ||
                         kFormat == BlockFormat::kQ5_K) {
      PackQ45_K(from, to);
    } else if constexpr (kFormat == BlockFormat::kQ6_K) {
      PackQ6_K(from, to);
    } else if constexpr (kFormat == BlockFormat::kIQ4_XS) {
      PackIQ4_XS(from, to);
    } else if constexpr (kFormat == BlockFormat::kTQ2_0) {
      PackTQ2_0(from, to);
    } else {
      PackRecord32(from, to);
    }
  }
};

// Size of the largest record in a file.
constexpr size_t kMostRecordBytes =
    8 * sizeof(block_fields::Block<BlockFormat::kQ8_0>);

template <BlockFormat kFormat, Stores kStores>
void Pack(const BlockPackTask& task) {
  using P = Packer<kFormat, kStores>;
  constexpr auto kRecordBlocks =
      static_cast<size_t>(BlockPanels::kRecordBlocks);
  constexpr auto kTo = static_cast<size_t>(
      BlockPanels::RecordBytes(P::kCodes, BlockPanels::kRecordBlocks));
  alignas(kLine) uint8_t zeros[kMostRecordBytes];
  hwy::ZeroBytes<kMostRecordBytes>(zeros);
  static_assert(
      BlockPanels::kRecordK / P::Block::kValues * sizeof(typename P::Block) <=
          kMostRecordBytes,
      "zeros are a record");
  Record record;
  hwy::ZeroBytes<kLine>(record.mask);
  for (size_t c = 0; c < kCols; ++c) {
    record.rows[c] = c < task.cols ? task.rows[c] : zeros;
    for (size_t j = 0; j < 4 && c < task.cols; ++j) {
      record.mask[4 * c + j] = 0xFF;
    }
  }
  uint8_t* to = task.to;
  for (size_t b = 0; b < task.blocks; b += kRecordBlocks) {
    record.blocks = HWY_MIN(kRecordBlocks, task.blocks - b);
    if (P::kFetches && b + 3 * kRecordBlocks <= task.blocks) {
      for (size_t c = 0; c < task.cols; ++c) {
        PrefetchL2(record.rows[c] + 2 * task.record_bytes, task.record_bytes);
      }
    }
    P::PackRecord(record, to);
    to += kTo;
    if (b + kRecordBlocks >= task.blocks) break;  // the last may be shorter
    for (size_t c = 0; c < task.cols; ++c) {
      record.rows[c] += task.record_bytes;
    }
  }
  if constexpr (kStores == Stores::kStream) hwy::FlushStream();
}

BlockPackKernels GetKernels(BlockFormat format) {
  return block_fields::WithBlockFormat(format, [](auto f) -> BlockPackKernels {
    constexpr BlockFormat kFormat = decltype(f)::value;
    return {hwy::TargetName(HWY_TARGET), &Pack<kFormat, Stores::kCached>,
            &Pack<kFormat, Stores::kStream>};
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
BlockPackKernels GetBlockPackKernels(BlockFormat format) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(format);
}
}  // namespace quern
#endif  // HWY_ONCE
