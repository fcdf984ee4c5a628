#include "quern/core/threads/contention.h"

#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace quern {
namespace {

using State = Contention::State;
constexpr int64_t kMs = 1'000'000;

// Two workers on two CPUs: a worker that is awake is no stranger.
TEST(ContentionTest, ACrowdIsMadeOfOtherThreads) {
  EXPECT_FALSE(IsCrowd(/*running=*/1, /*awake=*/0, /*workers=*/2, /*cpus=*/2));
  EXPECT_FALSE(IsCrowd(2, 1, 2, 2));
  EXPECT_TRUE(IsCrowd(2, 0, 2, 2));
  EXPECT_TRUE(IsCrowd(3, 1, 2, 2));
  EXPECT_FALSE(IsCrowd(3, 1, 2, 3));
}

TEST(ContentionTest, IsQuietUntilSomethingIsSeen) {
  Contention contention;
  EXPECT_TRUE(contention.quiet());
  EXPECT_EQ(contention.At(-5), State::kQuiet);
  EXPECT_EQ(contention.At(5), State::kQuiet);
}

// The budget is 1 / kAllowed of the time, for ever.
TEST(ContentionTest, LossesWithinTheBudgetChangeNothing) {
  Contention contention;
  for (int64_t i = 0; i < 1000; ++i) {
    contention.NoteStalled(i * Contention::kAllowed * kMs, kMs);
    ASSERT_TRUE(contention.quiet()) << i;
  }
}

TEST(ContentionTest, LossesBeyondTheBudgetCountWhenTheyPassTheBurst) {
  Contention contention;
  int64_t ms = 0;
  while (contention.quiet() && ms < 1000) {
    contention.NotePreempted(++ms * kMs, kMs);
  }
  // 11 ms were lost in as many, and the budget made up for 10 / kAllowed of
  // them.
  EXPECT_EQ(ms, 11);
  EXPECT_EQ(contention.At(ms * kMs), State::kContended);
  const int64_t even = ms * kMs + (11 * kMs - 10 * kMs / Contention::kAllowed) *
                                      Contention::kRatio;
  EXPECT_EQ(contention.At(even - 1), State::kContended);
  EXPECT_FALSE(contention.quiet());
  EXPECT_EQ(contention.At(even), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, AStallKeepsTheCallerAloneForAMultipleOfWhatItLost) {
  Contention contention;
  contention.NoteStalled(100 * kMs, 12 * kMs);
  const int64_t even = (100 + 12 * Contention::kRatio) * kMs;
  EXPECT_EQ(contention.At(100 * kMs), State::kAlone);
  EXPECT_EQ(contention.At(even - 1), State::kAlone);
  EXPECT_EQ(contention.At(even), State::kQuiet);
  EXPECT_TRUE(contention.quiet());
}

TEST(ContentionTest, ACrowdShortensNoState) {
  Contention contention;
  contention.NotePreempted(0, 12 * kMs);
  contention.NoteCrowd(50 * kMs);
  EXPECT_EQ(contention.At(50 * kMs), State::kContended);
  EXPECT_EQ(contention.At(12 * Contention::kRatio * kMs - 1),
            State::kContended);
  EXPECT_EQ(contention.At(12 * Contention::kRatio * kMs), State::kQuiet);
}

TEST(ContentionTest, ACrowdLastsForAsLongAsItIsSaidToAndCostsNoBudget) {
  Contention contention;
  contention.NoteCrowd(50 * kMs);
  EXPECT_FALSE(contention.quiet());
  EXPECT_EQ(contention.At(50 * kMs - 1), State::kContended);
  EXPECT_EQ(contention.At(50 * kMs), State::kQuiet);
  contention.NotePreempted(50 * kMs, 9 * kMs);
  EXPECT_TRUE(contention.quiet());
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
