#ifndef QUERN_PACKING_BLOCK_PANELS_H_
#define QUERN_PACKING_BLOCK_PANELS_H_

// The packed form of weights b[k, n] that are codes of 2 to 8 bits in blocks of
// 32 k, made to become operands of int8 dot products in registers:
//
//   panels                panel: 16 columns, one run of bytes
//     records             record: 256 k; the last has what is left, a multiple
//                         of 32
//       head              a line of what its blocks share, or nothing
//       sections          section: as many blocks as a line has scales for; the
//                         last of a record may have fewer
//         scales          a line
//         blocks          block: 32 k, of low_bits + high_bits lines
//           lines         line: 64 bytes; byte 4 c + j belongs to column c
//
// Quad i of a block, i < 8, is k = 4 i + j for j < 4. Its codes are bits of the
// bytes 4 c + j, so that one shift and one mask turn a line into the operand of
// vpdpbusd, vpmaddubsw and their like. A line holds `bits` bits of each of
// 8 / bits quads, where `bits` is low_bits or high_bits; quad i has those from
// bit bits * (i % (8 / bits)) on. A line of high bits lies before the lines of
// low bits of the same quads:
//
//   4 low bits               quads 0 1, 2 3, 4 5, 6 7
//   4 low bits, 1 high bit   high 0 to 7; 0 1, 2 3, 4 5, 6 7
//   4 low bits, 2 high bits  high 0 to 3; 0 1, 2 3; high 4 to 7; 4 5, 6 7
//   2 low bits, 1 high bit   high 0 to 7; 0 to 3, 4 to 7
//   8 low bits               0, 1, 2, 3, 4, 5, 6, 7
//
// The head and the scales of a section depend on BlockScales. Below, b counts
// the section's blocks, s its sub-blocks of 32 or 16 k, and c columns. Bytes
// that hold no number are zeros.
//
//                  head              scales
//   kNone          -                 no line: they lie apart from the panels
//   kF16           -                 f16 d[b][c]
//   kF16AndMin     -                 f16 (d[c], m[c])[b]
//   kE8M0          -                 u8 s[b][c]
//   kBytes         f16 d[c]          u8 s[s][c]
//   kBytesAndMins  f16 d[c], m[c]    u8 (s[c], t[c])[s]
//   kNibbles       f16 d[c], m[c]    u8 (s + 16 t)[s][c]
//   kRecordF16     f16 d[c]          no line
//
// Kernels therefore read a panel in order, one section after the other, which
// is what a core's prefetchers follow. With all scales of a record before its
// blocks, one row of some formats read DRAM at a third of that speed
// (docs/performance_notes.md, "How DRAM is read by few rows").
//
// Numbers of 16 bits are little-endian. What lies beyond n is zeros. A panel is
// contiguous, and so are all panels. The layout does not depend on the
// instruction set. Sizes are those of the codes and scales, but for K scales of
// 6 bits, which take a byte each: Q4_K has 4.625 bits for each weight, of 4.5
// in files.
//
// Panels of codes of 4 bits in packing/code_layout.h are, byte for byte, those
// of {4, 0, 32, kNone} whose k come in another order: place i of each eight
// holds k = kI4Order[i] of these eight.

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/math_util.h"

namespace quern {

enum class BlockScales : uint8_t {
  kNone,
  kF16,
  kF16AndMin,
  kE8M0,
  kBytes,
  kBytesAndMins,
  kNibbles,
  kRecordF16,
};

// What the codes of a block format are made of.
struct BlockCodes {
  int low_bits;   // 2, 4 or 8
  int high_bits;  // 0, 1 or 2
  int sub_block;  // 32, or 16 with kBytes and kNibbles
  BlockScales scales;

  // Whether 256 k share a scale, so that k consists of whole records.
  constexpr bool has_head() const { return scales >= BlockScales::kBytes; }

  friend constexpr bool operator==(const BlockCodes& x, const BlockCodes& y) {
    return x.low_bits == y.low_bits && x.high_bits == y.high_bits &&
           x.sub_block == y.sub_block && x.scales == y.scales;
  }
};

// See above.
inline constexpr uint8_t kI4Order[8] = {0, 4, 1, 5, 2, 6, 3, 7};

class BlockPanels {
 public:
  static constexpr int64_t kPanelCols = 16;
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kBlockK = 32;
  static constexpr int64_t kRecordBlocks = 8;
  static constexpr int64_t kRecordK = kBlockK * kRecordBlocks;
  static constexpr int64_t kBlockQuads = 8;

  // The layout of nothing.
  BlockPanels() = default;

  // InvalidArgument unless n >= 1, k is a positive multiple of 32, or of 256
  // where scales have a head, sub_block is one that BlockCodes allows,
  // and the packed size fits in int64_t.
  static absl::StatusOr<BlockPanels> Create(const BlockCodes& codes, int64_t k,
                                            int64_t n);

  const BlockCodes& codes() const { return codes_; }
  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  int64_t panels() const { return n_ / kPanelCols + (n_ % kPanelCols != 0); }
  int64_t blocks() const { return k_ / kBlockK; }
  int64_t records() const { return DivCeil(blocks(), kRecordBlocks); }
  int64_t RecordBlocks(int64_t record) const {
    return std::min(kRecordBlocks, blocks() - record * kRecordBlocks);
  }

  // Number of blocks in a section: all of a record without lines of scales.
  static constexpr int64_t SectionBlocks(const BlockCodes& codes) {
    return SubBytes(codes) == 0
               ? kRecordBlocks
               : kLineBytes / (SubBytes(codes) * BlockSubs(codes));
  }
  // Offset in bytes, from the beginning of a record, of its block b and of the
  // scales of its sub-block s.
  static constexpr int64_t BlockAt(const BlockCodes& codes, int64_t b) {
    const int64_t blocks = SectionBlocks(codes);
    return HeadBytes(codes) + (b / blocks + 1) * ScaleLineBytes(codes) +
           b * BlockBytes(codes);
  }
  static constexpr int64_t ScalesAt(const BlockCodes& codes, int64_t s) {
    const int64_t subs = SectionBlocks(codes) * BlockSubs(codes);
    const int64_t section =
        ScaleLineBytes(codes) + SectionBlocks(codes) * BlockBytes(codes);
    return HeadBytes(codes) + s / subs * section + s % subs * SubBytes(codes);
  }
  // Index, among a block's lines, of the line with quad i's low bits, and of
  // the line with its high bits. HighLine needs high_bits >= 1.
  static constexpr int64_t LowLine(const BlockCodes& codes, int64_t i) {
    const int64_t line = i * codes.low_bits / 8;
    return codes.high_bits == 0 ? line : line + i * codes.high_bits / 8 + 1;
  }
  static constexpr int64_t HighLine(const BlockCodes& codes, int64_t i) {
    const int64_t line = i * codes.high_bits / 8;
    return line + line * codes.low_bits / codes.high_bits;
  }

  static constexpr int64_t RecordBytes(const BlockCodes& codes,
                                       int64_t blocks) {
    return HeadBytes(codes) +
           DivCeil(blocks, SectionBlocks(codes)) * ScaleLineBytes(codes) +
           blocks * BlockBytes(codes);
  }
  int64_t record_bytes() const { return RecordBytes(codes_, kRecordBlocks); }
  int64_t panel_bytes() const {
    return (records() - 1) * record_bytes() +
           RecordBytes(codes_, RecordBlocks(records() - 1));
  }
  int64_t bytes() const { return panels() * panel_bytes(); }

  friend bool operator==(const BlockPanels& x, const BlockPanels& y) {
    return x.codes_ == y.codes_ && x.k_ == y.k_ && x.n_ == y.n_;
  }
  friend bool operator!=(const BlockPanels& x, const BlockPanels& y) {
    return !(x == y);
  }

 private:
  BlockPanels(const BlockCodes& codes, int64_t k, int64_t n)
      : codes_(codes), k_(k), n_(n) {}

  static constexpr int64_t HeadBytes(const BlockCodes& codes) {
    return codes.has_head() ? kLineBytes : 0;
  }
  static constexpr int64_t ScaleLineBytes(const BlockCodes& codes) {
    return SubBytes(codes) == 0 ? 0 : kLineBytes;
  }
  static constexpr int64_t BlockBytes(const BlockCodes& codes) {
    return (codes.low_bits + codes.high_bits) * kLineBytes;
  }
  static constexpr int64_t BlockSubs(const BlockCodes& codes) {
    return kBlockK / codes.sub_block;
  }
  // Size of the scales of a sub-block's 16 columns, in bytes.
  static constexpr int64_t SubBytes(const BlockCodes& codes) {
    switch (codes.scales) {
      case BlockScales::kNone:
      case BlockScales::kRecordF16:
        return 0;
      case BlockScales::kF16AndMin:
        return 4 * kPanelCols;
      case BlockScales::kF16:
      case BlockScales::kBytesAndMins:
        return 2 * kPanelCols;
      case BlockScales::kE8M0:
      case BlockScales::kBytes:
      case BlockScales::kNibbles:
        break;
    }
    return kPanelCols;
  }

  BlockCodes codes_ = {4, 0, 32, BlockScales::kF16};
  int64_t k_ = kBlockK;
  int64_t n_ = 0;
};

}  // namespace quern

#endif  // QUERN_PACKING_BLOCK_PANELS_H_
