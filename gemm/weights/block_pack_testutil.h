#ifndef QUERN_GEMM_WEIGHTS_BLOCK_PACK_TESTUTIL_H_
#define QUERN_GEMM_WEIGHTS_BLOCK_PACK_TESTUTIL_H_

// What gemm/weights/block_pack.h must write, bit by bit, from the words of
// quant/block_format.h and packing/block_panels.h.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/math_util.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/block_panels_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"

namespace quern {

// A row of a file, whose fields are asked for by the value that they belong to,
// as the packed form has them.
class FileColumn {
 public:
  FileColumn(const BlockFormatInfo& info, const uint8_t* row)
      : info_(&info), row_(row) {}

  int64_t Code(int64_t k) const {
    const int64_t code = Value(k).code;
    return info_->format == BlockFormat::kQ8_0 ? code ^ 128 : code;
  }
  int64_t Scale(int64_t k) const {
    const int64_t scale = Value(k).scale;
    switch (info_->format) {
      case BlockFormat::kQ3_K:
      case BlockFormat::kIQ4_XS:
        return (scale - 32) & 255;
      case BlockFormat::kQ6_K:
        return scale ^ 128;
      default:
        return scale;
    }
  }
  int64_t Min(int64_t k) const { return Value(k).min; }
  // The bits of d (i = 0) or of the minimum (i = 1); 0 where the format has no
  // such number.
  int64_t Half(int64_t k, size_t i) const {
    const std::vector<BlockHalf> halves = HalvesOf(info_->format);
    if (i >= halves.size()) return 0;
    const auto first = static_cast<int64_t>(8 * halves[i].byte);
    const int64_t bits = BlockBits(Block(k)).Number(first, 16);
    return info_->values == 32 && i == 1 ? bits ^ 0x8000 : bits;
  }

 private:
  const uint8_t* Block(int64_t k) const {
    return row_ + k / info_->values * info_->bytes;
  }
  ReferenceBlockValue Value(int64_t k) const {
    return ReferenceValue(info_->format, Block(k), k % info_->values);
  }

  const BlockFormatInfo* info_;
  const uint8_t* row_;
};

// Calls compare(got, want, i) for every field, padding included, of a column of
// a packed record. `file` is null for a column that does not exist, which is
// zeros.
template <typename Compare>
void ForEachPacked(const BlockPanels& layout, const FileColumn* file,
                   const uint8_t* packed, int64_t column, int64_t record,
                   const Compare& compare) {
  const BlockCodes& codes = layout.codes();
  const Lines& lines = LinesOf(codes);
  const PackedColumn got(lines,
                         packed + column / 16 * layout.panel_bytes() +
                             record * layout.record_bytes(),
                         column % 16);
  const int64_t blocks = layout.RecordBlocks(record), first = record * 256;
  for (int64_t k = 0; k < 32 * blocks; ++k) {
    compare(got.Code(k), file == nullptr ? 0 : file->Code(first + k), k);
  }
  const bool whole = WholeRecords(codes);
  const int64_t padded = RoundUp(blocks, lines.section);
  for (int64_t b = 0; b < (whole ? 1 : padded); ++b) {
    if (codes.scales == BlockScales::kE8M0) break;
    const bool there = file != nullptr && b < blocks;
    const int64_t k = first + 32 * b;
    compare(got.D(b), there ? file->Half(k, 0) : 0, b);
    if (codes.scales == BlockScales::kF16) continue;
    compare(got.M(b), there ? file->Half(k, 1) : 0, b);
  }
  if (ScaleLine(codes) == 0) return;
  if (!whole && codes.scales != BlockScales::kE8M0) return;
  const bool mins = codes.scales == BlockScales::kBytesAndMins ||
                    codes.scales == BlockScales::kNibbles;
  const int64_t subs = 32 / codes.sub_block;
  for (int64_t s = 0; s < padded * subs; ++s) {
    const bool there = file != nullptr && s < blocks * subs;
    const int64_t k = first + s * codes.sub_block;
    compare(got.S(s), there ? file->Scale(k) : 0, s);
    if (mins) compare(got.T(s), there ? file->Min(k) : 0, s);
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_BLOCK_PACK_TESTUTIL_H_
