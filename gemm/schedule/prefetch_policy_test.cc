// What a core decides about how few rows read their weights. Which core runs
// the test does not matter.

#include "quern/gemm/schedule/prefetch_policy.h"

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "quern/core/dtype.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/gemm/kernels/int8_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {
namespace {

constexpr int64_t kLarge = 4 << 20;

// Whether a layer of so many bytes has the panels of one stream.
bool InOneStream(CpuCore core, int64_t layer_bytes) {
  constexpr size_t kPanels[] = {0, 4}, kInOneStream[] = {0, 1};
  TileTable table = {};
  table.max_rows = 1;
  table.panels = kPanels;
  table.panels_in_one_stream = kInOneStream;
  ReadInOneStream(core, layer_bytes, table);
  EXPECT_TRUE(table.panels == kPanels || table.panels == kInOneStream);
  return table.panels == kInOneStream;
}

TEST(ReadInOneStreamTest, IsForLargeLayersOnZen4) {
  EXPECT_TRUE(InOneStream(CpuCore::kZen4, kLarge));
  EXPECT_FALSE(InOneStream(CpuCore::kZen4, kLarge - 1));
  EXPECT_FALSE(InOneStream(CpuCore::kZen3, kLarge));
  EXPECT_FALSE(InOneStream(CpuCore::kUnknown, kLarge));
}

// With AVX-512 two rows keep up with one stream, else one row of int8.
template <class Set>
void ExpectFewRowsInOneStream(absl::Span<const Set> sets, size_t narrow_rows) {
  for (const Set& set : sets) {
    if (!set.runs()) continue;
    SCOPED_TRACE(set.isa.name());
    const TileTable table = set.get(DType::kF32).table;
    const size_t few = set.isa.highway <= HWY_AVX3 ? 2 : narrow_rows;
    for (size_t rows = 1; rows <= table.max_rows; ++rows) {
      EXPECT_EQ(table.panels_in_one_stream[rows],
                rows <= few ? 1 : table.panels[rows])
          << rows << " rows";
    }
  }
}

TEST(ReadInOneStreamTest, IsForFewRows) {
  ExpectFewRowsInOneStream(LinearKernelSetsBF16(), 0);
  ExpectFewRowsInOneStream(LinearKernelSetsF16(), 0);
  ExpectFewRowsInOneStream(LinearKernelSetsF32(), 0);
  ExpectFewRowsInOneStream(Int8KernelSets(), 1);
}

TEST(FusedAheadBytesTest, IsNearForOneRowOnZen4) {
  constexpr int64_t kNear = 512, kFar = 8 << 10;
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen4, 1), kNear);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen4, 2), kFar);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen3, 1), kFar);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kUnknown, 1), kFar);
}

}  // namespace
}  // namespace quern
