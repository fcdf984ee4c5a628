#include "quern/models/decoder/split_blocks.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

TEST(SplitBlocksTest, HasTheCodeAndTheScaleOfEveryValue) {
  TestRng rng;
  ManyWorkers executor(3);
  for (const BlockFormat format : {BlockFormat::kQ4_0, BlockFormat::kQ8_0}) {
    const auto& info = *FindBlockFormat(static_cast<uint32_t>(format));
    for (const int64_t n : {1, 31, 32, 33, 70}) {
      for (const int64_t k : {32, 96}) {
        SCOPED_TRACE(testing::Message() << info.name << " " << n << " " << k);
        const GuardBuffer<uint8_t> blocks(
            RandomBlocks(rng, format, n * k / 32, 1.0));
        const auto split = Split(format, blocks.data(), n, k, executor);
        ASSERT_EQ(split.status(), absl::OkStatus());
        const auto* codes = split->codes.data();
        const auto* scales = split->scales.data<Float16>();
        for (int64_t i = 0; i < n * k; ++i) {
          const auto want = ReferenceValue(
              format, blocks.data() + i / 32 * info.bytes, i % 32);
          // The oracle's codes of int8 are above -128.
          const int64_t code = format == BlockFormat::kQ4_0
                                   ? codes[i]
                                   : static_cast<int8_t>(codes[i]) + 128;
          ASSERT_EQ(code, want.code) << i;
          ASSERT_EQ(ToDouble(scales[i % k / 32 * n + i / k]), want.step) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern
