#include "quern/tools/perf/op.h"

#include "gtest/gtest.h"
#include "quern/core/limits/limit_kinds.h"

namespace quern {
namespace {

TEST(DramKindTest, IsTheNearestOfFewLines) {
  const struct {
    double read, written, updated;
    const char* name;
  } cases[] = {
      {100, 0, 0, "read"},         {0, 100, 0, "write"},
      {100, 100, 0, "copy"},       {0, 0, 100, "update"},
      {200, 100, 0, "2r+1w"},      {100, 200, 0, "1r+2w"},
      {100, 25, 0, "4r+1w"},       {1000, 1, 0, "read"},
      {20, 1, 0, "read"},          {1000, 1000, 30, "copy"},
      {200, 100, 200, "2r+1w+2u"}, {0, 0, 0, "read"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(DramKindName(DramKindOf(c.read, c.written, c.updated)), c.name)
        << c.read << " " << c.written << " " << c.updated;
  }
}

TEST(DramKindTest, HasAtMostEightLinesAndTheNearestShares) {
  for (int read = 0; read <= 40; ++read) {
    for (int updated = 0; read + updated <= 40; ++updated) {
      const int written = 40 - read - updated;
      const DramKind kind = DramKindOf(read, written, updated);
      ASSERT_GE(kind.touched(), 1);
      ASSERT_LE(kind.touched(), 8);
      // 36, 2 and 2 are all of one.
      const auto near = [&](int bytes, int lines) {
        EXPECT_NEAR(bytes / 40.0, static_cast<double>(lines) / kind.touched(),
                    0.101)
            << read << " " << written << " " << updated;
      };
      near(read, kind.reads);
      near(written, kind.writes);
      near(updated, kind.updates);
    }
  }
}

// An update in place is read and written, the same line.
TEST(OpInfoTest, TrafficCountsAnUpdateTwice) {
  OpInfo info;
  info.SetTraffic(0, 0, 64);
  EXPECT_EQ(info.bytes, 128);
  EXPECT_TRUE(info.dram_kind == DramKind::kUpdate);
  EXPECT_EQ(info.dram_kind.touched(), 1);
  EXPECT_EQ(info.dram_kind.moved(), 2);
  info.SetTraffic(200, 100);
  EXPECT_EQ(info.bytes, 300);
  EXPECT_EQ(DramKindName(info.dram_kind), "2r+1w");
}

}  // namespace
}  // namespace quern
