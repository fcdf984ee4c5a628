#include "quern/cache/write_kv_division.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(WriteKvDivisionTest, CoversEachTokenAndHeadOnce) {
  for (int64_t tokens = 0; tokens <= 700; tokens += tokens < 70 ? 1 : 97) {
    for (const int64_t heads : {1, 2, 3, 8, 40}) {
      for (const int64_t row_elements : {2, 256, 1024}) {
        for (const int64_t workers : {1, 2, 7, 64, 256}) {
          SCOPED_TRACE(testing::Message()
                       << tokens << " tokens " << heads << " heads "
                       << row_elements << " elements " << workers
                       << " workers");
          const WriteKvDivision division(tokens, heads, row_elements, workers);
          std::vector<int> times(static_cast<size_t>(tokens * heads));
          for (int64_t task = 0; task < division.tasks(); ++task) {
            EXPECT_LT(division.TokenBegin(task), division.TokenEnd(task));
            EXPECT_LT(division.HeadBegin(task), division.HeadEnd(task));
            for (int64_t t = division.TokenBegin(task);
                 t < division.TokenEnd(task); ++t) {
              for (int64_t h = division.HeadBegin(task);
                   h < division.HeadEnd(task); ++h) {
                ++times[static_cast<size_t>(t * heads + h)];
              }
            }
          }
          ASSERT_EQ(times, std::vector<int>(times.size(), 1));
        }
      }
    }
  }
}

int64_t Tasks(int64_t tokens, int64_t heads, int64_t row_elements,
              int64_t workers) {
  return WriteKvDivision(tokens, heads, row_elements, workers).tasks();
}

TEST(WriteKvDivisionTest, HasTasksForAllWorkersWhereTheyAreWorthTheirStart) {
  // Decode: heads first.
  EXPECT_EQ(Tasks(1, 8, 256, 16), 1);
  EXPECT_EQ(Tasks(4, 8, 256, 16), 2);
  EXPECT_EQ(Tasks(16, 8, 256, 16), 8);
  EXPECT_EQ(Tasks(32, 8, 256, 16), 16);
  EXPECT_EQ(Tasks(32, 8, 256, 2), 8);
  EXPECT_EQ(Tasks(32, 32, 256, 64), 64);
  // One head is divided by tokens.
  EXPECT_EQ(Tasks(32, 1, 1088, 64), 8);
  // Prefill, as before: tokens alone.
  EXPECT_EQ(Tasks(4096, 8, 256, 2), 16);
  EXPECT_EQ(Tasks(4096, 8, 256, 16), 64);
  // One worker has nobody to share with.
  EXPECT_EQ(Tasks(32, 8, 256, 1), 1);
  EXPECT_EQ(Tasks(0, 8, 256, 16), 0);
}

}  // namespace
}  // namespace quern
