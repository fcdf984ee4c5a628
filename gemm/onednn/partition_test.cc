#include "quern/gemm/onednn/partition.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "quern/core/math_util.h"

namespace quern {
namespace {

int64_t Tasks(int64_t m, int64_t n, int64_t workers) {
  const int64_t columns = DivCeil(n, ColsPerTask(n));
  return DivCeil(m, RowsPerTask(m, columns, workers)) * columns;
}

TEST(PartitionTest, FewWorkersHaveTheLargestTasks) {
  for (const int64_t m : {1, 16, 256, 1000}) {
    EXPECT_EQ(RowsPerTask(m, 16, 1), kMaxMatmulRows);
    EXPECT_EQ(RowsPerTask(m, 16, 2), kMaxMatmulRows);
    EXPECT_EQ(RowsPerTask(m, 28, 4), kMaxMatmulRows);
  }
}

TEST(PartitionTest, ManyWorkersAllHaveATask) {
  EXPECT_EQ(Tasks(256, 4096, 16), 16);
  for (const int64_t workers : {17, 24, 32, 48, 64, 96, 127, 128}) {
    for (const int64_t n : {4096, 5120, 14336}) {
      EXPECT_GE(Tasks(256, n, workers), workers)
          << workers << " workers, n=" << n;
    }
  }
}

TEST(PartitionTest, WithoutPromiseOfBitsTheShapeAloneDivides) {
  EXPECT_EQ(RowsPerTaskOfAnyWorkers(256, 16), 128);
  EXPECT_EQ(RowsPerTaskOfAnyWorkers(256, 64), 256);
  EXPECT_EQ(RowsPerTaskOfAnyWorkers(1024, 16), 256);
}

// A full block is never padded: its rows are a bucket.
TEST(PartitionTest, BlocksAreRowBuckets) {
  for (int64_t workers = 1; workers <= 256; ++workers) {
    for (const int64_t m : {1, 33, 256, 300}) {
      for (const int64_t columns : {1, 2, 16, 28}) {
        const int64_t rows = RowsPerTask(m, columns, workers);
        EXPECT_EQ(rows, RowBucket(rows));
        EXPECT_EQ(kMaxMatmulRows % rows, 0);
        EXPECT_GE(rows, kMinMatmulRows);
      }
    }
  }
}

// The rows of all blocks, of which the last is padded, take no more scratch
// than one block of as many rows, which is what WorkspaceBytes counts.
TEST(PartitionTest, BlocksPadNoMoreThanOneBlock) {
  for (const int64_t block : {32, 64, 128, 256}) {
    for (int64_t rows = 1; rows <= kMaxMatmulRows; ++rows) {
      const int64_t tail = rows % block;
      EXPECT_LE(rows - tail + (tail == 0 ? 0 : RowBucket(tail)),
                RowBucket(rows))
          << rows << " rows in blocks of " << block;
    }
  }
}

}  // namespace
}  // namespace quern
