#include "quern/core/contention.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace quern {
namespace {

using State = Contention::State;
constexpr int64_t kMs = 1'000'000;

TEST(ContentionTest, IsQuietUntilSomethingIsSeen) {
  Contention contention;
  EXPECT_TRUE(contention.quiet());
  EXPECT_EQ(contention.At(-5), State::kQuiet);
  EXPECT_EQ(contention.At(5), State::kQuiet);
}

TEST(ContentionTest, APreemptedWorkerCountsForTwentyTimesWhatItLost) {
  Contention contention;
  contention.NotePreempted(100 * kMs, 3 * kMs);
  EXPECT_FALSE(contention.quiet());
  EXPECT_EQ(contention.At(100 * kMs), State::kContended);
  EXPECT_EQ(contention.At(160 * kMs - 1), State::kContended);
  EXPECT_FALSE(contention.quiet());
  EXPECT_EQ(contention.At(160 * kMs), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, AStallKeepsTheCallerAloneForFortyTimesWhatItLost) {
  Contention contention;
  contention.NoteStalled(100 * kMs, 12 * kMs);
  EXPECT_EQ(contention.At(100 * kMs), State::kAlone);
  EXPECT_EQ(contention.At(580 * kMs - 1), State::kAlone);
  EXPECT_EQ(contention.At(580 * kMs), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, AShorterNoteDoesNotEndALongerOne) {
  Contention contention;
  contention.NotePreempted(0, 10 * kMs);
  contention.NotePreempted(kMs, kMs);
  EXPECT_EQ(contention.At(200 * kMs - 1), State::kContended);
  contention.NoteStalled(2 * kMs, kMs);
  EXPECT_EQ(contention.At(3 * kMs), State::kAlone);
  EXPECT_EQ(contention.At(42 * kMs), State::kContended);
}

TEST(ContentionTest, NothingCountsForLongerThanTheLongest) {
  Contention contention;
  contention.NoteStalled(0, std::numeric_limits<int64_t>::max());
  contention.NotePreempted(0, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(contention.At(Contention::kLongestNs - 1), State::kAlone);
  EXPECT_EQ(contention.At(Contention::kLongestNs), State::kQuiet);
  contention.NotePreempted(0, -kMs);  // a clock that went back
  EXPECT_EQ(contention.At(0), State::kAlone);
}

}  // namespace
}  // namespace quern
