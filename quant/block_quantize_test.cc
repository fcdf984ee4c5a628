#include "quern/quant/block_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

// The largest error of a nearest code, in steps.
double HalfGap(BlockFormat format) {
  if (format == BlockFormat::kMXFP4) return 1;  // between 4 and 6
  return format == BlockFormat::kIQ4_NL || format == BlockFormat::kIQ4_XS
             ? 12  // between 89 and 113
             : 0.5;
}

// Whether a code of another number would be nearer to x.
bool IsNearest(BlockFormat format, const ReferenceBlockValue& v, double x) {
  const bool e2m1 = format == BlockFormat::kMXFP4;
  if (!e2m1 && HalfGap(format) == 0.5) return true;  // HalfGap bounds it
  for (int64_t code = 0; code < 16; ++code) {
    const double number = e2m1 ? ReferenceE2M1(code) : ReferenceIQ4(code);
    if (std::abs(x - v.step * number) < std::abs(x - v.value)) return false;
  }
  return true;
}

std::vector<uint8_t> Quantized(const BlockFormatInfo& info,
                               absl::Span<const float> x) {
  GuardBuffer<uint8_t> blocks(static_cast<int64_t>(x.size()) / info.values *
                              info.bytes);
  const absl::Status status = QuantizeBlocks(
      info.format, x,
      absl::MakeSpan(blocks.data(), static_cast<size_t>(blocks.size())));
  EXPECT_TRUE(status.ok()) << status;
  return blocks.ToVector();
}

// Expects every value to be within half a step of its source; returns the
// largest step.
double ExpectHalfAStep(const BlockFormatInfo& info,
                       const std::vector<float>& x) {
  const std::vector<uint8_t> blocks = Quantized(info, x);
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const ReferenceBlockValue v = ReferenceValue(
        info.format, blocks.data() + at / info.values * info.bytes,
        at % info.values);
    const auto want = static_cast<double>(x[i]);
    // The quotient of x by the step is rounded in double.
    const double bound = HalfGap(info.format) * std::abs(v.step) * (1 + 1e-12);
    const double error = std::abs(v.value - want);
    EXPECT_TRUE(error <= bound) << info.name << " value " << i << ": " << want
                                << " became " << v.value << ", step " << v.step;
    EXPECT_TRUE(IsNearest(info.format, v, want)) << info.name << " value " << i;
    if (testing::Test::HasFailure()) break;
    largest = std::max(largest, std::abs(v.step));
  }
  return largest;
}

// 2 blocks of 256 values, or 16 of 32.
constexpr int64_t kCount = 512;

std::vector<float> Reals(Rng& rng, double lo, double hi) {
  return UniformReals<float>(rng, kCount, lo, hi);
}

// The largest step for values in [-1, 1]: the range over the number of steps,
// and what rounding the sub-scales up may add.
double LargestStep(BlockFormat format) {
  switch (format) {
    case BlockFormat::kQ4_0:
      return 1 / 7.5;
    case BlockFormat::kQ4_1:
      return 2 / 15.0;
    case BlockFormat::kQ5_0:
      return 1 / 15.5;
    case BlockFormat::kQ5_1:
      return 2 / 31.0;
    case BlockFormat::kQ8_0:
      return 1 / 127.0;
    case BlockFormat::kQ2_K:
      return (2 + 1 / 15.0) / 3 * (1 + 1 / 15.0);
    case BlockFormat::kQ3_K:
      return 1 / 3.5 * (1 + 1 / 31.0);
    case BlockFormat::kQ4_K:
      return (2 + 1 / 63.0) / 15 * (1 + 1 / 63.0);
    case BlockFormat::kQ5_K:
      return (2 + 1 / 63.0) / 31 * (1 + 1 / 63.0);
    case BlockFormat::kQ6_K:
      return 1 / 31.5 * (1 + 1 / 127.0);
    case BlockFormat::kIQ4_NL:
      return 1 / 113.0;
    case BlockFormat::kIQ4_XS:
      return 1 / 113.0 * (1 + 1 / 31.0);
    case BlockFormat::kTQ2_0:
      return 1;
    case BlockFormat::kMXFP4:
      return 2 / 7.0;
  }
  return 0;
}

TEST(BlockQuantizeTest, IsWithinHalfAStep) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    for (const auto& [lo, hi] :
         {std::pair{-1.0, 1.0}, std::pair{0.0, 1.0}, std::pair{-1.0, 0.0},
          std::pair{-1.0, 0.3}, std::pair{-0.3, 1.0}, std::pair{0.9, 1.0},
          std::pair{-1.0, -0.9}}) {
      for (const double reach : {1.0, 0.02, 300.0, 65504.0}) {
        SCOPED_TRACE(absl::StrCat(lo * reach, " ", hi * reach));
        const double step =
            ExpectHalfAStep(info, Reals(rng, lo * reach, hi * reach));
        // d, m and dmin are rounded to 11 bits.
        EXPECT_TRUE(step <= reach * LargestStep(info.format) * (1 + 0x1p-8));
      }
    }
  }
}

// Sub-blocks of very different sizes, a single large value, and values that
// f16's subnormal numbers must scale.
TEST(BlockQuantizeTest, IsWithinHalfAStepOfUnevenBlocks) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    for (const double reach : {1.0, 1e-3, 1e-6, 1e-9, 1e-40}) {
      std::vector<float> uneven = Reals(rng, -1, 1);
      for (size_t i = 0; i < uneven.size(); ++i) {
        uneven[i] *= static_cast<float>(
            reach * std::ldexp(1.0, -static_cast<int>(i / 16 % 16)));
      }
      ExpectHalfAStep(info, uneven);
      std::vector<float> outlier = Reals(rng, -0.01 * reach, 0.01 * reach);
      for (size_t i = 7; i < outlier.size(); i += 67) {
        outlier[i] = static_cast<float>(i % 2 == 0 ? reach : -reach);
      }
      ExpectHalfAStep(info, outlier);
    }
    for (const float constant : {0.0f, -0.0f, 1.0f, -1.0f, 65504.0f, -65504.0f,
                                 std::numeric_limits<float>::denorm_min()}) {
      ExpectHalfAStep(info, std::vector<float>(kCount, constant));
    }
  }
}

// Zeros become zeros, without a sign where the format has no negative scale.
TEST(BlockQuantizeTest, ZerosStayZeros) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    const std::vector<float> zeros(kCount, 0.0f);
    const std::vector<uint8_t> blocks = Quantized(info, zeros);
    std::vector<float> out(kCount, 1.0f);
    DecodeBlocks(info.format, blocks, absl::MakeSpan(out));
    EXPECT_EQ(out, zeros) << info.name;
  }
}

// What a format represents exactly comes back: whole numbers of steps from one
// end to the other.
TEST(BlockQuantizeTest, CodesOfAFormatStayWhatTheyAre) {
  const auto ramp = [](int least, int most) {
    std::vector<float> x;
    for (int64_t i = 0; i < kCount; ++i) {
      x.push_back(static_cast<float>(least + i % (most - least + 1)));
    }
    return x;
  };
  const auto expect = [](uint32_t type, const std::vector<float>& x) {
    const BlockFormatInfo& info = *FindBlockFormat(type);
    const std::vector<uint8_t> blocks = Quantized(info, x);
    std::vector<float> out(x.size());
    DecodeBlocks(info.format, blocks, absl::MakeSpan(out));
    EXPECT_EQ(out, x) << info.name;
  };
  expect(3, ramp(0, 15));    // Q4_1
  expect(3, ramp(-20, -5));  // with a minimum
  expect(7, ramp(-9, 22));   // Q5_1
  expect(8, ramp(96, 127));  // Q8_0
  expect(35, ramp(-1, 1));   // TQ2_0
  expect(39, ramp(-4, 4));   // MXFP4: every whole number up to 4
}

TEST(BlockQuantizeTest, RefusesWhatItCannotRepresent) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    std::vector<uint8_t> blocks(static_cast<size_t>(info.bytes), 7);
    std::vector<float> x(static_cast<size_t>(info.values), 1.0f);
    const auto quantize = [&] {
      return QuantizeBlocks(info.format, x, absl::MakeSpan(blocks));
    };
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float bad : {std::nanf(""), kInfinity, -kInfinity, 65505.0f}) {
      x[5] = bad;
      ExpectRefusal(quantize(),
                    absl::StrCat("quantize_blocks: x[5]=", bad,
                                 "; need a magnitude of at most 65504"));
      EXPECT_EQ(blocks, std::vector<uint8_t>(blocks.size(), 7));
    }
    x[5] = 1;
    EXPECT_TRUE(quantize().ok());
    x.pop_back();
    ExpectRefusal(quantize(), "need a multiple of");
  }
}

}  // namespace
}  // namespace quern
