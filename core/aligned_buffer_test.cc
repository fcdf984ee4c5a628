#include "quern/core/aligned_buffer.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

constexpr auto kHuge = static_cast<int64_t>(AlignedBuffer::kHugePageBytes);

AlignedBuffer Make(int64_t bytes) {
  absl::StatusOr<AlignedBuffer> buffer = AlignedBuffer::Create(bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return buffer.ok() ? *std::move(buffer) : AlignedBuffer();
}

bool AlignedTo(const AlignedBuffer& buffer, size_t alignment) {
  return reinterpret_cast<uintptr_t>(buffer.data()) % alignment == 0;
}

TEST(AlignedBufferTest, IsAlignedAndWritableToItsLastByte) {
  for (const int64_t bytes : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65},
                              kHuge - 1, kHuge, kHuge + 1, 3 * kHuge - 5}) {
    AlignedBuffer buffer = Make(bytes);
    ASSERT_EQ(buffer.bytes(), static_cast<size_t>(bytes));
    EXPECT_FALSE(buffer.empty());
    EXPECT_TRUE(AlignedTo(buffer, AlignedBuffer::kAlignment)) << bytes;
    if (bytes >= kHuge) {
      EXPECT_TRUE(AlignedTo(buffer, AlignedBuffer::kHugePageBytes)) << bytes;
    }
    std::memset(buffer.data(), 0x5a, buffer.bytes());
    EXPECT_EQ(buffer.data()[bytes - 1], 0x5a);
  }
}

TEST(AlignedBufferTest, OfNothingOwnsNothing) {
  const AlignedBuffer none;
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(none.data(), nullptr);
  const AlignedBuffer zero = Make(0);
  EXPECT_EQ(zero.bytes(), 0u);
  EXPECT_EQ(zero.HugePageBytes(), 0u);
}

TEST(AlignedBufferTest, RefusesANegativeSize) {
  const auto buffer = AlignedBuffer::Create(-1);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(buffer.status().message(),
            "aligned_buffer: bytes=-1; need bytes >= 0");
}

TEST(AlignedBufferTest, RefusesWhatDoesNotFit) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const int64_t bytes :
       {kMax, kMax - kHuge, kMax - 3 * kHuge, int64_t{1} << 60}) {
    const auto buffer = AlignedBuffer::Create(bytes);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(buffer.status().message()),
                testing::HasSubstr("bytes=" + std::to_string(bytes)));
  }
}

TEST(AlignedBufferTest, MovesWithoutCopying) {
  static_assert(!std::is_copy_constructible_v<AlignedBuffer>);
  static_assert(std::is_nothrow_move_constructible_v<AlignedBuffer>);
  for (const int64_t bytes : {int64_t{100}, 2 * kHuge}) {
    AlignedBuffer a = Make(bytes);
    a.data()[99] = 7;
    const uint8_t* memory = a.data();
    AlignedBuffer b = std::move(a);
    EXPECT_EQ(b.data(), memory);
    EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a move leaves is specified
    EXPECT_TRUE(a.empty());
    AlignedBuffer c = Make(50);
    c = std::move(b);
    EXPECT_EQ(c.data(), memory);
    EXPECT_EQ(c.bytes(), static_cast<size_t>(bytes));
    EXPECT_EQ(c.data()[99], 7);
    AlignedBuffer& same = c;
    c = std::move(same);
    EXPECT_EQ(c.data(), memory);
    c = AlignedBuffer();
    EXPECT_EQ(c.data(), nullptr);
  }
}

TEST(AlignedBufferTest, ReturnsItsMemory) {
  // Far more in turn than the machine has at once.
  for (int i = 0; i < 1000; ++i) {
    AlignedBuffer buffer = Make(int64_t{1} << 30);
    buffer.data()[i] = 1;
  }
}

TEST(AlignedBufferDeathTest, GuardsItsLastHugePage) {
  AlignedBuffer buffer = Make(kHuge);
  volatile uint8_t* data = buffer.data();
  EXPECT_DEATH(data[kHuge] = 1, "");
  EXPECT_DEATH(data[-1] = 1, "");
}

bool MachineHasHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(file, text);
  return text.find("[always]") != std::string::npos ||
         text.find("[madvise]") != std::string::npos;
}

TEST(AlignedBufferTest, GetsHugePagesOnceWritten) {
  if (!MachineHasHugePages()) {
    GTEST_SKIP() << "this machine gives no transparent huge pages";
  }
  AlignedBuffer buffer = Make(8 * kHuge);
  EXPECT_EQ(buffer.HugePageBytes(), 0u);
  std::memset(buffer.data(), 1, buffer.bytes());
  const size_t huge = buffer.HugePageBytes();
  if (huge == 0) GTEST_SKIP() << "memory is too fragmented for a huge page";
  EXPECT_EQ(huge % AlignedBuffer::kHugePageBytes, 0u);
  EXPECT_LE(huge, buffer.bytes());
}

// Two neighbouring mappings used to be merged by the kernel, and an untouched
// buffer then claimed its neighbour's pages.
TEST(AlignedBufferTest, CountsOnlyItsOwnHugePages) {
  std::vector<AlignedBuffer> buffers;
  for (int i = 0; i < 8; ++i) buffers.push_back(Make(2 * kHuge));
  for (size_t i = 0; i < buffers.size(); i += 2) {
    std::memset(buffers[i].data(), 1, buffers[i].bytes());
  }
  for (size_t i = 1; i < buffers.size(); i += 2) {
    EXPECT_EQ(buffers[i].HugePageBytes(), 0u) << i;
  }
}

}  // namespace
}  // namespace quern
