#include "examples/generate/machine_limits.h"

#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {
namespace {

// 20 GB/s; 100, 200 and 400 GFLOP/s.
constexpr MachineLimits kLimits = {20, 100, 200, 400, true};

// 4 GB take 0.2 s; 10 + 20 + 40 GFLOP take 0.1 s each.
DecoderWork Example() {
  DecoderWork work;
  work.weight_bytes = 3'000'000'000;
  work.cache_bytes = 1'000'000'000;
  work.f32_ops = 10'000'000'000;
  work.bf16_ops = 20'000'000'000;
  work.int8_ops = 40'000'000'000;
  return work;
}

TEST(MachineLimitsTest, AddsTheTimesOfProductsOfAllTypes) {
  EXPECT_DOUBLE_EQ(kLimits.ReadSeconds(Example()), 0.2);
  EXPECT_DOUBLE_EQ(kLimits.ComputeSeconds(Example()), 0.3);
}

TEST(MachineLimitsTest, ASpeedIsHeldAgainstTheLongerOfTheTwoTimes) {
  DecoderWork work = Example();
  EXPECT_EQ(SpeedText(100, 0.5, work, nullptr),
            "100 tokens, 0.5000 s, 200 tokens/s, 8.00 GB/s, 140 GOP/s");
  const auto text = [&work](int64_t tokens) {
    const LeastSeconds least = {kLimits.ReadSeconds(work),
                                kLimits.ComputeSeconds(work)};
    return SpeedText(tokens, 0.5, work, &least);
  };
  EXPECT_EQ(text(100),
            "100 tokens, 0.5000 s, 200 tokens/s, 8.00 GB/s, 140 GOP/s, "
            "0.60 of the arithmetic limit");
  work.f32_ops = work.bf16_ops = 0;
  EXPECT_EQ(text(1),
            "1 tokens, 0.5000 s, 2 tokens/s, 8.00 GB/s, 80.0 GOP/s, "
            "0.40 of the DRAM limit");
  work.bf16_ops = 40'000'000'000;
  work.int8_ops = 0;
  EXPECT_EQ(text(1),
            "1 tokens, 0.5000 s, 2 tokens/s, 8.00 GB/s, 80.0 GFLOP/s, "
            "0.40 of the DRAM limit");
}

TEST(MachineLimitsTest, AStepIsHeldAgainstTheFasterOfTheReadsBesideIt) {
  // 4 GB
  EXPECT_DOUBLE_EQ(StepReadSeconds(Example(), 20, 40), 0.1);
  EXPECT_DOUBLE_EQ(StepReadSeconds(Example(), 40, 20), 0.1);
}

// A text of one token takes no step.
TEST(MachineLimitsTest, NoTimeIsNoSpeed) {
  const LeastSeconds least;
  EXPECT_EQ(SpeedText(1, 0, DecoderWork(), &least),
            "1 tokens, 0.0000 s, 0 tokens/s, 0.00 GB/s, 0.00 GFLOP/s, "
            "0.00 of the DRAM limit");
}

TEST(MachineLimitsTest, TellsTheLimitsAndWhetherTheyWereSteady) {
  EXPECT_EQ(LimitsText(kLimits),
            "DRAM read 20.0 GB/s, f32 100 GFLOP/s, bf16 200 GFLOP/s, int8 400 "
            "GOP/s");
  MachineLimits limits = kLimits;
  limits.steady = false;
  EXPECT_EQ(LimitsText(limits),
            LimitsText(kLimits) + "; not the same before and after the text");
}

TEST(LimitMeterTest, MeasuresEveryLimit) {
  InlineExecutor executor;
  LimitMeter meter;
  ASSERT_TRUE(meter.Take(executor).ok());
  ASSERT_TRUE(meter.Take(executor).ok());
  const MachineLimits limits = meter.Result();
  EXPECT_GT(limits.dram_gbps, 0);
  EXPECT_GT(limits.f32_gops, 0);
  EXPECT_GT(limits.bf16_gops, 0);
  EXPECT_GT(limits.int8_gops, 0);
}

TEST(LimitMeterTest, AddsTheLeastTimeOfEveryStep) {
  InlineExecutor executor;
  LimitMeter meter;
  ASSERT_TRUE(meter.Take(executor).ok());
  meter.BeforeSteps(executor);
  EXPECT_EQ(meter.step_read_seconds(), 0);
  meter.AfterStep(Example(), executor);
  const double one = meter.step_read_seconds();
  EXPECT_GT(one, 0);
  meter.AfterStep(DecoderWork(), executor);
  EXPECT_EQ(meter.step_read_seconds(), one);
  meter.AfterStep(Example(), executor);
  EXPECT_GT(meter.step_read_seconds(), one);
}

}  // namespace
}  // namespace quern
