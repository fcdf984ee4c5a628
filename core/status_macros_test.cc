#include "quern/core/status_macros.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

absl::Status FailsIf(bool fail) {
  return fail ? absl::InternalError("asked to") : absl::OkStatus();
}
absl::StatusOr<std::unique_ptr<int>> MakeUnless(bool fail) {
  if (fail) return absl::InternalError("asked to");
  return std::make_unique<int>(5);
}
absl::Status Steps(bool fail, int* reached) {
  *reached = 1;
  QUERN_RETURN_IF_ERROR(FailsIf(fail));
  *reached = 2;
  return absl::OkStatus();
}
absl::StatusOr<int> Sum(bool fail_a, bool fail_b) {
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<int> a, MakeUnless(fail_a));
  std::unique_ptr<int> b;
  QUERN_ASSIGN_OR_RETURN(b, MakeUnless(fail_b));
  return *a + *b;
}

TEST(StatusMacrosTest, ReturnsAtTheFirstError) {
  int reached = 0;
  EXPECT_TRUE(Steps(false, &reached).ok());
  EXPECT_EQ(reached, 2);
  EXPECT_EQ(Steps(true, &reached), absl::InternalError("asked to"));
  EXPECT_EQ(reached, 1);
}

TEST(StatusMacrosTest, AssignsOrReturns) {
  EXPECT_EQ(*Sum(false, false), 10);
  EXPECT_EQ(Sum(true, false).status(), absl::InternalError("asked to"));
  EXPECT_EQ(Sum(false, true).status(), absl::InternalError("asked to"));
}

// A condition without braces must not capture the macro's insides.
TEST(StatusMacrosTest, IsOneStatement) {
  const auto f = [](bool check) -> absl::Status {
    if (check)
      QUERN_RETURN_IF_ERROR(FailsIf(true));
    else
      return absl::OkStatus();
    return absl::OkStatus();
  };
  EXPECT_FALSE(f(true).ok());
  EXPECT_TRUE(f(false).ok());
}

void ExpectRefusal(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(status.message(), message);
}

TEST(StatusMacrosTest, RefusalsNameOperatorValueAndBound) {
  ExpectRefusal(InvalidArgument("op", "m=", 3, ", n=", 4), "op: m=3, n=4");
  EXPECT_EQ(Unimplemented("op", "bf16"), absl::UnimplementedError("op: bf16"));
  ExpectRefusal(CheckRange("gemm", "k", 131072, 1, 131071),
                "gemm: k=131072; need 1 <= k <= 131071");
  ExpectRefusal(CheckRange("gemm", "k", 0, 1, 131071),
                "gemm: k=0; need 1 <= k <= 131071");
  ExpectRefusal(CheckAtLeast("norm", "cols", -2, 1),
                "norm: cols=-2; need cols >= 1");
  ExpectRefusal(CheckEqual("norm", "weight.extent(0)", 3, 4, "x.extent(1)"),
                "norm: weight.extent(0)=3; need 4, as x.extent(1)");
  ExpectRefusal(CheckDType("norm", "x", DType::kI8, DType::kF32),
                "norm: x is i8; need f32");
}

TEST(StatusMacrosTest, TheBoundsThemselvesAreAllowed) {
  EXPECT_TRUE(CheckRange("op", "k", 1, 1, 3).ok());
  EXPECT_TRUE(CheckRange("op", "k", 3, 1, 3).ok());
  EXPECT_TRUE(CheckAtLeast("op", "k", 0, 0).ok());
  EXPECT_TRUE(CheckEqual("op", "k", 4, 4, "n").ok());
  EXPECT_TRUE(CheckDType("op", "x", DType::kU8, DType::kU8).ok());
}

TEST(StatusMacrosDeathTest, ChecksPrintTheStatus) {
  CheckOk(absl::OkStatus(), "Fine()", "file.cc", 7);
  EXPECT_DEATH(CheckOk(absl::InvalidArgumentError("norm: m=3; need 4"),
                       "CheckArgs(x)", "file.cc", 7),
               "file.cc:7: check failed: CheckArgs\\(x\\): "
               "INVALID_ARGUMENT: norm: m=3; need 4");
}

TEST(StatusMacrosDeathTest, DebugChecksAreNotEvaluatedInRelease) {
  int evaluated = 0;
  const auto counted = [&](bool fail) {
    ++evaluated;
    return FailsIf(fail);
  };
  QUERN_DCHECK_OK(counted(false));
#ifdef NDEBUG
  QUERN_DCHECK_OK(counted(true));
  EXPECT_EQ(evaluated, 0);
#else
  EXPECT_EQ(evaluated, 1);
  EXPECT_DEATH(QUERN_DCHECK_OK(counted(true)),
               "status_macros_test.cc:.*counted\\(true\\): INTERNAL: asked to");
#endif
}

}  // namespace
}  // namespace quern
