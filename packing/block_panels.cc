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
  const int64_t subs = blocks * (kBlockK / codes_.sub_block);
  uint8_t* bytes = to + 4 * kCols + c;  // where scales are bytes
  switch (codes_.scales) {
    case BlockScales::kNone:
      break;
    case BlockScales::kF16:
      for (int64_t b = 0; b < blocks; ++b) {
        Write16(from.d[b], to + 2 * (b * kCols + c));
      }
      break;
    case BlockScales::kF16AndMin:
      for (int64_t b = 0; b < blocks; ++b) {
        Write16(from.d[b], to + 2 * (2 * b * kCols + c));
        Write16(from.m[b], to + 2 * ((2 * b + 1) * kCols + c));
      }
      break;
    case BlockScales::kE8M0:
      for (int64_t b = 0; b < blocks; ++b) to[b * kCols + c] = from.s[b];
      break;
    case BlockScales::kBytes:
      Write16(from.d[0], to + 2 * c);
      for (int64_t s = 0; s < subs; ++s) bytes[s * kCols] = from.s[s];
      break;
    case BlockScales::kBytesAndMins:
      Write16(from.d[0], to + 2 * c);
      Write16(from.m[0], to + 2 * (kCols + c));
      for (int64_t s = 0; s < subs; ++s) {
        bytes[2 * s * kCols] = from.s[s];
        bytes[(2 * s + 1) * kCols] = from.t[s];
      }
      break;
    case BlockScales::kNibbles:
      Write16(from.d[0], to + 2 * c);
      Write16(from.m[0], to + 2 * (kCols + c));
      for (int64_t s = 0; s < subs; ++s) {
        bytes[s * kCols] = static_cast<uint8_t>(from.s[s] | from.t[s] << 4);
      }
      break;
  }

  const int64_t low_bits = codes_.low_bits, high_bits = codes_.high_bits;
  const int64_t per = 8 / low_bits;
  const int low_mask = (1 << low_bits) - 1;
  uint8_t* lines = to + ScaleBytes(codes_, blocks);
  const uint8_t* code = from.codes;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < kBlockQuads; ++i) {
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t byte = 4 * c + j;
        const int u = *code++;
        OrBits(u & low_mask, low_bits * (i % per),
               lines[i / per * kLineBytes + byte]);
        if (high_bits == 1) {
          OrBits(u >> low_bits & 1, i, lines[low_bits * kLineBytes + byte]);
        } else if (high_bits == 2) {
          OrBits(u >> low_bits & 3, 2 * (i % 4),
                 lines[(low_bits + i / 4) * kLineBytes + byte]);
        }
      }
    }
    lines += (low_bits + high_bits) * kLineBytes;
  }
}

}  // namespace quern
