#include "quern/testing/emulate_avx_vnni_int8.h"

#include <csignal>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/isa.h"
#include "quern/testing/data.h"

#if QUERN_AVX_VNNI

namespace quern {
namespace {

const bool kHasVpdpbssd = EmulateAvxVnniInt8();

struct Registers {
  uint8_t a[32], b[32];
  int32_t sums[8];
};

// One instruction, given as its last four bytes, on registers by number.
#define QUERN_VPDPBSSD(name, sums_ymm, a_ymm, b_ymm, bytes)                \
  __attribute__((target("avx2"))) void name(Registers& r) {                \
    asm volatile("vmovdqu (%0), %%ymm" #a_ymm                              \
                 "\n\t"                                                    \
                 "vmovdqu (%1), %%ymm" #b_ymm                              \
                 "\n\t"                                                    \
                 "vmovdqu (%2), %%ymm" #sums_ymm                           \
                 "\n\t"                                                    \
                 ".byte 0xC4, " bytes                                      \
                 "\n\t"                                                    \
                 "vmovdqu %%ymm" #sums_ymm ", (%2)"                        \
                 :                                                         \
                 : "r"(r.a), "r"(r.b), "r"(r.sums)                         \
                 : "memory", "xmm" #a_ymm, "xmm" #b_ymm, "xmm" #sums_ymm); \
  }                                                                        \
  static_assert(true, "semicolon")

QUERN_VPDPBSSD(LowRegisters, 3, 2, 1, "0xE2, 0x6F, 0x50, 0xD9");
QUERN_VPDPBSSD(HighRegisters, 12, 9, 15, "0x42, 0x37, 0x50, 0xE7");
QUERN_VPDPBSSD(MixedRegisters, 8, 0, 7, "0x62, 0x7F, 0x50, 0xC7");
QUERN_VPDPBSSD(Half, 3, 2, 1, "0xE2, 0x6B, 0x50, 0xD9");
// vpdpbssds saturates: another instruction.
QUERN_VPDPBSSD(Saturating, 3, 2, 1, "0xE2, 0x6F, 0x51, 0xD9");

void ExpectRight(void (*instruction)(Registers&), int lanes, TestRng& rng) {
  Registers r;
  for (int i = 0; i < 32; ++i) {
    const bool extreme = i % 8 < 4;
    r.a[i] = static_cast<uint8_t>(extreme ? 0x80 : rng.Integer(0, 255));
    r.b[i] = static_cast<uint8_t>(extreme ? 0x80 : rng.Integer(0, 255));
  }
  uint32_t want[8] = {};
  for (int lane = 0; lane < 8; ++lane) {
    // The largest sums wrap.
    r.sums[lane] = lane == 0 ? INT32_MAX : static_cast<int32_t>(lane) - 4;
    if (lane >= lanes) continue;
    want[lane] = static_cast<uint32_t>(r.sums[lane]);
    for (int i = 4 * lane; i < 4 * lane + 4; ++i) {
      want[lane] += static_cast<uint32_t>(static_cast<int8_t>(r.a[i]) *
                                          static_cast<int8_t>(r.b[i]));
    }
  }
  const Registers before = r;
  instruction(r);
  for (int lane = 0; lane < 8; ++lane) {
    EXPECT_EQ(static_cast<uint32_t>(r.sums[lane]), want[lane]) << lane;
  }
  EXPECT_EQ(std::memcmp(r.a, before.a, 32) + std::memcmp(r.b, before.b, 32), 0);
}

class EmulateAvxVnniInt8Test : public testing::Test {
 protected:
  void SetUp() override {
    if (!kHasVpdpbssd) GTEST_SKIP() << "emulation does not work here";
  }
};

// On a CPU that has it, this proves what the test expects.
TEST_F(EmulateAvxVnniInt8Test, GivesWhatTheInstructionGives) {
  TestRng rng;
  const int64_t before = EmulatedInstructions();
  for (int i = 0; i < 50; ++i) {
    ExpectRight(&LowRegisters, 8, rng);
    ExpectRight(&HighRegisters, 8, rng);
    ExpectRight(&MixedRegisters, 8, rng);
    ExpectRight(&Half, 4, rng);
  }
  EXPECT_EQ(EmulatedInstructions() - before, AvxVnniInt8IsEmulated() ? 200 : 0);
}

TEST_F(EmulateAvxVnniInt8Test, ServesEveryThread) {
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([seed] {
      TestRng rng(seed);
      for (int i = 0; i < 100; ++i) ExpectRight(&HighRegisters, 8, rng);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(EmulateAvxVnniInt8Test, MakesTheInstructionSetRun) {
  EXPECT_TRUE(HasAvxVnniInt8());
  AllowAvxVnniInt8ForTest(false);
  EXPECT_FALSE(HasAvxVnniInt8());
  AllowAvxVnniInt8ForTest(true);
  for (const Isa& isa : {Isa{HWY_AVX2}, kAvx2Vnni}) {
    UseIsaForTest(&isa);
    EXPECT_FALSE(kAvx2VnniInt8.Runs()) << isa.name();
  }
  UseIsaForTest(&kAvx2VnniInt8);
  EXPECT_TRUE(kAvx2VnniInt8.Runs());
  UseIsaForTest(nullptr);
  EXPECT_TRUE(kAvx2VnniInt8.Runs());
}

TEST_F(EmulateAvxVnniInt8Test, OtherIllegalInstructionsStayIllegal) {
  if (!AvxVnniInt8IsEmulated()) GTEST_SKIP() << "the CPU may have them";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Registers r = {};
        Saturating(r);
      },
      "");
  EXPECT_DEATH(__builtin_trap(), "");
}

}  // namespace
}  // namespace quern

#endif  // QUERN_AVX_VNNI
