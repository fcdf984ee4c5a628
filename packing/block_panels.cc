#include "quern/packing/block_panels.h"

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr int64_t kCols = BlockPanels::kPanelCols;

void Write16(uint16_t value, uint8_t* to) {
  to[0] = static_cast<uint8_t>(value);
  to[1] = static_cast<uint8_t>(value >> 8);
}

void OrBits(int value, int64_t shift, uint8_t& to) {
  to = static_cast<uint8_t>(to | value << shift);
}

// Writes column c of the scales of sub-block s, which begin at `to`.
void WriteScales(const BlockRecord& from, BlockScales scales, int64_t s,
                 int64_t c, uint8_t* to) {
  switch (scales) {
    case BlockScales::kNone:
      break;
    case BlockScales::kF16AndMin:
      Write16(from.m[s], to + 2 * (kCols + c));
      [[fallthrough]];
    case BlockScales::kF16:
      Write16(from.d[s], to + 2 * c);
      break;
    case BlockScales::kBytesAndMins:
      to[kCols + c] = from.t[s];
      [[fallthrough]];
    case BlockScales::kE8M0:
    case BlockScales::kBytes:
      to[c] = from.s[s];
      break;
    case BlockScales::kNibbles:
      to[c] = static_cast<uint8_t>(from.s[s] | from.t[s] << 4);
      break;
  }
}

// Writes column c of a block of 32 codes, which begins at `to`.
void WriteBlock(const uint8_t* from, const BlockCodes& codes, int64_t c,
                uint8_t* to) {
  const int low_bits = codes.low_bits, high_bits = codes.high_bits;
  const int low_mask = (1 << low_bits) - 1;
  const int high_mask = (1 << high_bits) - 1;
  for (int i = 0; i < BlockPanels::kBlockQuads; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      const int u = *from++;
      const auto byte_of = [&](int64_t line) -> uint8_t& {
        return to[line * BlockPanels::kLineBytes + 4 * c + j];
      };
      OrBits(u & low_mask, i * low_bits % 8,
             byte_of(BlockPanels::LowLine(codes, i)));
      if (high_bits > 0) {
        OrBits(u >> low_bits & high_mask, i * high_bits % 8,
               byte_of(BlockPanels::HighLine(codes, i)));
      }
    }
  }
}

}  // namespace

absl::StatusOr<BlockPanels> BlockPanels::Create(const BlockCodes& codes,
                                                int64_t k, int64_t n) {
  constexpr char kOp[] = "block_panels";
  const bool whole_records = codes.scales >= BlockScales::kBytes;
  const int64_t unit = whole_records ? kRecordK : kBlockK;
  if (n < 1) return InvalidArgument(kOp, "n=", n, "; need 1 or more");
  if (k < 1 || k % unit != 0) {
    return InvalidArgument(kOp, "k=", k, "; need a positive multiple of ",
                           unit);
  }
  const bool halves = codes.scales == BlockScales::kBytes ||
                      codes.scales == BlockScales::kNibbles;
  if (codes.sub_block != kBlockK && !(halves && codes.sub_block == 16)) {
    return InvalidArgument(kOp, "sub_block=", codes.sub_block, "; need ",
                           kBlockK, halves ? " or 16" : "");
  }
  const BlockPanels layout(codes, k, n);
  int64_t bytes = 0;
  if (!CheckedMul(layout.records(), layout.record_bytes(), &bytes) ||
      !CheckedMul(layout.panels(), bytes, &bytes)) {
    return InvalidArgument(kOp, "k=", k, ", n=", n,
                           "; the packed weights have more than 2^63 bytes");
  }
  return layout;
}

void BlockPanels::WriteColumn(const BlockRecord& from, int64_t blocks,
                              int64_t c, uint8_t* to) const {
  if (codes_.scales >= BlockScales::kBytes) {
    Write16(from.d[0], to + 2 * c);
    if (codes_.scales != BlockScales::kBytes) {
      Write16(from.m[0], to + 2 * (kCols + c));
    }
  }
  for (int64_t s = 0; s < blocks * BlockSubs(codes_); ++s) {
    WriteScales(from, codes_.scales, s, c, to + ScalesAt(codes_, s));
  }
  for (int64_t b = 0; b < blocks; ++b) {
    WriteBlock(from.codes + b * kBlockK, codes_, c, to + BlockAt(codes_, b));
  }
}

}  // namespace quern
