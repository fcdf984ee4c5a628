#include "cache/kv_cache.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

KvLayoutSpec GoodSpec() {
  KvLayoutSpec spec;
  spec.kv_heads = 3;
  spec.head_dim = 10;
  spec.v_head_dim = 7;
  spec.page_size = 5;
  return spec;
}

TEST(KvLayoutTest, CountsBytes) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  EXPECT_EQ(layout.k_block_bytes(), 128);  // 5 * 10 * 2 = 100, padded
  EXPECT_EQ(layout.v_block_bytes(), 128);  // 5 * 7 * 2 = 70, padded
  EXPECT_EQ(layout.page_bytes(), 3 * 256);
  KvLayoutSpec spec = GoodSpec();
  spec.dtype = DType::kF32;
  spec.v_head_dim = 0;
  const KvLayout f32 = KvLayout::Create(spec).value();
  EXPECT_EQ(f32.v_head_dim(), 10);
  EXPECT_EQ(f32.k_block_bytes(), 256);  // 200, padded
}

TEST(KvLayoutTest, IsAValue) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  EXPECT_EQ(layout, KvLayout::Create(GoodSpec()).value());
  EXPECT_NE(layout, KvLayout());
  using Change = void (*)(KvLayoutSpec&);
  for (const Change change :
       {Change([](KvLayoutSpec& s) { s.dtype = DType::kF16; }),
        Change([](KvLayoutSpec& s) { s.kv_heads = 4; }),
        Change([](KvLayoutSpec& s) { s.head_dim = 11; }),
        Change([](KvLayoutSpec& s) { s.v_head_dim = 8; }),
        Change([](KvLayoutSpec& s) { s.page_size = 6; })}) {
    KvLayoutSpec other = GoodSpec();
    change(other);
    EXPECT_NE(layout, KvLayout::Create(other).value());
  }
}

TEST(KvLayoutTest, RefusesWhatIsNoLayout) {
  using Change = void (*)(KvLayoutSpec&);
  const struct {
    Change change;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[](KvLayoutSpec& s) { s.kv_heads = 0; },
       absl::StatusCode::kInvalidArgument, "kv_heads=0; need 1 <= kv_heads"},
      {[](KvLayoutSpec& s) { s.head_dim = -1; },
       absl::StatusCode::kInvalidArgument, "head_dim=-1"},
      {[](KvLayoutSpec& s) { s.v_head_dim = -2; },
       absl::StatusCode::kInvalidArgument, "v_head_dim=-2"},
      {[](KvLayoutSpec& s) { s.page_size = 0; },
       absl::StatusCode::kInvalidArgument, "page_size=0"},
      {[](KvLayoutSpec& s) { s.page_size = kMax; },
       absl::StatusCode::kInvalidArgument, "page_size=9223372036854775807"},
      {[](KvLayoutSpec& s) { s.page_size = s.head_dim = 2147483647; },
       absl::StatusCode::kInvalidArgument, "need a page of at most"},
      {[](KvLayoutSpec& s) { s.kv_heads = s.head_dim = 2147483647; },
       absl::StatusCode::kInvalidArgument, "need a page of at most"},
      {[](KvLayoutSpec& s) { s.dtype = DType::kI8; },
       absl::StatusCode::kUnimplemented, "dtype is i8; need f32, bf16 or f16"},
  };
  for (const auto& c : kCases) {
    KvLayoutSpec spec = GoodSpec();
    c.change(spec);
    const absl::Status status = KvLayout::Create(spec).status();
    EXPECT_EQ(status.code(), c.code) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
}

TEST(KvCacheTest, GivesEachBlockOfEachLayerItsOwnBytes) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  KvCache cache = KvCache::Create(layout, 4, 2).value();
  EXPECT_EQ(cache.bytes(), static_cast<size_t>(2 * 4 * layout.page_bytes()));
  // In memory order: layers, pages, heads, K before V.
  const uint8_t* next = cache.Layer(0).K(0, 0);
  for (int64_t layer = 0; layer < 2; ++layer) {
    const KvCacheView view = cache.Layer(layer);
    EXPECT_EQ(view.layout(), layout);
    EXPECT_EQ(view.num_pages(), 4);
    for (int64_t page = 0; page < 4; ++page) {
      for (int64_t head = 0; head < 3; ++head) {
        EXPECT_EQ(view.K(page, head), next);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(view.K(page, head)) % 64, 0u);
        next += layout.k_block_bytes();
        EXPECT_EQ(view.V(page, head), next);
        next += layout.v_block_bytes();
      }
    }
  }
  const uint8_t* before = cache.Layer(1).K(3, 2);
  KvCache moved = std::move(cache);
  EXPECT_EQ(moved.Layer(1).K(3, 2), before);
}

TEST(KvCacheTest, ViewsSeparateTensorsAsWell) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  uint8_t k[2000], v[1400];
  const KvCacheView view(layout, 2, KvCacheView::Blocks{k, 1000, 100},
                         KvCacheView::Blocks{v, 700, 70});
  EXPECT_EQ(view.K(1, 2), k + 1200);
  EXPECT_EQ(view.V(1, 2), v + 840);
}

TEST(KvCacheTest, MayHaveNoPages) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  KvCache cache = KvCache::Create(layout, 0, 2).value();
  EXPECT_EQ(cache.Layer(1).num_pages(), 0);
  EXPECT_EQ(cache.bytes(), 0u);
}

TEST(KvCacheTest, RefusesSizesOutOfRange) {
  const KvLayout layout = KvLayout::Create(GoodSpec()).value();
  const auto refusal = [](const KvLayout& l, int64_t pages, int64_t layers) {
    return KvCache::Create(l, pages, layers).status();
  };
  EXPECT_THAT(refusal(KvLayout(), 1, 1).message(),
              HasSubstr("layout is empty"));
  EXPECT_THAT(refusal(layout, -1, 1).message(), HasSubstr("num_pages=-1"));
  EXPECT_THAT(refusal(layout, 1, -1).message(), HasSubstr("num_layers=-1"));
  const absl::Status overflow = refusal(layout, 2147483647, kMax);
  EXPECT_EQ(overflow.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(overflow.message(), HasSubstr("num_layers=9223372036854775807"));
  EXPECT_EQ(refusal(layout, 2147483647, 1000000).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace quern
