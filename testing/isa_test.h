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
//
// A suite whose kernels multiply int8 (core/avx_vnni.h) has
// QUERN_INSTANTIATE_INT8_ISA_TEST in place of the other: it also runs on
// AVX2_VNNI, where the CPU has it. AVX2 is AVX2 alone in every suite.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "hwy/targets.h"
#include "hwy/tests/hwy_gtest.h"
#include "quern/core/avx_vnni.h"

namespace quern {

inline constexpr size_t kLeastInstructionSets =
    HWY_ARCH_X86_64 && (HWY_TARGETS & (HWY_TARGETS - 1)) != 0 ? 2 : 1;

// AVX2 with AVX-VNNI, beside Highway's targets, which are positive.
inline constexpr int64_t kAvxVnniIsa = -1;

inline const char* IsaName(int64_t isa) {
  return isa == kAvxVnniIsa ? kAvxVnniTarget : hwy::TargetName(isa);
}

// Highway's targets that this CPU has and this binary was compiled for, and
// kAvxVnniIsa where kernels can be run on it.
inline std::vector<int64_t> Int8Isas() {
  std::vector<int64_t> isas = hwy::SupportedAndGeneratedTargets();
  const bool avx2 = std::count(isas.begin(), isas.end(), HWY_AVX2) != 0;
  if (avx2 && HasAvxVnni()) isas.push_back(kAvxVnniIsa);
  return isas;
}

class IsaTest : public hwy::TestWithParamTarget {
 public:
  // The name of the instruction set asked for: Highway's, e.g. "AVX3_DL", or
  // kAvxVnniTarget.
  const char* isa() const { return IsaName(GetParam()); }

  testing::AssertionResult RanOn(const std::string& target) {
    proved_ = true;
    if (target == isa()) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "ran on " << target << "; asked for " << isa();
  }

 protected:
  void SetUp() override { UseOwnIsa(); }
  void TearDown() override {
    hwy::TestWithParamTarget::TearDown();
    AllowAvxVnniForTest(true);
    EXPECT_TRUE(proved_ || IsSkipped() || HasFailure())
        << "no EXPECT_RAN_ON: nothing shows that this test ran on " << isa();
  }

  // What make() returns where plans choose this CPU's best instruction set.
  template <typename Make>
  auto OnTheBestIsa(const Make& make) {
    AllowAvxVnniForTest(true);
    hwy::SetSupportedTargetsForTest(0);
    auto made = make();
    UseOwnIsa();
    return made;
  }

 private:
  void UseOwnIsa() {
    const bool vnni = GetParam() == kAvxVnniIsa;
    // Other instruction sets must not choose AVX-VNNI even where they may.
    AllowAvxVnniForTest(GetParam() != HWY_AVX2);
    hwy::SetSupportedTargetsForTest(vnni ? HWY_AVX2 : GetParam());
  }

  bool proved_ = false;
};

}  // namespace quern

// `plan` has `const char* target() const`.
#define EXPECT_RAN_ON(plan) EXPECT_TRUE(this->RanOn((plan).target()))

// Also tests that there is more than the baseline to run on: on x86-64 every
// CPU of interest has SSE4 and up. A binary that was compiled for one
// instruction set (--config=avx2only) runs that one.
#define QUERN_INSTANTIATE_ISA_TEST(suite) \
  QUERN_INSTANTIATE_ON_ISAS(suite, hwy::SupportedAndGeneratedTargets())
#define QUERN_INSTANTIATE_INT8_ISA_TEST(suite) \
  QUERN_INSTANTIATE_ON_ISAS(suite, quern::Int8Isas())
#define QUERN_INSTANTIATE_ON_ISAS(suite, isas)                               \
  INSTANTIATE_TEST_SUITE_P(suite##Group, suite, testing::ValuesIn(isas),     \
                           [](const testing::TestParamInfo<int64_t>& info) { \
                             return quern::IsaName(info.param);              \
                           });                                               \
  TEST(suite##Isas, AreNotEmpty) {                                           \
    EXPECT_GE(hwy::SupportedAndGeneratedTargets().size(),                    \
              quern::kLeastInstructionSets);                                 \
  }                                                                          \
  static_assert(true, "semicolon")

#endif  // QUERN_TESTING_ISA_TEST_H_
