#include "quern/packing/block_panels.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/packing/code_layout.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Scales = BlockScales;

bool WholeRecords(const BlockCodes& codes) {
  return codes.scales >= Scales::kBytes;
}

// Where each quad's bits lie in a block, and how many blocks lie behind a line
// of scales, written down from the comment in block_panels.h.
struct Lines {
  BlockCodes codes;
  int64_t section;
  int low[8];
  int high[8];
};
constexpr Lines kLines[] = {
    {{4, 0, 32, Scales::kF16}, 2, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 0, 32, Scales::kF16AndMin}, 1, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 1, 32, Scales::kF16}, 2, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{4, 1, 32, Scales::kF16AndMin}, 1, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{8, 0, 32, Scales::kF16}, 2, {0, 1, 2, 3, 4, 5, 6, 7}, {}},
    {{4, 0, 32, Scales::kE8M0}, 4, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{2, 0, 16, Scales::kNibbles}, 2, {0, 0, 0, 0, 1, 1, 1, 1}, {}},
    {{2, 1, 16, Scales::kBytes}, 2, {1, 1, 1, 1, 2, 2, 2, 2}, {}},
    {{4, 0, 32, Scales::kBytesAndMins}, 2, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 1, 32, Scales::kBytesAndMins}, 2, {1, 1, 2, 2, 3, 3, 4, 4}, {}},
    {{4, 2, 16, Scales::kBytes},
     2,
     {1, 1, 2, 2, 4, 4, 5, 5},
     {0, 0, 0, 0, 3, 3, 3, 3}},
    {{4, 0, 32, Scales::kBytes}, 4, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
    {{4, 0, 32, Scales::kNone}, 8, {0, 0, 1, 1, 2, 2, 3, 3}, {}},
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
    return lines_.codes.scales == Scales::kNibbles ? byte % 16 : byte;
  }
  int T(int64_t s) const {
    return lines_.codes.scales == Scales::kNibbles ? ScalesOf(s)[c_] / 16
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
    const int64_t scales = lines_.codes.scales == Scales::kNone ? 0 : 64;
    return sections_ +
           b / lines_.section * (scales + lines_.section * BlockBytes());
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
    const int64_t scales = lines_.codes.scales == Scales::kNone ? 0 : 64;
    const uint8_t* block =
        Section(b) + scales + b % lines_.section * BlockBytes();
    return block[64 * line + 4 * c_ + k % 4] >> bit & ((1 << count) - 1);
  }

  const Lines& lines_;
  const uint8_t* head_;
  const uint8_t* sections_;
  int64_t c_;
};

TEST(BlockPanelsTest, HoldsWhatTheFormulasSay) {
  TestRng rng;
  InlineExecutor executor;
  for (const Lines& lines : kLines) {
    const BlockCodes& codes = lines.codes;
    for (const int64_t blocks : {1, 3, 8, 17}) {
      const int64_t k =
          32 * (WholeRecords(codes) ? 8 * (blocks % 3 + 1) : blocks);
      const int64_t n = 19;
      const auto layout = BlockPanels::Create(codes, k, n);
      ASSERT_EQ(layout.status(), absl::OkStatus());
      std::vector<BlockRecord> records(
          static_cast<size_t>(n * layout->records()));
      const bool nibbles = codes.scales == Scales::kNibbles;
      for (BlockRecord& r : records) {
        for (uint8_t& code : r.codes) {
          code = static_cast<uint8_t>(
              rng.Next() & ((1u << (codes.low_bits + codes.high_bits)) - 1));
        }
        for (int i = 0; i < 8; ++i) {
          r.d[i] = static_cast<uint16_t>(rng.Next());
          r.m[i] = static_cast<uint16_t>(rng.Next());
        }
        for (int i = 0; i < 16; ++i) {
          r.s[i] = static_cast<uint8_t>(rng.Next() & (nibbles ? 15 : 255));
          r.t[i] = static_cast<uint8_t>(rng.Next() & (nibbles ? 15 : 255));
        }
      }
      const auto at = [&](int64_t column, int64_t record) -> BlockRecord& {
        return records[static_cast<size_t>(column * layout->records() +
                                           record)];
      };
      GuardBuffer<uint8_t> packed(layout->bytes());
      PackBlockPanels(
          *layout,
          [&](int64_t column, int64_t record, BlockRecord* r) {
            *r = at(column, record);
          },
          packed.data(), executor);
      for (int64_t column = 0; column < n; ++column) {
        for (int64_t record = 0; record < layout->records(); ++record) {
          const BlockRecord& want = at(column, record);
          const int64_t count = layout->RecordBlocks(record);
          const PackedColumn got(lines,
                                 packed.data() +
                                     column / 16 * layout->panel_bytes() +
                                     record * layout->record_bytes(),
                                 column % 16);
          for (int64_t i = 0; i < 32 * count; ++i) {
            ASSERT_EQ(got.Code(i), want.codes[i]) << i;
          }
          if (codes.scales == Scales::kBytes) {
            ASSERT_EQ(got.M(0), 0);
          }
          const bool has_none = codes.scales == Scales::kNone;
          const bool has_d = codes.scales != Scales::kE8M0 && !has_none;
          const bool has_m = codes.scales == Scales::kF16AndMin ||
                             codes.scales == Scales::kBytesAndMins || nibbles;
          for (int64_t b = 0; b < (WholeRecords(codes) ? 1 : count); ++b) {
            if (has_d) {
              ASSERT_EQ(got.D(b), want.d[b]);
            }
            if (has_m) {
              ASSERT_EQ(got.M(b), want.m[b]);
            }
          }
          const int64_t subs = count * (32 / codes.sub_block);
          for (int64_t s = 0; s < subs; ++s) {
            if (!has_none && (WholeRecords(codes) || !has_d)) {
              ASSERT_EQ(got.S(s), want.s[s]);
            }
            if (has_m && WholeRecords(codes)) {
              ASSERT_EQ(got.T(s), want.t[s]);
            }
          }
        }
      }
    }
  }
}

// packing/code_layout.h says the same in other words.
TEST(BlockPanelsTest, WithoutScalesArePanelsOfCodesInAnotherOrder) {
  TestRng rng;
  InlineExecutor executor;
  const int64_t n = 21, k = 352;
  const auto codes = SmallIntegers<uint8_t>(rng, n * k, 0, 15);
  const auto code_at = [&](int64_t column, int64_t i) {
    return codes[static_cast<size_t>(column * k + i)];
  };
  const auto as_codes = CodeLayout::Create(4, k, n);
  const auto as_blocks = BlockPanels::Create({4, 0, 32, Scales::kNone}, k, n);
  ASSERT_EQ(as_codes.status(), absl::OkStatus());
  ASSERT_EQ(as_blocks.status(), absl::OkStatus());
  ASSERT_EQ(as_blocks->panel_bytes(), as_codes->panel_bytes());
  GuardBuffer<uint8_t> want(as_codes->bytes()), got(as_blocks->bytes());
  PackCodes(
      *as_codes, 0, [](int64_t column) { return column; }, code_at, want.data(),
      executor);
  PackBlockPanels(
      *as_blocks,
      [&](int64_t column, int64_t record, BlockRecord* r) {
        for (int64_t i = 0; i < 32 * as_blocks->RecordBlocks(record); ++i) {
          r->codes[i] =
              code_at(column, record * 256 + i / 8 * 8 + kI4Order[i % 8]);
        }
      },
      got.data(), executor);
  for (int64_t i = 0; i < as_codes->bytes(); ++i) {
    ASSERT_EQ(got.data()[i], want.data()[i]) << i;
  }
}

TEST(BlockPanelsTest, SizesAreThoseOfCodesAndScales) {
  const auto bits = [](const BlockCodes& codes) {
    return 8.0 * static_cast<double>(BlockPanels::RecordBytes(codes, 8)) /
           (16 * 256);
  };
  EXPECT_EQ(bits({4, 0, 32, Scales::kNone}), 4);
  EXPECT_EQ(bits({4, 0, 32, Scales::kF16}), 4.5);
  EXPECT_EQ(bits({8, 0, 32, Scales::kF16}), 8.5);
  EXPECT_EQ(bits({4, 0, 32, Scales::kE8M0}), 4.25);
  EXPECT_EQ(bits({4, 0, 32, Scales::kBytesAndMins}), 4.625);
  EXPECT_EQ(bits({4, 2, 16, Scales::kBytes}), 6.625);
}

TEST(BlockPanelsTest, RefusesWhatItCannotPack) {
  const BlockCodes f16 = {4, 0, 32, Scales::kF16};
  const BlockCodes bytes = {4, 0, 32, Scales::kBytes};
  constexpr int64_t kMost = (int64_t{1} << 62) / 32 * 32;
  ExpectRefusal(BlockPanels::Create(f16, 32, 0).status(),
                "n=0; need 1 or more");
  ExpectRefusal(BlockPanels::Create(f16, 0, 1).status(),
                "k=0; need a positive multiple of 32");
  ExpectRefusal(BlockPanels::Create(f16, 48, 1).status(), "multiple of 32");
  ExpectRefusal(BlockPanels::Create(bytes, 288, 1).status(), "multiple of 256");
  ExpectRefusal(BlockPanels::Create({4, 0, 16, Scales::kF16}, 32, 1).status(),
                "sub_block=16; need 32");
  ExpectRefusal(BlockPanels::Create({4, 2, 8, Scales::kBytes}, 256, 1).status(),
                "sub_block=8; need 32 or 16");
  ExpectRefusal(BlockPanels::Create(f16, kMost, 1).status(), "2^63 bytes");
  ExpectRefusal(BlockPanels::Create(f16, 1 << 20, int64_t{1} << 50).status(),
                "2^63 bytes");
}

}  // namespace
}  // namespace quern
