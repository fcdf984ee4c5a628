// A kernel that names its instruction set, and the proof that isa_test.h runs
// it on each and notices when it does not.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "testing/isa_test_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {

const char* Target() { return hwy::TargetName(HWY_TARGET); }
const char* Int8Target() {
  if (HWY_TARGET == HWY_AVX2 && HasAvxVnniInt8()) return kAvxVnniInt8Target;
  return HWY_TARGET == HWY_AVX2 && HasAvxVnni() ? kAvxVnniTarget : Target();
}

}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <set>
#include <string>

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "quern/core/isa.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

HWY_EXPORT(Target);
HWY_EXPORT(Int8Target);

struct Plan {
  const char* target() const { return name; }
  const char* name = HWY_DYNAMIC_DISPATCH(Target)();
};

class SomeKernelTest : public IsaTest {
 public:
  static std::set<std::string>& Seen() {
    static auto* seen = new std::set<std::string>;
    return *seen;
  }
  static void TearDownTestSuite() {
    if (GTEST_FLAG_GET(filter) != "*") return;
    EXPECT_EQ(Seen().size(), hwy::SupportedAndGeneratedTargets().size());
  }
};
QUERN_INSTANTIATE_ISA_TEST(SomeKernelTest);

TEST_P(SomeKernelTest, RunsOnTheTargetAskedFor) {
  const Plan plan;
  EXPECT_RAN_ON(plan);
  EXPECT_STREQ(plan.target(), isa());
  Seen().insert(plan.target());
}

TEST_P(SomeKernelTest, RejectsAnotherTarget) {
  Plan plan;
  EXPECT_TRUE(RanOn(plan.target()));
  plan.name = "AVX9";
  const auto result = RanOn(plan.target());
  EXPECT_FALSE(result);
  EXPECT_EQ(std::string(result.message()),
            std::string("ran on AVX9; asked for ") + isa());
}

TEST_P(SomeKernelTest, ATestThatProvesNothingFails) {
  struct Careless : IsaTest {
    using IsaTest::SetUp;
    using IsaTest::TearDown;
    void TestBody() override { EXPECT_TRUE(Plan().target() != nullptr); }
  };
  Careless test;
  test.SetUp();
  test.TestBody();
  EXPECT_NONFATAL_FAILURE(test.TearDown(), "no EXPECT_RAN_ON");
  EXPECT_TRUE(RanOn(isa()));
}

class SomeInt8KernelTest : public IsaTest {
 public:
  static int& Seen() {
    static int seen = 0;
    return seen;
  }
  static void TearDownTestSuite() {
    if (GTEST_FLAG_GET(filter) != "*") return;
    EXPECT_EQ(Seen(), (HasAvxVnni() ? 1 : 0) + (HasAvxVnniInt8() ? 1 : 0));
  }
};
QUERN_INSTANTIATE_INT8_ISA_TEST(SomeInt8KernelTest);

TEST_P(SomeInt8KernelTest, RunsOnALeafOnceAndOnlyWhereThatIsAskedFor) {
  const Plan plan = {HWY_DYNAMIC_DISPATCH(Int8Target)()};
  EXPECT_RAN_ON(plan);
  EXPECT_STREQ(plan.target(), isa());
  Seen() += GetParam().leaf != IsaLeaf::kNone ? 1 : 0;
}

}  // namespace
}  // namespace quern

#endif  // HWY_ONCE
