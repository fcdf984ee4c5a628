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
    AllowAvxVnniInt8ForTest(true);
    SetAvxVnniInt8IsEmulated(false);
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
  for (const char* const leaf : {"AVX2_VNNI", "AVX2_VNNI_INT8"}) {
    EXPECT_EQ(names.count(leaf), avx2 && QUERN_AVX_VNNI ? 1u : 0u) << leaf;
  }
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

TEST_F(InstructionSetTest, AskingForOneForbidsTheLeavesAboveIt) {
  SetAvxVnniInt8IsEmulated(true);
  const bool avx2 = (HWY_TARGETS & HWY_AVX2) != 0;
  const std::vector<Isa> all = SupportedIsas();
  const auto has = [&](const Isa& isa) {
    return std::count(all.begin(), all.end(), isa) != 0;
  };
  if (!avx2 || !has({HWY_AVX2})) GTEST_SKIP() << "no AVX2";
  ASSERT_TRUE(has(kAvx2VnniInt8));
  for (const Isa& asked : {kAvx2VnniInt8, kAvx2Vnni, Isa{HWY_AVX2}}) {
    if (!has(asked)) continue;
    UseIsaForTest(&asked);
    EXPECT_EQ(SupportedIsas().front(), asked) << asked.name();
    EXPECT_EQ(kAvx2VnniInt8.Runs(), asked == kAvx2VnniInt8);
    EXPECT_EQ(kAvx2Vnni.Runs(), asked != Isa{HWY_AVX2} && has(kAvx2Vnni));
  }
  UseIsaForTest(nullptr);
  EXPECT_EQ(SupportedIsas(), all);
}

// What CPUs of Arm have, and what they do not have although its bit is higher.
TEST(TargetRunsTest, OnlyWhereTheCpuHasIt) {
  constexpr int64_t kAnyNeon = HWY_NEON_BF16 | HWY_NEON | HWY_NEON_WITHOUT_AES;
  const auto neoverse_v2 = [] {
    return int64_t{HWY_SVE2_128 | HWY_SVE2 | HWY_SVE | kAnyNeon};
  };
  const auto a64fx = [] {
    return int64_t{HWY_SVE | HWY_NEON | HWY_NEON_WITHOUT_AES};
  };
  const auto runs = [](int64_t target, int64_t dispatched,
                       int64_t (*supported)()) {
    return isa_internal::TargetRuns<false>(target, dispatched, supported);
  };
  for (const int64_t target : {HWY_SVE2_128, HWY_SVE2, HWY_SVE, HWY_NEON_BF16,
                               HWY_NEON, HWY_NEON_WITHOUT_AES}) {
    EXPECT_TRUE(runs(target, HWY_SVE2_128, neoverse_v2)) << target;
    // A cap forbids the better ones.
    EXPECT_EQ(runs(target, HWY_NEON, neoverse_v2), target >= HWY_NEON);
  }
  EXPECT_FALSE(runs(HWY_SVE_256, HWY_SVE2_128, neoverse_v2));
  EXPECT_TRUE(runs(HWY_SVE, HWY_SVE, a64fx));
  EXPECT_FALSE(runs(HWY_NEON_BF16, HWY_SVE, a64fx));
  EXPECT_TRUE(runs(HWY_NEON, HWY_SVE, a64fx));
  // x86 does not ask.
  const auto on_x86 = [](int64_t target) {
    return isa_internal::TargetRuns<true>(target, HWY_AVX2, nullptr);
  };
  EXPECT_TRUE(on_x86(HWY_AVX2));
  EXPECT_TRUE(on_x86(HWY_SSE2));
  EXPECT_FALSE(on_x86(HWY_AVX3));
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

TEST(StandsForTest, ASetForItselfWithMoreInstructions) {
  const char* const names[] = {"AVX3_ZEN4", "AVX3_DL",        "AVX3", "AVX2",
                               "AVX2_VNNI", "AVX2_VNNI_INT8", "SSE4"};
  for (const std::string isa : names) {
    for (const std::string ran : names) {
      const bool stands = ran == isa ||
                          (ran == "AVX3" && isa.rfind("AVX3", 0) == 0) ||
                          (ran == "AVX3_DL" && isa == "AVX3_ZEN4") ||
                          (ran == "AVX2_VNNI" && isa == "AVX2_VNNI_INT8");
      EXPECT_EQ(StandsFor(ran, isa), stands) << ran << " for " << isa;
    }
  }
}

using SomeSet = KernelSet<int, int>;
int Best(int i) { return i; }
int Leaf(int i) { return 10 + i; }
int BetterLeaf(int i) { return 15 + i; }
int Plain(int i) { return 20 + i; }
int Least(int i) { return 30 + i; }

TEST_F(InstructionSetTest, PlansTakeTheFirstSetThatRuns) {
  SetAvxVnniInt8IsEmulated(true);
  const SomeSet sets[] = {
      {{HWY_AVX3}, &Best}, {{HWY_AVX3}, nullptr}, {kAvx2VnniInt8, &BetterLeaf},
      {kAvx2Vnni, &Leaf},  {{HWY_AVX2}, &Plain},  {{HWY_STATIC_TARGET}, &Least},
  };
  const auto first = [&] {
    return FirstThatRuns(absl::MakeConstSpan(sets)).get(1);
  };
  for (const Isa& isa : SupportedIsas()) {
    SCOPED_TRACE(isa.name());
    if (HWY_STATIC_TARGET != HWY_TARGETS) {
      hwy::SetSupportedTargetsForTest(isa.highway);
    }
    AllowAvxVnniForTest(isa.leaf != IsaLeaf::kNone);
    AllowAvxVnniInt8ForTest(isa == kAvx2VnniInt8);
    const int64_t target = hwy::DispatchedTarget();
    EXPECT_EQ(first(), target <= HWY_AVX3     ? 1
                       : isa == kAvx2VnniInt8 ? 16
                       : isa == kAvx2Vnni     ? 11
                       : target == HWY_AVX2   ? 21
                                              : 31);
    AllowAvxVnniForTest(true);
    AllowAvxVnniInt8ForTest(true);
  }
}

}  // namespace
}  // namespace quern
