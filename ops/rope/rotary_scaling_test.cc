#include "quern/ops/rope/rotary_scaling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

RotaryFrequencies Compute(int64_t rot_dim, double base,
                          const RotaryScaling& scaling) {
  const auto result = ComputeRotaryFrequencies(rot_dim, base, scaling);
  EXPECT_TRUE(result.ok()) << result.status();
  return *result;
}

// Compares with relative tolerance 1e-6, the digits of the published values.
void ExpectFrequency(const RotaryFrequencies& of, size_t j, double want) {
  EXPECT_NEAR(of.frequencies.at(j) / want, 1.0, 1e-6) << j;
}

TEST(RotaryScalingTest, NoneIsThePowersOfTheBase) {
  const RotaryFrequencies of = Compute(4, 1e4, {});
  EXPECT_EQ(of.frequencies.size(), 2u);
  EXPECT_EQ(of.frequencies[0], 1.0);
  EXPECT_DOUBLE_EQ(of.frequencies[1], 0.01);
  EXPECT_EQ(of.magnitude, 1.0);
}

TEST(RotaryScalingTest, LinearDivides) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kLinear;
  s.factor = 4.0;
  EXPECT_DOUBLE_EQ(Compute(4, 1e4, s).frequencies[1], 0.0025);
}

TEST(RotaryScalingTest, Llama3HasThePublishedFrequencies) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kLlama3;
  s.factor = 8.0;
  s.original = 8192;
  const RotaryFrequencies of = Compute(128, 5e5, s);
  ExpectFrequency(of, 0, 1.0);
  ExpectFrequency(of, 28, 3.211446e-3);
  ExpectFrequency(of, 30, 1.371894e-3);
  ExpectFrequency(of, 34, 1.785078e-4);
  ExpectFrequency(of, 36, 7.784655e-5);
  ExpectFrequency(of, 63, 3.068926e-7);
}

TEST(RotaryScalingTest, YarnHasTheFrequenciesOfDeepSeek) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kYarn;
  s.factor = 40.0;
  s.original = 4096;
  const RotaryFrequencies of = Compute(64, 1e4, s);
  ExpectFrequency(of, 0, 1.0);
  ExpectFrequency(of, 9, 7.498942e-2);
  ExpectFrequency(of, 10, 5.623413e-2);
  ExpectFrequency(of, 16, 5.5e-3);
  ExpectFrequency(of, 23, 3.333803e-5);
  ExpectFrequency(of, 31, 3.333804e-6);
  EXPECT_NEAR(of.magnitude, 1.36888795, 1e-8);
  // DeepSeek's mscale and mscale_all_dim cancel where they are equal.
  s.mscale = s.mscale_all_dim = 0.707;
  EXPECT_EQ(Compute(64, 1e4, s).magnitude, 1.0);
  s.mscale = 1.0;
  EXPECT_NEAR(Compute(64, 1e4, s).magnitude,
              1.36888795 / (0.1 * 0.707 * std::log(40.0) + 1.0), 1e-8);
  // With only one of mscale and mscale_all_dim given, the other counts as 0.
  s.mscale = 0.0;
  EXPECT_NEAR(Compute(64, 1e4, s).magnitude,
              1.0 / (0.1 * 0.707 * std::log(40.0) + 1.0), 1e-8);
}

// gpt-oss: rope_theta 150000, factor 32, original 4096, truncate false. The
// ramp goes from 8.0929 to 17.3980 instead of 8 to 18.
TEST(RotaryScalingTest, YarnWithoutTruncationHasTheFrequenciesOfGptOss) {
  constexpr double kBase = 150000;
  RotaryScaling s;
  s.kind = RotaryScalingKind::kYarn;
  s.factor = 32.0;
  s.original = 4096;
  s.truncate = false;
  const auto dim = [](double rotations) {
    return 64 * std::log(4096 / (rotations * 2 * 3.14159265358979)) /
           (2 * std::log(kBase));
  };
  const double low = dim(32), high = dim(1);
  EXPECT_NEAR(low, 8.0929, 1e-3);
  EXPECT_NEAR(high, 17.3980, 1e-3);
  const RotaryFrequencies of = Compute(64, kBase, s);
  const auto expect = [](const RotaryFrequencies& got, double from, double to) {
    for (int j = 0; j < 32; ++j) {
      const double w = std::pow(kBase, -j / 32.0);
      const double ramp = std::clamp((j - from) / (to - from), 0.0, 1.0);
      EXPECT_NEAR(got.frequencies[static_cast<size_t>(j)] / w,
                  ramp / 32 + 1 - ramp, 1e-9)
          << "pair " << j;
    }
  };
  expect(of, low, high);
  EXPECT_NEAR(of.magnitude, 0.1 * std::log(32.0) + 1.0, 1e-12);
  s.truncate = true;
  expect(Compute(64, kBase, s), 8, 18);
}

TEST(RotaryScalingTest, YarnRampsWithinThePairsThatThereAre) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kYarn;
  s.factor = 4.0;
  s.original = int64_t{1} << 40;
  s.beta_fast = 1e9;
  s.extrapolation = 0.5;
  s.attention_factor = 3.0;
  const RotaryFrequencies of = Compute(8, 1e4, s);
  // low = floor(2.24), high = ceil(11.2) but at most 7: ramp[3] = 1 / 5.
  const double z = 0.8 * 0.5;
  EXPECT_NEAR(of.frequencies[3], 1e-3 * ((1 - z) / 4 + z), 1e-15);
  EXPECT_NEAR(of.frequencies[0], 0.5 / 4 + 0.5, 1e-12);
  EXPECT_NEAR(of.magnitude, 3.0 * (0.1 * std::log(4.0) + 1.0), 1e-12);
}

TEST(RotaryScalingTest, DynamicNtkGrowsTheBase) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kDynamicNtk;
  s.factor = 2.0;
  s.original = 4096;
  s.target = 8192;
  const double base = 1e4 * std::pow(3.0, 8.0 / 6.0);
  EXPECT_NEAR(Compute(8, 1e4, s).frequencies[3], std::pow(base, -0.75), 1e-12);
  // With target equal to original, the frequencies do not change.
  s.target = 4096;
  EXPECT_NEAR(Compute(8, 1e4, s).frequencies[3], 1e-3, 1e-12);
}

TEST(RotaryScalingTest, LongRopeTakesTheTableOfItsTarget) {
  RotaryScaling s;
  s.kind = RotaryScalingKind::kLongRope;
  s.original = 4096;
  s.target = 131072;
  s.short_factors = {1.0, 2.0};
  s.long_factors = {4.0, 8.0};
  const RotaryFrequencies of = Compute(4, 1e4, s);
  EXPECT_DOUBLE_EQ(of.frequencies[0], 0.25);
  EXPECT_DOUBLE_EQ(of.frequencies[1], 0.00125);
  EXPECT_DOUBLE_EQ(of.magnitude,
                   std::sqrt(1.0 + std::log(32.0) / std::log(4096.0)));
  s.target = 4096;
  EXPECT_DOUBLE_EQ(Compute(4, 1e4, s).frequencies[1], 0.005);
  EXPECT_EQ(Compute(4, 1e4, s).magnitude, 1.0);
}

TEST(RotaryScalingTest, Refuses) {
  using Kind = RotaryScalingKind;
  struct Case {
    RotaryScaling scaling;
    std::string words;
  };
  std::vector<Case> cases(13);
  cases[0].scaling.kind = Kind::kLinear;
  cases[0].scaling.factor = 0.0;
  cases[0].words = "rotary_embedding: scaling.factor=0; need a finite";
  cases[1].scaling.kind = Kind::kYarn;
  cases[1].words = "scaling.original=0; need scaling.original >= 2";
  cases[2].scaling.kind = Kind::kLlama3;
  cases[2].scaling.original = 8192;
  cases[2].scaling.high_freq = 1.0;
  cases[2].words = "scaling.high_freq - low_freq=0; need";
  cases[3].scaling.kind = Kind::kDynamicNtk;
  cases[3].scaling.original = 4096;
  cases[3].words = "scaling.target=0; need";
  cases[4].scaling.kind = Kind::kLongRope;
  cases[4].scaling.original = 4096;
  cases[4].scaling.target = 8192;
  cases[4].scaling.short_factors = {1.0};
  cases[4].words = "short_factors=1; need 4";
  cases[5].scaling = cases[4].scaling;
  cases[5].scaling.short_factors = {1, 1, 1, 0};
  cases[5].words = "scaling.short_factors=0; need";
  cases[6].scaling.kind = Kind::kYarn;
  cases[6].scaling.original = 4096;
  cases[6].scaling.beta_fast = std::numeric_limits<double>::quiet_NaN();
  cases[6].words = "scaling.beta_fast=nan";
  for (size_t i = 7; i < 11; ++i) {
    cases[i].scaling.kind = Kind::kYarn;
    cases[i].scaling.original = 4096;
    cases[i].scaling.factor = 40.0;
  }
  cases[7].scaling.extrapolation = std::numeric_limits<double>::quiet_NaN();
  cases[7].words = "scaling.extrapolation=nan; need a finite number";
  cases[8].scaling.mscale = std::numeric_limits<double>::quiet_NaN();
  cases[8].words = "scaling.mscale=nan; need a finite number >= 0";
  cases[9].scaling.mscale_all_dim = -1.0;
  cases[9].words = "scaling.mscale_all_dim=-1; need a finite number >= 0";
  cases[10].scaling.mscale = 1e300;
  cases[10].scaling.mscale_all_dim = 1.0;
  cases[10].scaling.attention_factor = 1e300;
  cases[10].words = "scaling makes a magnitude of inf; need";
  // 1 / factor overflows a double.
  cases[11].scaling.kind = Kind::kLinear;
  cases[11].scaling.factor = 1e-310;
  cases[11].words = "scaling.factor=1e-310 make a frequency of inf; need";
  cases[12].scaling.kind = Kind::kLongRope;
  cases[12].scaling.original = 4096;
  cases[12].scaling.target = 8192;
  cases[12].scaling.short_factors = {1, 1, 1, 1};
  cases[12].scaling.long_factors = {1, 1, 1e-312, 1};
  cases[12].words = "make a frequency of inf";
  for (const Case& c : cases) {
    const auto result = ComputeRotaryFrequencies(8, 1e4, c.scaling);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find(c.words), std::string::npos)
        << result.status();
  }
}

}  // namespace
}  // namespace quern
