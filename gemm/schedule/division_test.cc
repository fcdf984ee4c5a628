#include "quern/gemm/schedule/division.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

using ::testing::ElementsAre;

Division Of(int64_t rows, int64_t panels, int64_t lines, int64_t workers) {
  return Division::Of(rows, (rows + 13) / 14, panels, lines,
                      (lines + 255) / 256, workers);
}

TEST(DivisionTest, UnitsHoldAllPanels) {
  for (const int64_t workers : {1, 2, 3, 8, 64}) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 256}) {
      for (int64_t panels = 1; panels < 700; panels += panels < 300 ? 1 : 13) {
        const Division d = Of(rows, panels, 2048, workers);
        ASSERT_EQ(d.panel(0), 0);
        ASSERT_EQ(d.panel(d.units), panels);
        int64_t most = 0, least = panels;
        for (int64_t unit = 0; unit < d.units; ++unit) {
          const int64_t size = d.panel(unit + 1) - d.panel(unit);
          most = size > most ? size : most;
          // The last may lack one of its pair.
          if (unit + 1 < d.units) least = size < least ? size : least;
          ASSERT_GE(size, 1);
        }
        EXPECT_LE(most, Division::MostPanels(rows));
        EXPECT_LE(rows * most, Division::MostSums(rows));
        EXPECT_LE(rows * most, Division::MostSums(rows + 1));
        if (d.share_units == 0 && d.units > 1) {
          EXPECT_LE(most - least, 2);
        }
        EXPECT_GE(d.row_groups, 1);
        EXPECT_LE(d.row_groups, (rows + 13) / 14);
      }
    }
  }
}

TEST(DivisionTest, WorkersShareOneRowAndTheirLastUnitsAreSmall) {
  const auto sizes = [](const Division& d) {
    std::vector<int64_t> sizes;
    for (int64_t unit = 0; unit < d.units; ++unit) {
      sizes.push_back(d.panel(unit + 1) - d.panel(unit));
    }
    return sizes;
  };
  EXPECT_THAT(sizes(Of(1, 128, 2048, 2)),
              ElementsAre(32, 16, 8, 8, 32, 16, 8, 8));
  // No unit has more panels than Division::MostPanels.
  EXPECT_THAT(sizes(Of(1, 352, 2048, 2)),
              ElementsAre(58, 58, 30, 14, 16, 58, 58, 30, 14, 16));
  EXPECT_THAT(sizes(Of(4, 128, 2048, 2)),
              ElementsAre(16, 16, 16, 8, 4, 4, 16, 16, 16, 8, 4, 4));
  EXPECT_EQ(Of(8, 128, 2048, 2).share_units, 0);
  EXPECT_EQ(Of(1, 128, 64, 2).share_units, 0);  // little work
  EXPECT_EQ(Of(1, 128, 2048, 16).share_units, 0);
}

TEST(DivisionTest, EveryWorkerHasTheSameNumberOfTasks) {
  // A router, a down projection to few columns, and odd ones: rows first.
  for (const int64_t panels : {4, 9, 31, 36, 63}) {
    for (const int64_t rows : {1, 16, 256}) {
      EXPECT_EQ(Of(rows, panels, 1024, 2).tasks() % 2, 0)
          << panels << " panels, " << rows << " rows";
    }
  }
  EXPECT_EQ(Of(256, 4, 1024, 2).row_groups, 8);
  EXPECT_EQ(Of(256, 4, 1024, 2).units, 1);
  // Many rows: half of them for each worker.
  EXPECT_EQ(Of(256, 256, 1024, 2).row_groups, 2);
  EXPECT_EQ(Of(256, 256, 1024, 2).units, 32);
}

TEST(DivisionTest, LittleWorkIsOneTaskPerWorker) {
  EXPECT_EQ(Of(16, 4, 1024, 2).tasks(), 2);
}

TEST(DivisionTest, OnePanelOfOneRowDividesK) {
  EXPECT_GT(Of(1, 1, 2048, 2).k_pieces, 1);
  EXPECT_EQ(Of(64, 1, 2048, 2).k_pieces, 1);
}

}  // namespace
}  // namespace quern
