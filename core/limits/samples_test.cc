#include "quern/core/limits/samples.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/limits/timer.h"

namespace quern {
namespace {

TEST(TimerTest, MedianIsTheMiddle) {
  EXPECT_TRUE(std::isnan(Median({})));
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1}), 5);
  EXPECT_EQ(Median({9, 1, 2}), 2);
  EXPECT_EQ(Median({4, 100, 1, 2}), 3);
}

TEST(TimerTest, SmallestAndLargest) {
  EXPECT_TRUE(std::isnan(Smallest({})));
  EXPECT_TRUE(std::isnan(Largest({})));
  EXPECT_EQ(Smallest({2, -1, 3}), -1);
  EXPECT_EQ(Largest({2, -1, 3}), 3);
}

TEST(TimerTest, RunDelayOnlyGrows) {
  const int64_t before = RunDelayNanoseconds();
  EXPECT_GE(before, 0);
  EXPECT_GE(RunDelayNanoseconds(), before);
}

TEST(SamplesTest, LeavesDisturbedOnesOut) {
  Samples samples;
  for (const double value : {1.0, 2.0, 3.0}) samples.Add(value, 0.01);
  samples.Add(100, 0.03);
  EXPECT_EQ(samples.Used(), (std::vector<double>{1, 2, 3}));
  EXPECT_EQ(samples.clean(), 3);
  EXPECT_EQ(samples.disturbed(), 1);
}

TEST(SamplesTest, UsesTheLeastDisturbedWhereFewAreClean) {
  Samples samples;
  samples.Add(1, 0.9);
  samples.Add(2, 0);
  EXPECT_EQ(samples.Used(), (std::vector<double>{2, 1}));
  samples.Add(3, 0.5);
  samples.Add(4, 0.4);
  samples.Add(5, 0.7);
  EXPECT_EQ(samples.Used(), (std::vector<double>{2, 4, 3}));
  for (int i = 0; i < 11; ++i) samples.Add(6, 0.6);
  EXPECT_EQ(samples.Used(), (std::vector<double>{2, 4, 3, 6}));
}

TEST(TakeMoreTest, EndsWithEnoughCleanOnesOrThreeTimesAsMany) {
  Samples clean;
  EXPECT_TRUE(TakeMore(clean, 5, 0));
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(TakeMore(clean, 5, 100)) << i;
    clean.Add(1, 0);
  }
  EXPECT_FALSE(TakeMore(clean, 5, 0));

  Samples disturbed;
  for (int i = 0; i < 3; ++i) disturbed.Add(1, 0);
  for (int i = 3; i < 15; ++i) {
    EXPECT_TRUE(TakeMore(disturbed, 5, 100)) << i;
    disturbed.Add(1, 1);
  }
  EXPECT_FALSE(TakeMore(disturbed, 5, 0));
}

TEST(TakeMoreTest, TriesForThreeSecondsToGetThreeCleanOnes) {
  Samples samples;
  for (int i = 0; i < 100; ++i) samples.Add(1, 1);
  EXPECT_TRUE(TakeMore(samples, 5, 2.9));
  EXPECT_FALSE(TakeMore(samples, 5, 3));
}

TEST(CollectTest, KeepsWhatWasTaken) {
  int calls = 0;
  const Samples samples = Collect(5, [&] { return double{1} * ++calls; });
  EXPECT_GE(calls, 5);
  EXPECT_EQ(samples.taken(), calls);
  EXPECT_LE(samples.clean(), 5);
}

TEST(SamplesTest, SlicesInTheOrderOfTaking) {
  Samples samples;
  for (const double value : {4.0, 1.0, 3.0, 2.0}) samples.Add(value, 0);
  EXPECT_EQ(samples.Slice(0, 2).Used(), (std::vector<double>{4, 1}));
  EXPECT_EQ(samples.Slice(1, 4).Used(), (std::vector<double>{1, 3, 2}));
  EXPECT_EQ(samples.Slice(2, 2).taken(), 0);
}

Bound BoundOfValues(const std::vector<double>& values) {
  Samples samples;
  for (const double value : values) samples.Add(value, 0);
  return BoundOf(samples);
}

TEST(BoundOfTest, IsTheLargerOfBeforeAndAfter) {
  EXPECT_EQ(BoundOfValues({100, 101}).value, 101);
  EXPECT_EQ(BoundOfValues({101, 100, 100, 99}).value, 100.5);
  EXPECT_EQ(BoundOfValues({20, 21, 19, 40, 39, 41}).value, 40);
  // The one in the middle is in both halves.
  EXPECT_EQ(BoundOfValues({100, 90, 80}).value, 95);
}

TEST(BoundOfTest, IsSteadyWhereBeforeAndAfterAgree) {
  EXPECT_TRUE(BoundOfValues({100, 104}).steady);
  EXPECT_FALSE(BoundOfValues({100, 106}).steady);
  EXPECT_FALSE(BoundOfValues({106, 100}).steady);
  // One sample has no other to agree with.
  EXPECT_FALSE(BoundOfValues({100}).steady);
}

TEST(BoundOfTest, IsNotSteadyWhereOneSampleWasMuchFaster) {
  EXPECT_TRUE(BoundOfValues({100, 100, 109, 100, 100, 100}).steady);
  EXPECT_FALSE(BoundOfValues({100, 100, 112, 100, 100, 100}).steady);
  // Slow samples are neighbours; the limit is not lower for them.
  EXPECT_TRUE(BoundOfValues({100, 100, 50, 100, 100, 100}).steady);
}

}  // namespace
}  // namespace quern
