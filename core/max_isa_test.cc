#include "quern/core/max_isa.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "hwy/per_target.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/machine/cpu_info.h"

namespace quern {
namespace {

class MaxIsaTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(SetMaxIsa("").ok()); }
};

TEST_F(MaxIsaTest, DispatchTakesNothingBetter) {
  const CpuInfo all = GetCpuInfo();
  for (const std::string& isa : all.targets) {
    ASSERT_TRUE(SetMaxIsa(isa).ok()) << isa;
    EXPECT_EQ(GetCpuInfo().targets[0], isa);
    std::string lower = isa;
    for (char& c : lower) c = static_cast<char>(std::tolower(c));
    ASSERT_TRUE(SetMaxIsa(lower).ok()) << lower;
    EXPECT_EQ(GetCpuInfo().targets[0], isa);
  }
  ASSERT_TRUE(SetMaxIsa("").ok());
  EXPECT_EQ(GetCpuInfo().targets, all.targets);
}

// What dispatch takes now.
std::string Dispatched() { return hwy::TargetName(hwy::DispatchedTarget()); }

TEST_F(MaxIsaTest, NothingButAnotherCapEndsACap) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const std::string isa = hwy::TargetName(target);
    ASSERT_TRUE(SetMaxIsa(isa).ok()) << isa;
    EXPECT_EQ(Dispatched(), isa);
    EXPECT_FALSE(SetMaxIsa("AVX9").ok());
    EXPECT_EQ(Dispatched(), isa) << "after a refusal";
    EXPECT_FALSE(GetCpuInfo().targets.empty());
    EXPECT_EQ(Dispatched(), isa) << "after a look at the CPU";
  }
}

TEST_F(MaxIsaTest, PlainAvx2IsWithoutAvxVnni) {
  SetAvxVnniInt8IsEmulated(true);
  const bool has = HasAvxVnni();
  ASSERT_TRUE(SetMaxIsa("AVX2").ok());
  EXPECT_FALSE(HasAvxVnni());
  EXPECT_FALSE(HasAvxVnniInt8());
  ASSERT_TRUE(SetMaxIsa("avx2_vnni").ok());
  EXPECT_EQ(HasAvxVnni(), has);
  EXPECT_FALSE(HasAvxVnniInt8());
  for (const char* const isa : {"AVX2_VNNI_INT8", "AVX3_ZEN4"}) {
    ASSERT_TRUE(SetMaxIsa(isa).ok());
    EXPECT_EQ(HasAvxVnni(), has);
    EXPECT_TRUE(HasAvxVnniInt8());
  }
  SetAvxVnniInt8IsEmulated(false);
}

TEST_F(MaxIsaTest, WhatIsBetterThanTheCpuChangesNothing) {
  const CpuInfo all = GetCpuInfo();
  ASSERT_TRUE(SetMaxIsa("AVX3_SPR").ok());
  EXPECT_EQ(GetCpuInfo().targets, all.targets);
}

TEST_F(MaxIsaTest, RefusesOtherNames) {
  for (const char* const isa : {"AVX9", "best", "AVX2 ", "Unknown"}) {
    const absl::Status status = SetMaxIsa(isa);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << isa;
    EXPECT_NE(std::string(status.message()).find("is no instruction set"),
              std::string::npos)
        << status;
    EXPECT_NE(std::string(status.message()).find(GetCpuInfo().targets.back()),
              std::string::npos)
        << status;
  }
}

// Dispatch would run a better instruction set than was asked for.
TEST_F(MaxIsaTest, RefusesACapBelowAllKernels) {
  int64_t least = 0;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    least = std::max(least, target);
  }
  const CpuInfo all = GetCpuInfo();
  for (const char* const isa : {"SSE4", "SSSE3", "SSE2", "SCALAR"}) {
    if (IsaBit(isa) <= least) continue;
    EXPECT_EQ(SetMaxIsa(isa).code(), absl::StatusCode::kInvalidArgument) << isa;
    EXPECT_EQ(GetCpuInfo().targets, all.targets);
  }
}

}  // namespace
}  // namespace quern
