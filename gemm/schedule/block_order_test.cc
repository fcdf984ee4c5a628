#include "quern/gemm/schedule/block_order.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace quern {
namespace {

struct Visit {
  WeightBlock block;
  BlockStart next;
};

std::vector<Visit> VisitsOf(const TileRange& range, int64_t best) {
  std::vector<Visit> visits;
  ForEachBlock(range, best, [&](const WeightBlock& block, BlockStart next) {
    visits.push_back({block, next});
  });
  return visits;
}

// Ranges with and without a remainder of panels, of one tile and of several.
template <typename Fn>
void ForManyRanges(const Fn& fn) {
  for (const int64_t panels : {1, 2, 3, 7, 8, 13}) {
    for (const int64_t chunks : {1, 2, 5}) {
      for (const int64_t tiles : {1, 2}) {
        for (const int64_t best : {1, 2, 3, 4, 8}) {
          const TileRange range = {5, 5 + panels, 2, 2 + tiles, 3, 3 + chunks};
          SCOPED_TRACE(testing::Message()
                       << "panels=" << panels << " chunks=" << chunks
                       << " tiles=" << tiles << " best=" << best);
          fn(range, best);
        }
      }
    }
  }
}

TEST(BlockOrderTest, EveryChunkOfEveryPanelIsVisitedOnceInTheOrderOfChunks) {
  ForManyRanges([](const TileRange& range, int64_t best) {
    std::vector<int64_t> next_chunk(static_cast<size_t>(range.panel_end),
                                    range.chunk);
    for (const Visit& visit : VisitsOf(range, best)) {
      ASSERT_LE(visit.block.panels(), best);
      ASSERT_GE(visit.block.panel, range.panel);
      ASSERT_LE(visit.block.panel + visit.block.panels(), range.panel_end);
      for (int64_t i = 0; i < visit.block.panels(); ++i) {
        const auto panel = static_cast<size_t>(visit.block.panel + i);
        ASSERT_EQ(next_chunk[panel]++, visit.block.chunk);
      }
    }
    for (int64_t p = range.panel; p < range.panel_end; ++p) {
      EXPECT_EQ(next_chunk[static_cast<size_t>(p)], range.chunk_end);
    }
  });
}

TEST(BlockOrderTest, NextIsTheBlockThatFollows) {
  ForManyRanges([](const TileRange& range, int64_t best) {
    const std::vector<Visit> visits = VisitsOf(range, best);
    for (size_t i = 0; i < visits.size(); ++i) {
      const bool last = i + 1 == visits.size();
      EXPECT_EQ(visits[i].next.panel,
                last ? range.panel_end : visits[i + 1].block.panel);
      EXPECT_EQ(visits[i].next.chunk,
                last ? range.chunk : visits[i + 1].block.chunk);
    }
  });
}

TEST(BlockOrderTest, OneTileReadsAGroupOfPanelsFromEndToEnd) {
  ForManyRanges([](const TileRange& range, int64_t best) {
    if (range.tile_end - range.tile > 1) return;
    for (const Visit& visit : VisitsOf(range, best)) {
      const int64_t group = (visit.block.panel - range.panel) / best;
      const int64_t next = (visit.next.panel - range.panel) / best;
      if (visit.block.chunk + 1 < range.chunk_end) {
        EXPECT_EQ(next, group);
      }
    }
  });
}

TEST(BlockOrderTest, SeveralTilesReadAllPanelsForOneChunk) {
  ForManyRanges([](const TileRange& range, int64_t best) {
    if (range.tile_end - range.tile == 1) return;
    int64_t chunk = range.chunk;
    for (const Visit& visit : VisitsOf(range, best)) {
      EXPECT_GE(visit.block.chunk, chunk);
      chunk = visit.block.chunk;
    }
  });
}

TEST(BlockOrderTest, TheFirstBlockOfAGroupStartsItsChunk) {
  ForManyRanges([](const TileRange& range, int64_t best) {
    const int64_t width =
        range.tile_end - range.tile == 1 ? best : range.panel_end - range.panel;
    for (const Visit& visit : VisitsOf(range, best)) {
      EXPECT_EQ(visit.block.starts_chunk,
                (visit.block.panel - range.panel) % width == 0);
    }
  });
}

TEST(BlockOrderTest, FloorLog2IsThatOfTheLargestPowerOfTwo) {
  const size_t expected[] = {0, 1, 1, 2, 2, 2, 2, 3, 3};
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(FloorLog2(static_cast<int64_t>(i) + 1), expected[i]);
  }
}

}  // namespace
}  // namespace quern
