#include "quern/tools/perf/op_util.h"

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

absl::StatusOr<double> JudgeOne(double got, double want, double bound) {
  InlineExecutor executor;
  return JudgeAll("op", 1, executor, [&](int64_t i, Verdict& verdict) {
    verdict.Add(i, got, want, bound);
  });
}

TEST(VerdictTest, PassesWithinTheBoundAndTellsTheError) {
  const auto error = JudgeOne(1.25, 1.0, 0.25);
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(*error, 0.25);
}

TEST(VerdictTest, FailsBeyondTheBoundAndOnNaN) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const double got :
       {1.26, -1.0, kNaN, std::numeric_limits<double>::infinity()}) {
    const auto error = JudgeOne(got, 1.0, 0.25);
    EXPECT_EQ(error.status().code(), absl::StatusCode::kInternal) << got;
  }
  EXPECT_FALSE(JudgeOne(1.0, kNaN, 0.25).ok());
  EXPECT_FALSE(JudgeOne(1.0, 1.0, -1).ok());
  EXPECT_FALSE(JudgeOne(1.0, 1.0, kNaN).ok());
  EXPECT_FALSE(
      JudgeOne(1.0, 1.0, std::numeric_limits<double>::infinity()).ok());
}

TEST(VerdictTest, FailsWhereNothingWasCompared) {
  InlineExecutor executor;
  const auto error =
      JudgeAll("op", 0, executor, [](int64_t, Verdict&) { FAIL(); });
  EXPECT_EQ(error.status(), absl::InternalError("op: no element was compared"));
}

TEST(JudgeAllTest, FindsOneWrongElementAnywhere) {
  InlineExecutor executor;
  constexpr int64_t kCount = 10000;
  for (const int64_t wrong :
       {int64_t{0}, int64_t{4095}, int64_t{4096}, kCount - 1}) {
    const auto error =
        JudgeAll("op", kCount, executor, [&](int64_t i, Verdict& verdict) {
          verdict.Add(i, i == wrong ? 2 : 1, 1, 0.5);
        });
    EXPECT_EQ(error.status().message(), "op: 1 elements are wrong; element " +
                                            std::to_string(wrong) +
                                            " is 2, not 1 within 0.5");
  }
}

TEST(SetBufferTest, SetsAreAlignedAndApart) {
  SetBuffer buffer;
  ASSERT_EQ(buffer.Create(3, 65), absl::OkStatus());
  EXPECT_EQ(buffer.sets(), 3);
  EXPECT_EQ(buffer.at(1) - buffer.at(0), 128);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.at(2)) % 64, 0u);
  EXPECT_FALSE(buffer.Create(int64_t{1} << 40, int64_t{1} << 40).ok());
}

TEST(FillRealsTest, FillsEverySetToItsEnd) {
  SetBuffer buffer;
  constexpr int64_t kCount = 70001;  // more than a period
  ASSERT_EQ(buffer.Create(2, kCount * 2), absl::OkStatus());
  FillReals<BFloat16>(1, 2, buffer);
  for (int64_t set = 0; set < 2; ++set) {
    for (int64_t i = 0; i < kCount; ++i) {
      const double x = ToDouble(buffer.at<BFloat16>(set)[i]);
      ASSERT_TRUE(1 <= x && x <= 2) << set << " " << i << ": " << x;
    }
  }
  EXPECT_NE(ToDouble(buffer.at<BFloat16>(0)[0]),
            ToDouble(buffer.at<BFloat16>(0)[1]));
}

}  // namespace
}  // namespace quern
