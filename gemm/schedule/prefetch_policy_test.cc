// What a core decides about how few rows read their weights. Which core runs
// the test does not matter.

#include "quern/gemm/schedule/prefetch_policy.h"

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"
#include "quern/core/cpu_core.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {
namespace {

TileTable FourPanels() {
  TileTable table = {};
  for (size_t& panels : table.panels) panels = 4;
  return table;
}

TEST(ReadInOneStreamTest, IsForFewRowsOfLargeLayersOnZen4) {
  constexpr int64_t kLarge = 4 << 20;
  TileTable table = FourPanels();
  ReadInOneStream(CpuCore::kZen4, kLarge, 2, table);
  EXPECT_EQ(table.panels[1], 1u);
  EXPECT_EQ(table.panels[2], 1u);
  EXPECT_EQ(table.panels[3], 4u);

  table = FourPanels();
  ReadInOneStream(CpuCore::kZen4, kLarge - 1, 2, table);
  ReadInOneStream(CpuCore::kZen4, kLarge, 0, table);
  ReadInOneStream(CpuCore::kZen3, kLarge, 2, table);
  ReadInOneStream(CpuCore::kUnknown, kLarge, 2, table);
  for (const size_t panels : table.panels) EXPECT_EQ(panels, 4u);
}

TEST(FusedAheadBytesTest, IsNearForOneRowOnZen4) {
  constexpr int64_t kNear = 512, kFar = 8 << 10;
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen4, 1), kNear);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen4, 2), kFar);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kZen3, 1), kFar);
  EXPECT_EQ(FusedAheadBytes(CpuCore::kUnknown, 1), kFar);
}

TEST(LineIsAVectorTest, IsSoWithAvx512) {
  for (const char* target : {"AVX3", "AVX3_DL", "AVX3_ZEN4"}) {
    EXPECT_TRUE(LineIsAVector(target)) << target;
  }
  for (const char* target : {"AVX2", "AVX2_VNNI", "SSE4", "SSE2", "EMU128"}) {
    EXPECT_FALSE(LineIsAVector(target)) << target;
  }
}

}  // namespace
}  // namespace quern
