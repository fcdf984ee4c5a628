#include "quern/core/algorithms/checksum.h"

#include "gtest/gtest.h"

namespace quern {
namespace {

// The values are test vectors of draft-eastlake-fnv.
TEST(Fnv1aTest, HasThePublishedValues) {
  EXPECT_EQ(Fnv1a("", 0), 0xcbf29ce484222325u);
  EXPECT_EQ(Fnv1a("a", 1), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(Fnv1a("foobar", 6), 0x85944171f73967e8u);
}

TEST(Fnv1aTest, GoesOnFromAnEarlierCall) {
  EXPECT_EQ(Fnv1a("bar", 3, Fnv1a("foo", 3)), Fnv1a("foobar", 6));
}

}  // namespace
}  // namespace quern
