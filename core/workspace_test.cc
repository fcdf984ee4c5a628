#include "quern/core/workspace.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"

namespace quern {
namespace {

struct Scratch {
  float* logits;
  int32_t* order;
  uint8_t* flags;
};
template <typename Allocator>
Scratch LayOut(Allocator& allocator, int64_t tokens) {
  Scratch scratch;
  scratch.logits = allocator.template Allocate<float>("logits", tokens);
  scratch.order = allocator.template Allocate<int32_t>("order", 2 * tokens);
  scratch.flags = allocator.template Allocate<uint8_t>("flags", 1);
  return scratch;
}

TEST(WorkspaceTest, HandsOutExactlyWhatWasCounted) {
  for (const int64_t tokens : {0, 1, 15, 16, 17, 1000}) {
    WorkspaceLayout layout;
    LayOut(layout, tokens);
    ASSERT_FALSE(layout.overflow());
    auto buffer = AlignedBuffer::Create(layout.bytes());
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    Workspace workspace(*buffer);
    const Scratch scratch = LayOut(workspace, tokens);
    EXPECT_EQ(workspace.bytes_left(), 0u);
    for (int64_t i = 0; i < tokens; ++i) scratch.logits[i] = 1.0f;
    for (int64_t i = 0; i < 2 * tokens; ++i) scratch.order[i] = 2;
    *scratch.flags = 3;
    for (int64_t i = 0; i < tokens; ++i) ASSERT_EQ(scratch.logits[i], 1.0f);
    for (int64_t i = 0; i < 2 * tokens; ++i) ASSERT_EQ(scratch.order[i], 2);
    for (const void* piece :
         {static_cast<void*>(scratch.logits), static_cast<void*>(scratch.order),
          static_cast<void*>(scratch.flags)}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % AlignedBuffer::kAlignment,
                0u);
    }
  }
}

TEST(WorkspaceTest, RoundsEveryPieceUpToALine) {
  WorkspaceLayout layout;
  EXPECT_EQ(layout.Allocate<uint8_t>("a", 1), nullptr);
  EXPECT_EQ(layout.bytes(), 64);
  layout.Allocate<uint8_t>("b", 64);
  EXPECT_EQ(layout.bytes(), 128);
  layout.Allocate<double>("c", 9);
  EXPECT_EQ(layout.bytes(), 256);
}

TEST(WorkspaceTest, ReportsOverflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const auto overflows = [](std::initializer_list<int64_t> counts) {
    WorkspaceLayout layout;
    for (const int64_t count : counts) layout.Allocate<float>("x", count);
    return layout.overflow();
  };
  EXPECT_FALSE(overflows({0, 1, 1 << 30}));
  EXPECT_TRUE(overflows({-1}));
  EXPECT_TRUE(overflows({kMax}));
  EXPECT_TRUE(overflows({kMax / 4}));  // rounding up passes the end
  EXPECT_TRUE(overflows({kMax / 8, kMax / 8, kMax / 8}));
  EXPECT_TRUE(overflows({-1, 1}));  // and stays
}

TEST(WorkspaceDeathTest, NamesThePieceThatDoesNotFit) {
  alignas(64) uint8_t memory[128];
  Workspace workspace(memory, sizeof(memory));
  workspace.Allocate<float>("first", 16);
  EXPECT_EQ(workspace.bytes_left(), 64u);
  EXPECT_DEATH(workspace.Allocate<float>("second", 17),
               "workspace too small: \"second\" needs 128 bytes, 64 are left");
}

}  // namespace
}  // namespace quern
