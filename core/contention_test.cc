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

// A twentieth of the time is the budget: 1 ms in 20, for ever.
TEST(ContentionTest, LossesWithinTheBudgetChangeNothing) {
  Contention contention;
  for (int64_t ms = 0; ms < 10000; ms += 20) {
    contention.NoteStalled(ms * kMs, kMs);
    ASSERT_TRUE(contention.quiet()) << ms;
  }
}

TEST(ContentionTest, LossesBeyondTheBudgetCountWhenTheyPassTheBurst) {
  Contention contention;
  int64_t ms = 0;
  while (contention.quiet() && ms < 1000)
    contention.NotePreempted(++ms * kMs, kMs);
  EXPECT_EQ(ms, 3);  // 3 ms lost in 3, of which 0.1 are in the budget
  EXPECT_EQ(contention.At(3 * kMs), State::kContended);
  EXPECT_EQ(contention.At(61 * kMs - 1), State::kContended);
  EXPECT_FALSE(contention.quiet());
  EXPECT_EQ(contention.At(61 * kMs), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, AStallKeepsTheCallerAloneForTwentyTimesWhatItLost) {
  Contention contention;
  contention.NoteStalled(100 * kMs, 12 * kMs);
  EXPECT_EQ(contention.At(100 * kMs), State::kAlone);
  EXPECT_EQ(contention.At(340 * kMs - 1), State::kAlone);
  EXPECT_EQ(contention.At(340 * kMs), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, AShortStallMakesThePoolCarefulAlone) {
  Contention contention;
  contention.NoteStalled(0, 3 * kMs);
  EXPECT_EQ(contention.At(60 * kMs - 1), State::kContended);
  EXPECT_EQ(contention.At(60 * kMs), State::kQuiet);
}

TEST(ContentionTest, NothingCountsForLongerThanTheLongest) {
  Contention contention;
  for (int i = 0; i < 3; ++i) {
    contention.NoteStalled(0, std::numeric_limits<int64_t>::max());
    contention.NotePreempted(0, std::numeric_limits<int64_t>::max());
  }
  EXPECT_EQ(contention.At(Contention::kLongestNs - 1), State::kAlone);
  EXPECT_EQ(contention.At(Contention::kLongestNs), State::kQuiet);
  contention.NotePreempted(0, -kMs);  // a clock that went back
  EXPECT_EQ(contention.At(0), State::kAlone);
}

}  // namespace
}  // namespace quern
