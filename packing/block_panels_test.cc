#include "quern/packing/block_panels.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/packing/block_panels_testutil.h"
#include "quern/packing/code_layout.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Scales = BlockScales;

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
  GuardBuffer<uint8_t> packed(as_codes->bytes());
  PackCodes(
      *as_codes, 0, [](int64_t column) { return column; }, code_at,
      packed.data(), executor);
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t i = 0; i < k; ++i) {
      const PackedColumn got(LinesOf(as_blocks->codes()),
                             packed.data() +
                                 column / 16 * as_blocks->panel_bytes() +
                                 i / 256 * as_blocks->record_bytes(),
                             column % 16);
      ASSERT_EQ(got.Code(i % 256), code_at(column, i / 8 * 8 + kI4Order[i % 8]))
          << column << " " << i;
    }
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
  EXPECT_EQ(bits({2, 0, 32, Scales::kRecordF16}), 2.125);
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
  ExpectRefusal(
      BlockPanels::Create({2, 0, 32, Scales::kRecordF16}, 32, 1).status(),
      "multiple of 256");
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
