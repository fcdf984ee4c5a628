#include "quern/gemm/schedule/group_line.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/grouped_rows.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

std::vector<GroupBlock> BlocksOf(const std::vector<int64_t>& counts) {
  std::vector<GroupBlock> blocks;
  int64_t first = 0;
  for (size_t g = 0; g < counts.size(); ++g) {
    if (counts[g] > 0) {
      ForEachRowBlock(counts[g], [&](int64_t row, int64_t rows) {
        blocks.push_back({static_cast<int64_t>(g), first + row, rows, 0});
      });
    }
    first += counts[g];
  }
  return blocks;
}

TEST(GroupLineTest, SharesAreEveryPanelOnce) {
  TestRng rng;
  for (int i = 0; i < 300; ++i) {
    std::vector<int64_t> counts;
    for (int64_t g = rng.Integer(1, 20); g > 0; --g) {
      counts.push_back(rng.Integer(0, 1) * rng.Integer(0, 600));
    }
    std::vector<GroupBlock> blocks = BlocksOf(counts);
    const int64_t panels = rng.Integer(1, 90);
    const GroupLine line(absl::MakeSpan(blocks), panels, rng.Integer(1, 200));
    std::set<std::pair<int64_t, int64_t>> seen;  // row and panel
    int64_t cost = 0;
    for (int64_t begin = 0; begin < line.units();) {
      EXPECT_EQ(line.CostBefore(begin), cost);
      const int64_t end = line.ShareEnd(begin);
      ASSERT_GT(end, begin);
      ASSERT_LE(end, line.units());
      line.ForEachRange(
          begin, end,
          [&](const GroupBlock& block, int64_t panel, int64_t panel_end) {
            cost += (panel_end - panel) *
                    std::max(block.rows, GroupLine::kRowsOfALoad);
            for (; panel < panel_end; ++panel) {
              EXPECT_TRUE(seen.emplace(block.first, panel).second);
            }
          });
      begin = end;
    }
    EXPECT_EQ(cost, line.cost());
    EXPECT_EQ(static_cast<int64_t>(seen.size()),
              static_cast<int64_t>(blocks.size()) * panels);
  }
}

// The time of so many workers who claim share after share, over that of workers
// who never wait; a share takes as long as it costs.
double Makespan(const std::vector<int64_t>& counts, int64_t panels,
                int64_t workers) {
  std::vector<GroupBlock> blocks = BlocksOf(counts);
  const GroupLine line(absl::MakeSpan(blocks), panels, workers);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int64_t w = 0; w < workers; ++w) free_at.push(0);
  int64_t last = 0;
  for (int64_t begin = 0; begin < line.units();) {
    const int64_t end = line.ShareEnd(begin);
    const int64_t done =
        free_at.top() + line.CostBefore(end) - line.CostBefore(begin);
    free_at.pop();
    free_at.push(done);
    last = std::max(last, done);
    begin = end;
  }
  return static_cast<double>(last) * static_cast<double>(workers) /
         static_cast<double>(line.cost());
}

// Rows of each expert for so many tokens, each with top_k different experts. A
// share `hot` of all routes goes to a tenth of the experts.
std::vector<int64_t> Routed(Rng& rng, int64_t experts, int64_t top_k,
                            int64_t tokens, double hot) {
  std::vector<int64_t> counts(static_cast<size_t>(experts));
  for (int64_t t = 0; t < tokens; ++t) {
    std::set<int64_t> chosen;
    while (static_cast<int64_t>(chosen.size()) < top_k) {
      const bool to_hot = rng.Uniform(0, 1) < hot;
      const int64_t hot_experts = std::max<int64_t>(experts / 10, top_k);
      chosen.insert(rng.Integer(0, (to_hot ? hot_experts : experts) - 1));
    }
    for (const int64_t e : chosen) ++counts[static_cast<size_t>(e)];
  }
  return counts;
}

struct Mixture {
  int64_t experts, top_k, panels;
};

TEST(GroupLineTest, SixtyFourWorkersEndTogether) {
  TestRng rng;
  // Gate and up, then down, of 2048 and 1408 in 32 experts and of 2048 and 768
  // in 128.
  for (const Mixture& m : {Mixture{32, 4, 88}, Mixture{32, 4, 128},
                           Mixture{128, 8, 48}, Mixture{128, 8, 128}}) {
    for (const int64_t tokens : {1, 16, 64, 256}) {
      for (const double hot : {0.0, 0.5, 0.9}) {
        const auto counts = Routed(rng, m.experts, m.top_k, tokens, hot);
        EXPECT_LE(Makespan(counts, m.panels, 64), 1.1)
            << m.experts << " experts, " << m.panels << " panels, " << tokens
            << " tokens, " << hot;
      }
    }
  }
}

// Blocks of whatever sizes have room where RowSlot says.
TEST(GroupedScratchTest, BlocksDoNotMeet) {
  TestRng rng;
  for (const int64_t most : {1, 3, 6, 14}) {
    TileTable table = {};
    table.max_rows = static_cast<size_t>(most);
    for (int i = 0; i < 2000; ++i) {
      int64_t row = 0, end = 0;
      while (row < 600) {
        const int64_t rows = rng.Integer(1, rng.Integer(1, kBlockRows));
        const int64_t begin = GroupedScratch<float>::RowSlot(row, most);
        ASSERT_GE(begin, end) << rows << " rows from " << row;
        const RowTiles tiles(rows, table, TileCount::kFewest);
        end = begin + tiles.count * tiles.max_size();
        row += rows;
      }
      ASSERT_LE(end, GroupedScratch<float>::RowSlot(row, most));
    }
  }
}

}  // namespace
}  // namespace quern
