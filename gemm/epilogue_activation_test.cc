// How accurate the activations of gemm/epilogue.h are.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "gemm/epilogue.h"
#include "gemm/epilogue_testutil.h"
#include "gemm/packed_plan_testutil.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/isa_test.h"
#include "testing/reference_convert.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

class EpilogueActivationTest : public PackedPlanTest {
 protected:
  // act(v) for each v: k = 1, a = 1, weights v.
  std::vector<double> Sweep(Act act, const std::vector<float>& v) {
    Shape s{1, static_cast<int64_t>(v.size()), 1};
    s.act = act;
    const auto plan = Plan<float, float, float>(s, v, {});
    return ToDoubles(
        Run<float, float>(plan, s, std::vector<float>{1.0f}, inline_));
  }
  void ExpectAccurate(Act act, const std::vector<float>& v) {
    SCOPED_TRACE(std::string(LinearActivationName(act)));
    std::vector<double> want;
    for (const float x : v) want.push_back(Activated(act, double{x}));
    const auto got = Sweep(act, v);
    EXPECT_TRUE(AllWithin(got, want, [&](double value, int64_t flat) {
      if (!std::isfinite(value)) return 0.0;
      const double x = double{v[static_cast<size_t>(flat)]};
      const double relative = std::min(1.0, BoundOf(act, x));
      return relative * std::abs(value) + kDenormal;
    }));
    for (size_t i = 0; i < v.size(); ++i) {
      if (std::isnan(got[i]) || v[i] == 0) continue;
      ASSERT_EQ(std::signbit(got[i]), std::signbit(v[i])) << v[i];
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(EpilogueActivationTest);

// Every bf16: all magnitudes, both infinities, NaN.
TEST_P(EpilogueActivationTest, ActivationsAreAccurateForEveryMagnitude) {
  std::vector<float> v;
  for (uint32_t code = 0; code < 65536; ++code) {
    v.push_back(FromDouble<float>(ToDouble(FromBits<BF>(code))));
  }
  for (const Act act : {Act::kSilu, Act::kGelu, Act::kGeluTanh}) {
    ExpectAccurate(act, v);
  }
}

// The error is of the unrounded f32; a dense sweep finds more than bf16 has.
TEST_P(EpilogueActivationTest, ActivationsAreAccurateBetweenTheBFloat16s) {
  std::vector<float> near, far;
  for (int i = 0; i < 100000; ++i) {
    near.push_back(-15.0f + static_cast<float>(i) * 0.00021f);
    far.push_back(-110.0f + static_cast<float>(i) * 0.0013f);
  }
  ExpectAccurate(Act::kSilu, far);
  ExpectAccurate(Act::kGelu, near);
  ExpectAccurate(Act::kGeluTanh, near);
}

}  // namespace
}  // namespace quern
