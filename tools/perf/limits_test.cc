#include "tools/perf/limits.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/aligned_buffer.h"
#include "core/cpu_info.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "gtest/gtest.h"
#include "hwy/base.h"
#include "testing/isa_test.h"
#include "tools/perf/limits_kernels.h"
#include "tools/perf/op.h"

namespace quern {
namespace {

constexpr size_t kBytes = 3 * kLimitBlockBytes;

struct Target {
  const char* name;
  const char* target() const { return name; }
};

class LimitKernelsTest : public IsaTest {
 protected:
  LimitKernels kernels() {
    const LimitKernels kernels = GetLimitKernels();
    EXPECT_RAN_ON(Target{kernels.target});
    return kernels;
  }
};
QUERN_INSTANTIATE_ISA_TEST(LimitKernelsTest);

TEST_P(LimitKernelsTest, ReadDependsOnEveryByte) {
  const LimitKernels k = kernels();
  AlignedBuffer buffer = *AlignedBuffer::Create(kBytes);
  std::memset(buffer.data(), 0, kBytes);
  for (const size_t prefetch : {0, 512}) {
    const uint64_t zero = k.read(buffer.data(), kBytes, prefetch);
    for (size_t i = 0; i < kBytes; ++i) {
      buffer.data()[i] = 1;
      EXPECT_NE(k.read(buffer.data(), kBytes, prefetch), zero) << i;
      buffer.data()[i] = 0;
    }
  }
}

TEST_P(LimitKernelsTest, WriteWritesEveryByteAndNoMore) {
  const LimitKernels k = kernels();
  AlignedBuffer buffer = *AlignedBuffer::Create(kBytes + 64);
  std::memset(buffer.data(), 0x55, kBytes + 64);
  k.write(buffer.data(), kBytes);
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(buffer.data()[i], 1) << i;
  for (size_t i = kBytes; i < kBytes + 64; ++i) {
    ASSERT_EQ(buffer.data()[i], 0x55) << i;
  }
}

TEST_P(LimitKernelsTest, CopyCopiesEveryByteAndNoMore) {
  const LimitKernels k = kernels();
  AlignedBuffer from = *AlignedBuffer::Create(kBytes);
  AlignedBuffer to = *AlignedBuffer::Create(kBytes + 64);
  for (size_t i = 0; i < kBytes; ++i) {
    from.data()[i] = static_cast<uint8_t>(i * 7 + i / 256);
  }
  for (const size_t prefetch : {0, 512}) {
    std::memset(to.data(), 0x55, kBytes + 64);
    k.copy(from.data(), to.data(), kBytes, prefetch);
    EXPECT_EQ(std::memcmp(from.data(), to.data(), kBytes), 0);
    for (size_t i = kBytes; i < kBytes + 64; ++i) {
      ASSERT_EQ(to.data()[i], 0x55) << i;
    }
  }
}

// With ones everywhere each multiplication adds one to the result: what is
// claimed is what was computed.
TEST_P(LimitKernelsTest, DotsDoTheOperationsThatTheyClaim) {
  const LimitKernels k = kernels();
  AlignedBuffer ones = *AlignedBuffer::Create(kOperandBytes);
  const auto expect = [&](const DotKernel& dot) {
    for (const size_t steps : {1, 2, 33, 100}) {
      EXPECT_EQ(dot.run(steps, ones.data()),
                dot.ops_per_step / 2 * static_cast<double>(steps))
          << steps << " steps";
    }
  };
  for (size_t i = 0; i < kOperandBytes / 4; ++i) ones.data<float>()[i] = 1.0f;
  expect(k.f32);
  for (size_t i = 0; i < kOperandBytes / 2; ++i) {
    ones.data<BFloat16>()[i] = hwy::BF16FromF32(1.0f);
  }
  expect(k.bf16);
  std::memset(ones.data(), 1, kOperandBytes);
  expect(k.i8);
}

TEST(LimitsTest, EverySampleIsARate) {
  CpuInfo cpu;  // small caches: the least buffer
  auto limits = Limits::Create(cpu);
  ASSERT_TRUE(limits.ok()) << limits.status();
  InlineExecutor executor;
  for (const DramKind kind :
       {DramKind::kRead, DramKind::kWrite, DramKind::kCopy}) {
    const LimitSample sample = limits->Dram(kind, executor);
    EXPECT_GT(sample.seconds, 0);
    EXPECT_EQ(sample.amount, 32 << 20);
    EXPECT_FALSE(limits->Variant(kind).empty());
  }
  const LimitSample cache = limits->CacheRead(limits->l2_set_bytes(), executor);
  EXPECT_GT(cache.seconds, 0);
  EXPECT_GT(cache.amount, 0);
  for (const PeakKind kind : {PeakKind::kF32, PeakKind::kBF16, PeakKind::kI8}) {
    const LimitSample sample = limits->Peak(kind, executor);
    EXPECT_GT(sample.seconds, 0);
    EXPECT_GT(sample.amount, 0);
  }
  EXPECT_TRUE(limits->pages() == "2M" || limits->pages() == "4K" ||
              limits->pages() == "mixed")
      << limits->pages();
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
