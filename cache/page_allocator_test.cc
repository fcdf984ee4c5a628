#include "quern/cache/page_allocator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/page_table.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"

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

TEST(PageAllocatorTest, SharesPagesUntilTheLastHolderGivesThemBack) {
  PageAllocator allocator = PageAllocator::Create(8, 16).value();
  std::vector<int32_t> a, b, c;
  ASSERT_TRUE(allocator.Grow(40, a).ok());
  ASSERT_TRUE(allocator.Fork(a, 40, b).ok());
  ASSERT_TRUE(allocator.Fork(b, 32, c).ok());
  EXPECT_THAT(b, ElementsAre(0, 1, 2));
  EXPECT_THAT(c, ElementsAre(0, 1));
  EXPECT_EQ(allocator.holders(1), 3);
  EXPECT_EQ(allocator.holders(2), 2);
  EXPECT_EQ(allocator.holders(7), 0);
  EXPECT_EQ(allocator.free_pages(), 5);
  allocator.Release(a);
  allocator.Release(c);
  EXPECT_EQ(allocator.free_pages(), 5);
  EXPECT_EQ(allocator.holders(2), 1);
  allocator.Release(b);
  EXPECT_EQ(allocator.free_pages(), 8);
}

TEST(PageAllocatorTest, ReplacesSharedPagesThatAreWritten) {
  PageAllocator allocator = PageAllocator::Create(8, 16).value();
  std::vector<int32_t> a, b;
  std::vector<PageCopy> copies;
  ASSERT_TRUE(allocator.Grow(40, a).ok());
  ASSERT_TRUE(allocator.Fork(a, 40, b).ok());
  // The third page holds tokens 32 to 39 already: it is copied.
  ASSERT_TRUE(allocator.GrowForWrite(40, 50, b, copies).ok());
  EXPECT_THAT(b, ElementsAre(0, 1, 3, 4));
  EXPECT_THAT(copies, ElementsAre(PageCopy{2, 3}));
  EXPECT_EQ(allocator.holders(2), 1);
  // The other holder is alone now.
  copies.clear();
  ASSERT_TRUE(allocator.GrowForWrite(40, 41, a, copies).ok());
  EXPECT_THAT(a, ElementsAre(0, 1, 2));
  EXPECT_THAT(copies, IsEmpty());
  // Rewritten from its first token on: nothing of it is worth a copy.
  ASSERT_TRUE(allocator.GrowForWrite(16, 20, a, copies).ok());
  EXPECT_THAT(a, ElementsAre(0, 5, 2));
  EXPECT_THAT(copies, IsEmpty());
  // No token, no page to write.
  ASSERT_TRUE(allocator.GrowForWrite(3, 3, a, copies).ok());
  EXPECT_THAT(a, ElementsAre(0, 5, 2));
  allocator.Release(a);
  allocator.Release(b);
  EXPECT_EQ(allocator.free_pages(), 8);
}

TEST(PageAllocatorTest, ChangesNothingWhereItRefusesToFork) {
  PageAllocator allocator = PageAllocator::Create(4, 16).value();
  std::vector<int32_t> a, b;
  std::vector<PageCopy> copies;
  ASSERT_TRUE(allocator.Grow(40, a).ok());
  EXPECT_THAT(allocator.Fork(a, 49, b).message(),
              HasSubstr("kv_len=49; need 0 <= kv_len <= 48"));
  EXPECT_THAT(allocator.Fork(a, -1, b).message(), HasSubstr("kv_len=-1"));
  for (const int32_t stray : {3, 4, -1, 2147483647}) {
    const absl::Status status = allocator.Fork({0, 1, stray}, 40, b);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(
        status.message(),
        HasSubstr("pages[2]=" + std::to_string(stray) + " is not on loan"));
    EXPECT_THAT(b, IsEmpty());
    EXPECT_EQ(allocator.holders(0), 1);
  }
  // Only the pages that the branch holds must be on loan.
  ASSERT_TRUE(allocator.Fork({0, 3}, 16, b).ok());
  allocator.Release(b);
  ASSERT_TRUE(allocator.Fork(a, 40, b).ok());
  EXPECT_THAT(allocator.Fork(a, 16, b).message(),
              HasSubstr("the branch has 3 pages; need none"));
  // One page for the shared one, one more: only one is free.
  const absl::Status status = allocator.GrowForWrite(40, 50, b, copies);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("tokens [40, 50) need 2 more pages of 16 tokens, 1 of "
                        "them for shared ones; 1 of 4 are free"));
  EXPECT_THAT(b, ElementsAre(0, 1, 2));
  EXPECT_THAT(copies, IsEmpty());
  EXPECT_EQ(allocator.holders(2), 2);
  EXPECT_THAT(allocator.GrowForWrite(-1, 0, b, copies).message(),
              HasSubstr("begin=-1"));
  EXPECT_THAT(allocator.GrowForWrite(2, 1, b, copies).message(),
              HasSubstr("end=1; need end >= 2"));
}

TEST(PageAllocatorTest, TakesBackPagesThatAWindowHasLeft) {
  PageAllocator allocator = PageAllocator::Create(6, 16).value();
  std::vector<int32_t> a, b;
  std::vector<PageCopy> copies;
  ASSERT_TRUE(allocator.Grow(80, a).ok());
  EXPECT_EQ(allocator.ReleaseBefore(-40, a), 0);
  EXPECT_EQ(allocator.ReleaseBefore(15, a), 0);
  EXPECT_THAT(a, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(allocator.ReleaseBefore(16, a), 1);
  EXPECT_THAT(a, ElementsAre(kNoPage, 1, 2, 3, 4));
  EXPECT_EQ(allocator.ReleaseBefore(63, a), 2);
  EXPECT_EQ(allocator.ReleaseBefore(63, a), 0);
  EXPECT_THAT(a, ElementsAre(kNoPage, kNoPage, kNoPage, 3, 4));
  EXPECT_EQ(allocator.free_pages(), 4);
  // The sequence grows on, into pages that it had before.
  ASSERT_TRUE(allocator.Grow(81, a).ok());
  EXPECT_THAT(a, ElementsAre(kNoPage, kNoPage, kNoPage, 3, 4, 1));
  // A branch lacks what its origin lacks, and holds the rest.
  ASSERT_TRUE(allocator.Fork(a, 81, b).ok());
  EXPECT_EQ(a, b);
  EXPECT_EQ(allocator.holders(3), 2);
  EXPECT_EQ(allocator.ReleaseBefore(64, b), 1);
  EXPECT_EQ(allocator.holders(3), 1);
  ASSERT_TRUE(allocator.GrowForWrite(81, 82, b, copies).ok());
  EXPECT_THAT(b, ElementsAre(kNoPage, kNoPage, kNoPage, kNoPage, 4, 2));
  EXPECT_THAT(copies, ElementsAre(PageCopy{1, 2}));
  const absl::Status status = allocator.GrowForWrite(63, 82, b, copies);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("tokens [63, 82): page 3 of the sequence is missing"));
  // Beyond the end: all pages.
  EXPECT_EQ(allocator.ReleaseBefore(1000, b), 2);
  allocator.Release(a);
  allocator.Release(b);
  EXPECT_THAT(a, IsEmpty());
  EXPECT_THAT(b, IsEmpty());
  EXPECT_EQ(allocator.free_pages(), 6);
}

// Forks at random; a page that is written has one holder, and content follows.
// Now and then a window leaves the first tokens of a sequence.
TEST(PageAllocatorTest, KeepsTheTokensOfEveryBranch) {
  TestRng rng;
  constexpr int64_t kPages = 60, kPageSize = 4;
  PageAllocator allocator = PageAllocator::Create(kPages, kPageSize).value();
  struct Sequence {
    std::vector<int32_t> pages;
    std::vector<uint64_t> tokens;
    size_t first = 0;  // tokens before it may be gone
  };
  std::vector<Sequence> sequences(6);
  std::vector<uint64_t> memory(kPages * kPageSize);
  for (int step = 0; step < 3000; ++step) {
    Sequence& s = sequences[static_cast<size_t>(rng.Integer(0, 5))];
    const int64_t choice = rng.Integer(0, 9);
    if (choice == 0) {
      allocator.Release(s.pages);
      s.tokens.clear();
      s.first = 0;
    } else if (choice == 2) {
      s.first = static_cast<size_t>(
          rng.Integer(static_cast<int64_t>(s.first),
                      static_cast<int64_t>(s.tokens.size())));
      allocator.ReleaseBefore(static_cast<int64_t>(s.first), s.pages);
    } else if (choice == 1 && s.pages.empty()) {
      const Sequence& from = sequences[static_cast<size_t>(rng.Integer(0, 5))];
      const int64_t kv_len =
          rng.Integer(0, static_cast<int64_t>(from.tokens.size()));
      if (&from == &s) continue;
      ASSERT_TRUE(allocator.Fork(from.pages, kv_len, s.pages).ok());
      s.tokens.assign(from.tokens.begin(), from.tokens.begin() + kv_len);
      s.first = std::min(from.first, s.tokens.size());
    } else {
      const auto begin = static_cast<int64_t>(s.tokens.size());
      const int64_t end = begin + rng.Integer(0, 6);
      std::vector<PageCopy> copies;
      if (!allocator.GrowForWrite(begin, end, s.pages, copies).ok()) continue;
      for (const PageCopy copy : copies) {
        for (int64_t t = 0; t < kPageSize; ++t) {
          memory.at(static_cast<size_t>(copy.to * kPageSize + t)) =
              memory.at(static_cast<size_t>(copy.from * kPageSize + t));
        }
      }
      for (int64_t t = begin; t < end; ++t) {
        s.tokens.push_back(rng.Next());
        const int32_t page = s.pages.at(static_cast<size_t>(t / kPageSize));
        memory.at(static_cast<size_t>(page * kPageSize + t % kPageSize)) =
            s.tokens.back();
      }
    }
    for (const Sequence& each : sequences) {
      for (size_t t = each.first; t < each.tokens.size(); ++t) {
        const auto page = static_cast<size_t>(each.pages.at(t / kPageSize));
        ASSERT_EQ(memory.at(page * kPageSize + t % kPageSize), each.tokens[t]);
      }
    }
  }
  for (Sequence& s : sequences) allocator.Release(s.pages);
  EXPECT_EQ(allocator.free_pages(), kPages);
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
