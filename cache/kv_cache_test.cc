#include "quern/cache/kv_cache.h"

#include <cstdint>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"

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
  spec = GoodSpec();
  spec.dtype = DType::kI8;
  spec.head_dim = 9;
  spec.page_size = 32;
  spec.form = KvForm::kPaired;
  spec.scaling = KvScaling::kPerTokenHead;
  const KvLayout paired = KvLayout::Create(spec).value();
  EXPECT_EQ(paired.k_block_bytes(), 32 * 10);  // head_dim in whole pairs
  EXPECT_EQ(paired.v_block_bytes(), 256);      // 32 * 7, padded
  EXPECT_EQ(paired.scale_block_bytes(), 32 * 4);
  EXPECT_EQ(paired.page_bytes(), 3 * (320 + 256 + 2 * 128));
}

// Written out, not computed: the layout is a contract with other programs.
TEST(KvLayoutTest, PlacesElements) {
  KvLayoutSpec spec = GoodSpec();
  const KvLayout plain = KvLayout::Create(spec).value();
  EXPECT_EQ(plain.form(), KvForm::kPlain);
  EXPECT_EQ(plain.KOffset(3, 4), 34);
  EXPECT_EQ(plain.VOffset(3, 4), 25);
  spec.form = KvForm::kPaired;
  spec.page_size = 32;
  spec.head_dim = 5;
  spec.v_head_dim = 3;
  const KvLayout bf16 = KvLayout::Create(spec).value();
  EXPECT_EQ(bf16.pair(), 2);
  EXPECT_EQ(bf16.k_row(), 6);
  const struct {
    int64_t token, dim, offset;
  } kKeys[] = {{0, 0, 0},  {0, 1, 1},  {1, 0, 2},   {15, 1, 31},
               {0, 2, 32}, {2, 4, 68}, {16, 0, 96}, {31, 4, 190}},
    kValues[] = {{0, 0, 0}, {1, 0, 1}, {0, 1, 2},
                 {1, 2, 5}, {2, 0, 6}, {31, 2, 95}};
  for (const auto& c : kKeys) EXPECT_EQ(bf16.KOffset(c.token, c.dim), c.offset);
  for (const auto& c : kValues) {
    EXPECT_EQ(bf16.VOffset(c.token, c.dim), c.offset);
  }
  spec.dtype = DType::kF32;
  const KvLayout f32 = KvLayout::Create(spec).value();
  EXPECT_EQ(f32.pair(), 1);
  EXPECT_EQ(f32.KOffset(2, 4), 66);
  EXPECT_EQ(f32.KOffset(17, 1), 16 * 5 + 17);
  EXPECT_EQ(f32.VOffset(17, 1), 52);
}

TEST(KvLayoutTest, GivesEachElementItsPlace) {
  for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16,
                              DType::kI8, DType::kF8E4M3, DType::kF8E5M2}) {
      for (const int64_t dim : {1, 2, 7, 16}) {
        KvLayoutSpec spec = GoodSpec();
        spec.dtype = dtype;
        spec.head_dim = dim;
        spec.v_head_dim = dim + 1;
        spec.page_size = 48;
        spec.form = form;
        spec.scaling =
            dtype == DType::kI8 ? KvScaling::kPerTensor : KvScaling::kNone;
        const KvLayout layout = KvLayout::Create(spec).value();
        std::set<int64_t> k, v;
        for (int64_t t = 0; t < 48; ++t) {
          for (int64_t d = 0; d < dim; ++d) k.insert(layout.KOffset(t, d));
          for (int64_t d = 0; d <= dim; ++d) v.insert(layout.VOffset(t, d));
        }
        EXPECT_EQ(k.size(), static_cast<size_t>(48 * dim));
        EXPECT_EQ(v.size(), static_cast<size_t>(48 * (dim + 1)));
        EXPECT_EQ(*k.begin(), 0);
        EXPECT_LT(*k.rbegin(), layout.k_elements());
        EXPECT_EQ(*v.rbegin(), layout.v_elements() - 1);
      }
    }
  }
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
        Change([](KvLayoutSpec& s) { s.page_size = 6; }),
        Change([](KvLayoutSpec& s) {
          s.page_size = 16;
          s.form = KvForm::kPaired;
        }),
        Change([](KvLayoutSpec& s) {
          s.page_size = 16;
          s.form = KvForm::kPlain;
        })}) {
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
      {[](KvLayoutSpec& s) { s.dtype = DType::kU8; },
       absl::StatusCode::kUnimplemented,
       "dtype is u8; need f32, bf16, f16, i8"},
      {[](KvLayoutSpec& s) { s.dtype = DType::kI8; },
       absl::StatusCode::kInvalidArgument, "scaling is none for i8"},
      {[](KvLayoutSpec& s) { s.scaling = KvScaling::kPerTokenHead; },
       absl::StatusCode::kInvalidArgument,
       "scaling is per_token_head for bf16; need none"},
      {[](KvLayoutSpec& s) {
         s.form = KvForm::kPaired;
         s.page_size = 24;
       },
       absl::StatusCode::kInvalidArgument,
       "page_size=24; need a multiple of 16 for the paired form"},
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

TEST(KvCacheTest, KeepsTheScalesOfTokensInTheirPage) {
  KvLayoutSpec spec = GoodSpec();
  spec.dtype = DType::kF8E4M3;
  spec.scaling = KvScaling::kPerTokenHead;
  const KvLayout layout = KvLayout::Create(spec).value();
  EXPECT_EQ(layout.head_bytes(), 4 * 64);
  KvCache cache = KvCache::Create(layout, 4, 2).value();
  const KvCacheView view = cache.Layer(1);
  const auto* v = reinterpret_cast<const float*>(view.V(3, 2));
  EXPECT_EQ(view.KScales(3, 2), v + 16);
  EXPECT_EQ(view.VScales(3, 2), v + 32);
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
