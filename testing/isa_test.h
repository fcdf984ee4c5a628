#ifndef QUERN_TESTING_ISA_TEST_H_
#define QUERN_TESTING_ISA_TEST_H_

// Runs the tests of a suite once for each instruction set that this CPU has
// and this binary was compiled for, through the public API:
//
//   class RmsNormTest : public IsaTest {};
//   QUERN_INSTANTIATE_ISA_TEST(RmsNormTest);
//
//   TEST_P(RmsNormTest, IsExactOnSmallIntegers) {
//     const auto plan = RmsNormPlan::Create(spec);
//     EXPECT_RAN_ON(*plan);                // plan->target() is isa()
//     ...
//   }
//
// A test that passes without an EXPECT_RAN_ON has proved nothing about its
// instruction set, and fails.

#include <cstddef>
#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "hwy/targets.h"
#include "hwy/tests/hwy_gtest.h"

namespace quern {

inline constexpr size_t kLeastInstructionSets =
    HWY_ARCH_X86_64 && (HWY_TARGETS & (HWY_TARGETS - 1)) != 0 ? 2 : 1;

class IsaTest : public hwy::TestWithParamTarget {
 public:
  // Highway's name of the instruction set asked for, e.g. "AVX3_DL".
  const char* isa() const { return hwy::TargetName(GetParam()); }

  testing::AssertionResult RanOn(const std::string& target) {
    proved_ = true;
    if (target == isa()) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "ran on " << target << "; asked for " << isa();
  }

 protected:
  void TearDown() override {
    hwy::TestWithParamTarget::TearDown();
    EXPECT_TRUE(proved_ || IsSkipped() || HasFailure())
        << "no EXPECT_RAN_ON: nothing shows that this test ran on " << isa();
  }

 private:
  bool proved_ = false;
};

}  // namespace quern

// `plan` has `const char* target() const`.
#define EXPECT_RAN_ON(plan) EXPECT_TRUE(this->RanOn((plan).target()))

// Also tests that there is more than the baseline to run on: on x86-64 every
// CPU of interest has SSE4 and up. A binary that was compiled for one
// instruction set (--config=avx2only) runs that one.
#define QUERN_INSTANTIATE_ISA_TEST(suite)                 \
  HWY_TARGET_INSTANTIATE_TEST_SUITE_P(suite);             \
  TEST(suite##Isas, AreNotEmpty) {                        \
    EXPECT_GE(hwy::SupportedAndGeneratedTargets().size(), \
              quern::kLeastInstructionSets);              \
  }                                                       \
  static_assert(true, "semicolon")

#endif  // QUERN_TESTING_ISA_TEST_H_
