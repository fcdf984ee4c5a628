// The example's exit code is the verdict of CompareWithPlainAttention, which
// therefore must notice every kind of wrong result.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "examples/paged_attention/reference_testutil.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

class VerdictTest : public testing::Test {
 protected:
  bool Passes(const std::vector<float>& out) const {
    return CompareWithPlainAttention(out, q_lens_, kv_lens_).ok();
  }

  const std::vector<int64_t> q_lens_ = {2, 1}, kv_lens_ = {3, 1};
  const std::vector<double> want_ = PlainAttention(q_lens_, kv_lens_);
  const std::vector<float> right_{want_.begin(), want_.end()};
};

TEST_F(VerdictTest, PassesWhatIsRight) {
  ASSERT_EQ(right_.size(), 3u * kQHeads * kHeadDim);
  const auto error = CompareWithPlainAttention(right_, q_lens_, kv_lens_);
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_LT(*error, 0x1p-24);
}

TEST_F(VerdictTest, FailsOnOneWrongElementWhereverItIs) {
  for (const size_t at : {size_t{0}, size_t{777}, right_.size() - 1}) {
    for (const float wrong : {right_[at] + 0.01f, std::nanf(""),
                              std::numeric_limits<float>::infinity()}) {
      std::vector<float> out = right_;
      out[at] = wrong;
      EXPECT_FALSE(Passes(out)) << at << " " << wrong;
    }
  }
}

// Dividing by a sum of no weights gives NaN everywhere, which a comparison
// could let pass as "largest error 0.00000".
TEST_F(VerdictTest, FailsOnNaNEverywhere) {
  const auto error = CompareWithPlainAttention(
      std::vector<float>(right_.size(), std::nanf("")), q_lens_, kv_lens_);
  EXPECT_EQ(error.status(),
            absl::InternalError("attention differs from the plain loop by inf; "
                                "need at most 0.00390625"));
}

TEST_F(VerdictTest, FailsOnMissingAndNeedlessElements) {
  EXPECT_FALSE(Passes({}));
  std::vector<float> out = right_;
  out.pop_back();
  EXPECT_FALSE(Passes(out));
  out.resize(right_.size() + 1);
  EXPECT_FALSE(Passes(out));
  EXPECT_FALSE(CompareWithPlainAttention({}, {}, {}).ok());
}

}  // namespace
}  // namespace quern
