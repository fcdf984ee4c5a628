#include "quern/tools/perf/measure.h"

#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(SetsForTest, CoversTheColdBytes) {
  EXPECT_EQ(SetsFor(100, 256, 9, false), 3);
  EXPECT_EQ(SetsFor(256, 256, 9, false), 1);
  EXPECT_EQ(SetsFor(1000, 256, 9, false), 1);
  EXPECT_EQ(SetsFor(0, 256, 256, false), 256);
  EXPECT_EQ(SetsFor(0, 256, 255, false), 255);
  EXPECT_EQ(SetsFor(100, 256, 2, false), 2);
  EXPECT_EQ(SetsFor(100, 256, 9, true), 1);
}

}  // namespace
}  // namespace quern
