#ifndef QUERN_PACKING_BLOCK_PANELS_TESTUTIL_H_
#define QUERN_PACKING_BLOCK_PANELS_TESTUTIL_H_

// Reads packed records by the words of packing/block_panels.h, and by none of
// its functions.

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "quern/packing/block_panels.h"

namespace quern {

inline bool WholeRecords(const BlockCodes& codes) {
  return codes.scales >= BlockScales::kBytes;
}

// Size of the scales before a section, in bytes.
inline int64_t ScaleLine(const BlockCodes& codes) {
  return codes.scales == BlockScales::kNone ||
                 codes.scales == BlockScales::kRecordF16
             ? 0
             : 64;
}

// Where each quad's bits lie in a block, and how many blocks lie behind a line
// of scales, written down from the comment in block_panels.h.
struct Lines {
  BlockCodes codes;
  int64_t section;
  int low[8];
  int high[8];
};
inline constexpr Lines kLines[] = {
    {{4, 0, 32, BlockScales::kF16}, 2, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 0, 32, BlockScales::kF16AndMin}, 1, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 1, 32, BlockScales::kF16}, 2, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{4, 1, 32, BlockScales::kF16AndMin}, 1, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{8, 0, 32, BlockScales::kF16}, 2, {0, 1, 2, 3, 4, 5, 6, 7}, {}},
    {{4, 0, 32, BlockScales::kE8M0}, 4, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{2, 0, 16, BlockScales::kNibbles}, 2, {0, 0, 0, 0, 1, 1, 1, 1}, {}},
    {{2, 1, 16, BlockScales::kBytes}, 2, {1, 1, 1, 1, 2, 2, 2, 2}, {}},
    {{4, 0, 32, BlockScales::kBytesAndMins}, 2, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 1, 32, BlockScales::kBytesAndMins}, 2, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{4, 2, 16, BlockScales::kBytes},
     2,
     {1, 1, 2, 2, 4, 4, 5, 5},
     {0, 0, 0, 0, 3, 3, 3, 3}},
    {{4, 0, 32, BlockScales::kBytes}, 4, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{2, 0, 32, BlockScales::kRecordF16}, 8, {0, 0, 0, 0, 1, 1, 1, 1}, {}},
    {{4, 0, 32, BlockScales::kNone}, 8, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
};

// A column read back from a packed record.
class PackedColumn {
 public:
  PackedColumn(const Lines& lines, const uint8_t* record, int64_t c)
      : lines_(lines),
        head_(record),
        sections_(record + (WholeRecords(lines.codes) ? 64 : 0)),
        c_(c) {}

  int Code(int64_t k) const {
    const BlockCodes& codes = lines_.codes;
    const int64_t i = k % 32 / 4;
    const int low =
        Bits(k, lines_.low[i], codes.low_bits * (i % (8 / codes.low_bits)),
             codes.low_bits);
    if (codes.high_bits == 0) return low;
    const int high =
        Bits(k, lines_.high[i], codes.high_bits * (i % (8 / codes.high_bits)),
             codes.high_bits);
    return low + (high << codes.low_bits);
  }
  int D(int64_t b) const {
    return WholeRecords(lines_.codes) ? U16(head_, c_)
                                      : U16(BlockScalesOf(b), c_);
  }
  int M(int64_t b) const {
    return WholeRecords(lines_.codes) ? U16(head_, 16 + c_)
                                      : U16(BlockScalesOf(b), 16 + c_);
  }
  int S(int64_t s) const {
    const int byte = ScalesOf(s)[c_];
    return lines_.codes.scales == BlockScales::kNibbles ? byte % 16 : byte;
  }
  int T(int64_t s) const {
    return lines_.codes.scales == BlockScales::kNibbles ? ScalesOf(s)[c_] / 16
                                                        : ScalesOf(s)[16 + c_];
  }

 private:
  static int U16(const uint8_t* from, int64_t i) {
    return from[2 * i] + 256 * from[2 * i + 1];
  }
  int64_t BlockBytes() const {
    return 64 * (lines_.codes.low_bits + lines_.codes.high_bits);
  }
  const uint8_t* Section(int64_t b) const {
    return sections_ +
           b / lines_.section *
               (ScaleLine(lines_.codes) + lines_.section * BlockBytes());
  }
  // Where the scales of block b begin.
  const uint8_t* BlockScalesOf(int64_t b) const {
    return Section(b) + b % lines_.section * (64 / lines_.section);
  }
  // Where the scales of sub-block s begin.
  const uint8_t* ScalesOf(int64_t s) const {
    const int64_t subs = 32 / lines_.codes.sub_block;
    return BlockScalesOf(s / subs) + s % subs * (64 / lines_.section / subs);
  }
  int Bits(int64_t k, int64_t line, int64_t bit, int64_t count) const {
    const int64_t b = k / 32;
    const uint8_t* block = Section(b) + ScaleLine(lines_.codes) +
                           b % lines_.section * BlockBytes();
    return block[64 * line + 4 * c_ + k % 4] >> bit & ((1 << count) - 1);
  }

  const Lines& lines_;
  const uint8_t* head_;
  const uint8_t* sections_;
  int64_t c_;
};

// The entry of kLines with these codes.
inline const Lines& LinesOf(const BlockCodes& codes) {
  return *std::find_if(
      std::begin(kLines), std::end(kLines),
      [&](const Lines& lines) { return lines.codes == codes; });
}

}  // namespace quern

#endif  // QUERN_PACKING_BLOCK_PANELS_TESTUTIL_H_
