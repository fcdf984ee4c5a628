#include "cache/page_allocator.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/data.h"
#include "testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(PageAllocatorTest, LendsPagesAsASequenceGrows) {
  PageAllocator allocator = PageAllocator::Create(4, 16).value();
  std::vector<int32_t> pages;
  EXPECT_TRUE(allocator.Grow(0, pages).ok());
  EXPECT_THAT(pages, IsEmpty());
  EXPECT_TRUE(allocator.Grow(1, pages).ok());
  EXPECT_TRUE(allocator.Grow(16, pages).ok());
  EXPECT_THAT(pages, ElementsAre(0));
  EXPECT_TRUE(allocator.Grow(33, pages).ok());
  EXPECT_THAT(pages, ElementsAre(0, 1, 2));
  // Shorter: nothing is taken back.
  EXPECT_TRUE(allocator.Grow(1, pages).ok());
  EXPECT_EQ(allocator.free_pages(), 1);
  allocator.Release(pages);
  EXPECT_THAT(pages, IsEmpty());
  EXPECT_EQ(allocator.free_pages(), 4);
}

// Lists of all pages would take 8 GiB, and a while.
TEST(PageAllocatorTest, TakesNoMemoryForPagesNotInUse) {
  EXPECT_NO_ALLOCATION((void)PageAllocator::Create(2147483647, 1));
  PageAllocator allocator = PageAllocator::Create(2147483647, 1).value();
  std::vector<int32_t> pages;
  EXPECT_TRUE(allocator.Grow(3, pages).ok());
  EXPECT_THAT(pages, ElementsAre(0, 1, 2));
  EXPECT_EQ(allocator.free_pages(), 2147483644);
  EXPECT_EQ(allocator.Grow(int64_t{1} << 40, pages).code(),
            absl::StatusCode::kResourceExhausted);
  allocator.Release(pages);
  EXPECT_EQ(allocator.free_pages(), 2147483647);
}

TEST(PageAllocatorTest, ChangesNothingWhereItRefuses) {
  PageAllocator allocator = PageAllocator::Create(3, 8).value();
  std::vector<int32_t> a, b;
  ASSERT_TRUE(allocator.Grow(16, a).ok());
  ASSERT_TRUE(allocator.Grow(3, b).ok());
  const absl::Status status = allocator.Grow(25, a);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("kv_len=25 needs 2 more pages of 8 tokens; 0 of 3"));
  EXPECT_THAT(a, ElementsAre(0, 1));
  EXPECT_EQ(allocator.Grow(-1, a).code(), absl::StatusCode::kInvalidArgument);
}

TEST(PageAllocatorTest, NeverLendsAPageTwice) {
  TestRng rng;
  constexpr int64_t kPages = 40;
  PageAllocator allocator = PageAllocator::Create(kPages, 4).value();
  std::vector<std::vector<int32_t>> sequences(8);
  for (int step = 0; step < 2000; ++step) {
    auto& pages = sequences[static_cast<size_t>(rng.Integer(0, 7))];
    if (rng.Integer(0, 4) == 0) {
      allocator.Release(pages);
    } else {
      const auto held = static_cast<int64_t>(pages.size()) * 4;
      allocator.Grow(held + rng.Integer(0, 12), pages).IgnoreError();
    }
    std::set<int32_t> lent;
    size_t count = 0;
    for (const auto& held : sequences) {
      lent.insert(held.begin(), held.end());
      count += held.size();
    }
    ASSERT_EQ(lent.size(), count);
    ASSERT_EQ(allocator.free_pages(), kPages - static_cast<int64_t>(count));
    for (const int32_t page : lent) ASSERT_TRUE(0 <= page && page < kPages);
  }
}

TEST(PageAllocatorTest, RefusesSizesOutOfRange) {
  const auto expect_refused = [](int64_t num_pages, int64_t page_size,
                                 const char* words) {
    const auto status = PageAllocator::Create(num_pages, page_size).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  expect_refused(-1, 16, "num_pages=-1");
  expect_refused(int64_t{1} << 31, 16, "num_pages=2147483648");
  expect_refused(4, 0, "page_size=0");
}

TEST(PageAllocatorDeathTest, StopsWhereAPageIsGivenBackTwice) {
  PageAllocator allocator = PageAllocator::Create(2, 16).value();
  std::vector<int32_t> pages;
  ASSERT_TRUE(allocator.Grow(1, pages).ok());
  std::vector<int32_t> copy = pages;
  allocator.Release(pages);
  EXPECT_DEATH(allocator.Release(copy), "check failed");
}

}  // namespace
}  // namespace quern
