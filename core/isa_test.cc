#include "quern/core/isa.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "hwy/per_target.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/kernel_set.h"

namespace quern {
namespace {

class InstructionSetTest : public testing::Test {
 protected:
  void TearDown() override {
    hwy::DisableTargets(0);
    hwy::SetSupportedTargetsForTest(0);
    AllowAvxVnniForTest(true);
  }
};

TEST_F(InstructionSetTest, AllHaveNamesAndTheBestComesFirst) {
  const std::vector<Isa> isas = CompiledIsas();
  ASSERT_FALSE(isas.empty());
  std::set<std::string> names;
  for (size_t i = 0; i < isas.size(); ++i) {
    EXPECT_STRNE(isas[i].name(), "Unknown");
    EXPECT_TRUE(names.insert(isas[i].name()).second) << isas[i].name();
    if (i > 0) {
      EXPECT_LE(isas[i - 1].highway, isas[i].highway);
    }
  }
  const bool avx2 = (HWY_TARGETS & HWY_AVX2) != 0;
  EXPECT_EQ(names.count("AVX2_VNNI"), avx2 && QUERN_AVX_VNNI ? 1u : 0u);
  EXPECT_EQ(names.count("AVX2"), avx2 ? 1u : 0u);
}

TEST_F(InstructionSetTest, WhatTheCpuHasRuns) {
  const std::vector<Isa> compiled = CompiledIsas();
  ASSERT_FALSE(SupportedIsas().empty());
  for (const Isa& isa : SupportedIsas()) {
    EXPECT_TRUE(isa.Runs()) << isa.name();
    EXPECT_EQ(std::count(compiled.begin(), compiled.end(), isa), 1);
  }
}

TEST_F(InstructionSetTest, ALeafRunsWithItsTargetWhereItIsAllowed) {
  if ((HWY_TARGETS & HWY_AVX2) == 0) return;  // there are no kernels for it
  const std::vector<Isa> isas = SupportedIsas();
  const bool has = std::count(isas.begin(), isas.end(), kAvx2Vnni) != 0;
  EXPECT_EQ(kAvx2Vnni.Runs(), has);
  AllowAvxVnniForTest(false);
  EXPECT_FALSE(kAvx2Vnni.Runs());
  AllowAvxVnniForTest(true);
  if ((HWY_TARGETS & (HWY_TARGETS - 1)) == 0) return;  // nothing to choose from
  hwy::SetSupportedTargetsForTest(HWY_STATIC_TARGET);
  EXPECT_EQ(kAvx2Vnni.Runs(), has && HWY_STATIC_TARGET <= HWY_AVX2);
}

// hwy::SupportedTargets() alone would lift the cap for dispatch.
TEST_F(InstructionSetTest, ALookAtTheCpuKeepsACap) {
  const Isa best = SupportedIsas().front();
  if (best.highway == HWY_STATIC_TARGET) return;  // nothing can be capped
  hwy::DisableTargets(best.highway);
  EXPECT_FALSE(best.Runs());
  for (const Isa& isa : SupportedIsas()) EXPECT_NE(isa, best);
  EXPECT_FALSE(best.Runs());
  EXPECT_NE(hwy::DispatchedTarget(), best.highway);
}

TEST(StandsForTest, AVX3ForItselfWithMoreInstructions) {
  const char* const names[] = {"AVX3_ZEN4", "AVX3_DL",   "AVX3",
                               "AVX2",      "AVX2_VNNI", "SSE4"};
  for (const std::string isa : names) {
    for (const std::string ran : names) {
      const bool stands = ran == isa ||
                          (ran == "AVX3" && isa.rfind("AVX3", 0) == 0) ||
                          (ran == "AVX3_DL" && isa == "AVX3_ZEN4");
      EXPECT_EQ(StandsFor(ran, isa), stands) << ran << " for " << isa;
    }
  }
}

using SomeSet = KernelSet<int, int>;
int Best(int i) { return i; }
int Leaf(int i) { return 10 + i; }
int Plain(int i) { return 20 + i; }
int Least(int i) { return 30 + i; }

TEST_F(InstructionSetTest, PlansTakeTheFirstSetThatRuns) {
  const SomeSet sets[] = {
      {{HWY_AVX3}, &Best},  {{HWY_AVX3}, nullptr},         {kAvx2Vnni, &Leaf},
      {{HWY_AVX2}, &Plain}, {{HWY_STATIC_TARGET}, &Least},
  };
  const auto first = [&] {
    return FirstThatRuns(absl::MakeConstSpan(sets)).get(1);
  };
  for (const Isa& isa : SupportedIsas()) {
    SCOPED_TRACE(isa.name());
    if (HWY_STATIC_TARGET != HWY_TARGETS) {
      hwy::SetSupportedTargetsForTest(isa.highway);
    }
    AllowAvxVnniForTest(isa.leaf == IsaLeaf::kAvxVnni);
    const int64_t target = hwy::DispatchedTarget();
    EXPECT_EQ(first(), target <= HWY_AVX3   ? 1
                       : isa == kAvx2Vnni   ? 11
                       : target == HWY_AVX2 ? 21
                                            : 31);
    AllowAvxVnniForTest(true);
  }
}

}  // namespace
}  // namespace quern
