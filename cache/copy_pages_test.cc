#include "quern/cache/copy_pages.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

KvLayout MakeLayout(int64_t head_dim = 8) {
  KvLayoutSpec spec;
  spec.dtype = DType::kI8;
  spec.kv_heads = 3;
  spec.head_dim = head_dim;
  spec.page_size = 16;
  spec.scaling = KvScaling::kPerTokenHead;
  return KvLayout::Create(spec).value();
}

TEST(CopyPagesTest, CopiesWholePagesAndNothingElse) {
  const KvLayout layout = MakeLayout();
  const int64_t bytes = layout.page_bytes();
  GuardBuffer<uint8_t> from(6 * bytes), to(4 * bytes);
  TestRng rng;
  for (GuardBuffer<uint8_t>* cache : {&from, &to}) {
    for (int64_t i = 0; i < cache->size(); ++i) {
      (*cache)[i] = static_cast<uint8_t>(rng.Next());
    }
  }
  std::vector<uint8_t> want = to.ToVector();
  const std::vector<PageCopy> copies = {{5, 0}, {1, 3}, {5, 2}};
  for (const PageCopy copy : copies) {
    for (int64_t i = 0; i < bytes; ++i) {
      want[static_cast<size_t>(copy.to * bytes + i)] =
          from[copy.from * bytes + i];
    }
  }
  const KvCacheView source(layout, 6, from.data());
  const KvCacheView target(layout, 4, to.data());
  absl::Status status;
  EXPECT_NO_ALLOCATION(status = CheckPageCopies(source, target, copies));
  ASSERT_TRUE(status.ok()) << status;
  InlineExecutor executor;
  EXPECT_NO_ALLOCATION(CopyPages(source, target, copies, executor));
  EXPECT_EQ(to.ToVector(), want);
}

// Out to a buffer of two pages, in again to other pages.
TEST(CopyPagesTest, SwapsOutAndIn) {
  KvCache cache = KvCache::Create(MakeLayout(), 8, 1).value();
  KvCache host = KvCache::Create(MakeLayout(), 2, 1).value();
  const KvCacheView layer = cache.Layer(0);
  for (uint8_t page = 0; page < 8; ++page) {
    *layer.K(page, 2) = page;
    *layer.VScales(page, 1) = page;
  }
  InlineExecutor executor;
  CopyPages(layer, host.Layer(0), {{5, 0}, {2, 1}}, executor);
  CopyPages(host.Layer(0), layer, {{0, 1}, {1, 7}}, executor);
  EXPECT_EQ(*layer.K(1, 2), 5);
  EXPECT_EQ(*layer.K(7, 2), 2);
  EXPECT_EQ(*layer.VScales(1, 1), 5.0f);
}

TEST(CopyPagesTest, RefusesCopiesThatDependOnTheirOrder) {
  const KvLayout layout = MakeLayout();
  std::vector<uint8_t> a(static_cast<size_t>(4 * layout.page_bytes()));
  std::vector<uint8_t> b(a.size());
  const KvCacheView cache(layout, 4, a.data()), other(layout, 3, b.data());
  const auto refusal = [](const KvCacheView& from, const KvCacheView& to,
                          const std::vector<PageCopy>& copies) {
    const absl::Status status = CheckPageCopies(from, to, copies);
    if (status.ok()) return std::string("accepted");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(refusal(cache, cache, {{0, 1}, {0, 2}}), "accepted");
  EXPECT_EQ(refusal(cache, cache, {}), "accepted");
  EXPECT_EQ(refusal(cache, other, {{0, 1}, {1, 2}}), "accepted");
  EXPECT_THAT(refusal(cache, cache, {{0, 1}, {1, 2}}),
              HasSubstr("page 1 is read and written"));
  EXPECT_THAT(refusal(cache, cache, {{2, 2}}),
              HasSubstr("page 2 is read and written"));
  EXPECT_THAT(refusal(cache, other, {{0, 1}, {2, 1}}),
              HasSubstr("page 1 is written twice"));
  EXPECT_THAT(refusal(cache, other, {{0, 1}, {0, 3}}),
              HasSubstr("copies[1] is from page 0 to 3; need pages below 4 and "
                        "3"));
  EXPECT_THAT(refusal(cache, other, {{-1, 1}}), HasSubstr("from page -1"));
  EXPECT_THAT(refusal(other, cache, {{3, 1}}), HasSubstr("from page 3 to 1"));
  EXPECT_THAT(refusal(cache, KvCacheView(MakeLayout(9), 4, b.data()), {}),
              HasSubstr("the caches differ in layout"));
  EXPECT_THAT(refusal(cache, KvCacheView(layout, 4, nullptr), {}),
              HasSubstr("are null"));
}

TEST(CopyPagesDeathTest, ChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  const KvLayout layout = MakeLayout();
  std::vector<uint8_t> memory(static_cast<size_t>(2 * layout.page_bytes()));
  const KvCacheView cache(layout, 2, memory.data());
  InlineExecutor executor;
  EXPECT_DEATH(CopyPages(cache, cache, {{1, 2}}, executor),
               "copy_pages: copies.0. is from page 1 to 2; need pages below 2");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

}  // namespace
}  // namespace quern
