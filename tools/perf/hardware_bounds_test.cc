#include "quern/tools/perf/hardware_bounds.h"

#include "gtest/gtest.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

const CpuId kZen3 = {"AuthenticAMD", 25, 1};
const CpuId kZen4 = {"AuthenticAMD", 25, 0x11};
const CpuId kIceLake = {"GenuineIntel", 6, 0x6a};
const CpuId kSapphireRapids = {"GenuineIntel", 6, 0x8f};
const CpuId kUnknown = {"GenuineIntel", 25, 1};

TEST(HardwareBoundTest, Zen3HasTwoMultipliersOf256Bits) {
  EXPECT_EQ(HardwareBound(kZen3, "AVX2", PeakKind::kF32), 32);
  EXPECT_EQ(HardwareBound(kZen3, "AVX2", PeakKind::kBF16), 32);
  EXPECT_EQ(HardwareBound(kZen3, "AVX2", PeakKind::kI8), 64);
  EXPECT_EQ(HardwareBound(kZen3, "SSE4", PeakKind::kF32), 16);
  EXPECT_EQ(HardwareBound(kZen3, "SSE2", PeakKind::kI8), 32);
  EXPECT_EQ(HardwareBound(kZen3, "AVX2", PeakKind::kI6), 114);
  EXPECT_EQ(HardwareBound(kZen3, "SSE4", PeakKind::kI6), 57);
  EXPECT_EQ(HardwareBound(kZen3, "SSE2", PeakKind::kI6), 32);
}

TEST(HardwareBoundTest, Zen4HasDotProducts) {
  EXPECT_EQ(HardwareBound(kZen4, "AVX3_ZEN4", PeakKind::kF32), 32);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3_ZEN4", PeakKind::kBF16), 64);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3_DL", PeakKind::kBF16), 32);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3_DL", PeakKind::kI8), 128);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3", PeakKind::kI8), 64);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3_DL", PeakKind::kI6), 128);
  EXPECT_EQ(HardwareBound(kZen4, "AVX3", PeakKind::kI6), 114);
}

TEST(HardwareBoundTest, SaysWhereItIsUnknown) {
  EXPECT_EQ(HardwareBound(kIceLake, "AVX3_DL", PeakKind::kF32), 64);
  EXPECT_EQ(HardwareBound(kIceLake, "AVX3_DL", PeakKind::kI8), 0);
  EXPECT_EQ(HardwareBound(kSapphireRapids, "AVX2_VNNI", PeakKind::kF32), 32);
  EXPECT_EQ(HardwareBound(kSapphireRapids, "AVX2_VNNI", PeakKind::kI8), 0);
  EXPECT_EQ(HardwareBound(kSapphireRapids, "AVX2_VNNI_INT8", PeakKind::kF32),
            32);
  EXPECT_EQ(HardwareBound(kUnknown, "AVX2", PeakKind::kF32), 0);
  EXPECT_EQ(HardwareNote(kUnknown, "AVX2", PeakKind::kF32),
            "hardware bound unknown");
  EXPECT_EQ(HardwareNote(kZen3, "AVX2", PeakKind::kF32),
            "Zen 3: at most 32 a cycle");
}

}  // namespace
}  // namespace quern
