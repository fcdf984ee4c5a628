#include "quern/core/check.h"

#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(CheckDeathTest, NamesTheExpressionAndThePlace) {
  QUERN_CHECK(1 + 1 == 2);
  EXPECT_DEATH(QUERN_CHECK(1 + 1 == 3), "check_test.cc:.*1 \\+ 1 == 3");
}

TEST(CheckDeathTest, DebugChecksAreNotEvaluatedInRelease) {
  int evaluated = 0;
  QUERN_DCHECK(++evaluated > 0);
#ifdef NDEBUG
  EXPECT_EQ(evaluated, 0);
#else
  EXPECT_EQ(evaluated, 1);
  EXPECT_DEATH(QUERN_DCHECK(evaluated == 0), "check failed");
#endif
}

}  // namespace
}  // namespace quern
