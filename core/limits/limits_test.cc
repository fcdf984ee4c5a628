#include "quern/core/limits/limits.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "hwy/base.h"
#include "hwy/detect_targets.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits_kernels.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/testing/emulate_avx_vnni_int8.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

struct Target {
  const char* name;
  const char* target() const { return name; }
};

constexpr size_t kPrefetches[] = {0, 512};
constexpr size_t kStreams[] = {1, kMaxStreams};

class StreamTest : public IsaTest {
 protected:
  StreamKernels kernels() {
    const StreamKernels kernels = GetStreamKernels();
    EXPECT_RAN_ON(Target{kernels.target});
    return kernels;
  }
};
QUERN_INSTANTIATE_ISA_TEST(StreamTest);

TEST_P(StreamTest, ReadDependsOnEveryByte) {
  const StreamKernels k = kernels();
  constexpr size_t kBytes = kMaxStreams * kLimitBlockBytes;
  AlignedBuffer buffer = *AlignedBuffer::Create(kBytes);
  std::memset(buffer.data(), 0, kBytes);
  const StreamRegions regions = {buffer.data(), nullptr, nullptr, kMaxStreams};
  for (const size_t streams : kStreams) {
    for (const size_t prefetch : kPrefetches) {
      const StreamWay way = {streams, prefetch, false};
      const uint64_t zero = k.stream(DramKind::kRead, way, regions);
      for (size_t i = 0; i < kBytes; ++i) {
        buffer.data()[i] = 1;
        EXPECT_NE(k.stream(DramKind::kRead, way, regions), zero) << i;
        buffer.data()[i] = 0;
      }
    }
  }
}

TEST_P(StreamTest, WritesAndUpdatesEveryByteOnceAndNoOther) {
  const StreamKernels k = kernels();
  for (const DramKind kind : {DramKind::kWrite, DramKind::kCopy,
                              DramKind::kUpdate, DramKind{2, 1, 3}}) {
    const size_t rounds = 2 * kMaxStreams;
    const auto bytes = [&](int blocks) {
      return static_cast<size_t>(blocks) * rounds * kLimitBlockBytes;
    };
    const size_t writes = bytes(kind.writes), updates = bytes(kind.updates);
    AlignedBuffer read = *AlignedBuffer::Create(
        static_cast<int64_t>(bytes(kind.reads) + kLimitBlockBytes));
    AlignedBuffer written =
        *AlignedBuffer::Create(static_cast<int64_t>(writes + 64));
    AlignedBuffer updated =
        *AlignedBuffer::Create(static_cast<int64_t>(updates + 64));
    std::memset(read.data(), 0x77, read.bytes());
    for (const size_t streams : kStreams) {
      for (const size_t prefetch : kPrefetches) {
        for (const bool past_caches : {false, true}) {
          std::memset(written.data(), 0x55, writes + 64);
          std::memset(updated.data(), 0x54, updates + 64);
          k.stream(kind, {streams, prefetch, past_caches},
                   {read.data(), written.data(), updated.data(), rounds});
          for (size_t i = 0; i < writes + 64; ++i) {
            ASSERT_EQ(written.data()[i], i < writes ? 1 : 0x55) << i;
          }
          for (size_t i = 0; i < updates + 64; ++i) {
            ASSERT_EQ(updated.data()[i], i < updates ? 0x55 : 0x54) << i;
          }
          for (size_t i = 0; i < read.bytes(); ++i) {
            ASSERT_EQ(read.data()[i], 0x77) << i;
          }
        }
      }
    }
  }
}

class PeakTest : public IsaTest {
 protected:
  PeakKernels kernels() {
    const PeakKernels kernels = GetPeakKernels();
    EXPECT_RAN_ON(Target{kernels.target});
    return kernels;
  }
  bool Is(const char* target) const { return std::string(isa()) == target; }
  // vpdpbssd, to which 255 is -1.
  bool HasSignedQuads() const { return Is("AVX2_VNNI_INT8"); }
  bool HasVnni() const {
    return HasSignedQuads() || Is("AVX2_VNNI") || Is("AVX3_DL") ||
           Is("AVX3_ZEN4") || Is("AVX3_SPR");
  }
  bool HasDotBF16() const { return Is("AVX3_ZEN4") || Is("AVX3_SPR"); }
  // The width of a vector in bytes, 16 on the smallest instruction sets.
  int VectorBytes() const {
    const std::string name = isa();
    return name.rfind("AVX3", 0) == 0   ? 64
           : name.rfind("AVX2", 0) == 0 ? 32
                                        : 16;
  }
};
// Before GoogleTest asks which instruction sets there are.
const bool kHasVpdpbssd = EmulateAvxVnniInt8();
QUERN_INSTANTIATE_INT8_ISA_TEST(PeakTest);

TEST(PeakSetsTest, HaveAllLeaves) {
  EXPECT_EQ(kAvx2VnniInt8.Runs(), kHasVpdpbssd);
  for (const Isa& isa : SupportedIsas()) {
    if (isa.highway != HWY_AVX2) continue;
    UseIsaForTest(&isa);
    EXPECT_STREQ(GetPeakKernels().target, isa.name());
  }
  UseIsaForTest(nullptr);
}

// With ones everywhere each multiplication adds one to the result: what is
// claimed is what was computed.
TEST_P(PeakTest, DoesTheOperationsThatItClaims) {
  const PeakKernels k = kernels();
  for (const PeakKernel& peak : {k.f32, k.bf16, k.i8}) {
    for (const size_t steps : {1, 2, 33, 100}) {
      EXPECT_EQ(peak.run(steps, 1, 1),
                peak.ops_per_step() / 2 * static_cast<double>(steps))
          << peak.sequence << ", " << steps << " steps";
      EXPECT_EQ(peak.run(steps, 3, -2),
                -6 * peak.ops_per_step() / 2 * static_cast<double>(steps))
          << peak.sequence << ", " << steps << " steps";
    }
  }
}

// A sum of ones in f32 stops at 2^24. The total therefore counts the sums that
// are really independent, which is what hides the latency of a multiply-add.
TEST_P(PeakTest, HasTwelveIndependentSumsOfF32) {
  const PeakKernels k = kernels();
  EXPECT_EQ(k.f32.sums, 12);
  const double lanes = VectorBytes() / 4;
  EXPECT_EQ(k.f32.run((size_t{1} << 24) + 100, 1, 1), 12 * lanes * 0x1p24);
}

// One multiply-add for each lane of a whole vector; where bf16 has no dot
// product instruction it is widened, and no faster than f32.
TEST_P(PeakTest, F32AndBF16AreBoundByTheirInstruction) {
  const PeakKernels k = kernels();
  EXPECT_EQ(k.f32.ops_per_sum, 2.0 * VectorBytes() / 4);
  if (HasDotBF16()) {
    EXPECT_EQ(k.bf16.ops_per_sum, 2.0 * VectorBytes() / 2);
  } else {
    EXPECT_EQ(k.bf16.run, k.f32.run);
  }
}

// maddubs saturates a pair of products to 16 bits, which shows that it is the
// instruction that ran: an exact emulation has several times its cost. VNNI has
// an exact instruction; SSE2 multiplies 16 bits by 16.
TEST_P(PeakTest, I8RunsOnTheFastestInstruction) {
  const PeakKernels k = kernels();
  const double products = k.i8.ops_per_step() / 2;
  const bool exact = HasVnni() || Is("SSE2");
  const int all_ones = HasSignedQuads() ? -1 : 255;
  EXPECT_EQ(k.i8.run(7, 255, 127),
            7 * products * (exact ? all_ones * 127 : 32767 / 2.0));
  EXPECT_EQ(k.i8.run(7, 255, -128),
            7 * products * (exact ? all_ones * -128 : -32768 / 2.0));
  EXPECT_GE(k.i8.sums, 8);
}

TEST(LimitsTest, EverySampleIsARate) {
  // Rates of emulated instructions would take minutes.
  AllowAvxVnniInt8ForTest(!AvxVnniInt8IsEmulated());
  CpuInfo cpu;  // small caches: the least buffer
  auto limits = Limits::Create(cpu);
  ASSERT_TRUE(limits.ok()) << limits.status();
  InlineExecutor executor;
  // A quarter of the buffer.
  constexpr double kPart = (HWY_IS_TSAN ? 8 : 64) << 20;
  for (const DramKind kind : {DramKind::kRead, DramKind::kWrite,
                              DramKind::kCopy, DramKind::kUpdate}) {
    const LimitSample sample = limits->Dram(kind, executor);
    EXPECT_GT(sample.seconds, 0);
    EXPECT_EQ(sample.amount, kind == DramKind::kUpdate ? 2 * kPart : kPart);
    EXPECT_FALSE(limits->Variant(kind).empty());
  }
  const LimitSample cache = limits->CacheRead(limits->l2_set_bytes(), executor);
  EXPECT_GT(cache.seconds, 0);
  EXPECT_GT(cache.amount, 0);
  // A cache may be larger than the buffer, as it is under tsan.
  EXPECT_GT(limits->CacheRead(int64_t{1} << 40, executor).amount, 0);
  for (const PeakKind kind :
       {PeakKind::kF32, PeakKind::kBF16, PeakKind::kI8, PeakKind::kI6}) {
    const LimitSample sample = limits->Peak(kind, executor);
    EXPECT_GT(sample.seconds, 0);
    EXPECT_GT(sample.amount, 0);
    EXPECT_STRNE(limits->Sequence(kind), "");
  }
  EXPECT_GT(Limits::Clock().rate(), 0);
  EXPECT_TRUE(limits->pages() == "2M" || limits->pages() == "4K" ||
              limits->pages() == "mixed")
      << limits->pages();
}

TEST(LimitsTest, SmallPagesAreSmall) {
  auto limits = Limits::Create(CpuInfo(), LimitPages::kSmall);
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_EQ(limits->pages(), "4K");
}

TEST(LimitsTest, CalibratesEachKindByItself) {
  auto limits = Limits::Create(CpuInfo());
  ASSERT_TRUE(limits.ok()) << limits.status();
  InlineExecutor executor;
  limits->Calibrate(DramKind::kCopy, 1, executor);
  const std::string copy = limits->Variant(DramKind::kCopy);
  limits->Calibrate(DramKind::kUpdate, 1, executor);
  EXPECT_EQ(limits->Variant(DramKind::kCopy), copy);
  // An update has no choice of stores.
  EXPECT_EQ(limits->Variant(DramKind::kUpdate).find("nt"), std::string::npos);
}

TEST(LimitsTest, WorkersShareTheLastLevel) {
  CpuInfo cpu;
  cpu.l3_bytes = 32 << 20;
  const auto limits = Limits::Create(cpu);
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_EQ(limits->l3_set_bytes(1), 24 << 20);
  EXPECT_EQ(limits->l3_set_bytes(2), 12 << 20);
}

}  // namespace
}  // namespace quern
