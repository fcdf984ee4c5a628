// The latent form of f8e4m3, with a scale for each block of 128: where bytes
// lie.

#include <cstdint>
#include <set>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

KvLayoutSpec BlockSpec(int64_t latent, int64_t rest) {
  KvLayoutSpec spec;
  spec.dtype = DType::kF8E4M3;
  spec.kv_heads = 1;
  spec.head_dim = latent + rest;
  spec.v_head_dim = latent;
  spec.page_size = 32;
  spec.form = KvForm::kLatent;
  spec.scaling = KvScaling::kPerBlock;
  return spec;
}

TEST(LatentBlocksLayoutTest, HasTheBytesOfDeepSeeksToken) {
  KvLayoutSpec spec = BlockSpec(512, 64);
  spec.page_size = 64;
  const KvLayout layout = KvLayout::Create(spec).value();
  EXPECT_EQ(layout.token_bytes(), 512 + 128 + 4);
  EXPECT_EQ(layout.page_bytes(), 64 * 644);
  EXPECT_EQ(layout.scale_blocks(), 4);
  EXPECT_EQ(layout.scale_block_bytes(), 0);
  EXPECT_EQ(KvScalingName(layout.scaling()), "per_block");
  // The header's formulas, of token 21, which is token 5 of group 1.
  const int64_t group = 16 * 644;
  EXPECT_EQ(layout.KOffset(21, 0), group + 5 * 2);
  EXPECT_EQ(layout.KOffset(21, 131), group + 65 * 32 + 5 * 2 + 1);
  EXPECT_EQ(layout.VOffset(21, 131), layout.KOffset(21, 131));
  EXPECT_EQ(layout.KOffset(21, 512), group + 16 * 512 + 5 * 4);
  EXPECT_EQ(layout.KOffset(21, 575), group + 16 * 512 + 31 * 64 + 5 * 4 + 2);
  EXPECT_EQ(layout.ExponentOffset(21, 3), group + 16 * 640 + 3 * 16 + 5);
}

TEST(LatentBlocksLayoutTest, EveryByteHasOnePlace) {
  for (const int64_t latent : {4, 128, 132, 300}) {
    for (const int64_t rest : {1, 2, 7}) {
      const KvLayout layout = KvLayout::Create(BlockSpec(latent, rest)).value();
      std::set<int64_t> seen;
      for (int64_t t = 0; t < layout.page_size(); ++t) {
        for (int64_t d = 0; d < layout.k_row(); ++d) {
          const int64_t at = layout.KOffset(t, d);
          EXPECT_TRUE(seen.insert(at).second);
          if (d >= latent) {
            EXPECT_TRUE(seen.insert(at + 1).second);
          }
        }
        for (int64_t b = 0; b < layout.scale_blocks(); ++b) {
          EXPECT_TRUE(seen.insert(layout.ExponentOffset(t, b)).second);
        }
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), layout.k_elements());
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), layout.k_elements() - 1);
    }
  }
}

TEST(LatentBlocksLayoutTest, RefusesOtherTypesAndForms) {
  using Change = void (*)(KvLayoutSpec&);
  const struct {
    Change change;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[](KvLayoutSpec& s) { s.dtype = DType::kBF16; },
       absl::StatusCode::kInvalidArgument,
       "scaling is per_block for bf16 in the latent form; need f8e4m3"},
      {[](KvLayoutSpec& s) { s.dtype = DType::kF8E5M2; },
       absl::StatusCode::kInvalidArgument, "scaling is per_block for f8e5m2"},
      {[](KvLayoutSpec& s) { s.form = KvForm::kPaired; },
       absl::StatusCode::kInvalidArgument,
       "scaling is per_block for f8e4m3 in the paired form"},
      {[](KvLayoutSpec& s) { s.form.reset(); },
       absl::StatusCode::kInvalidArgument, "in the paired form"},
      {[](KvLayoutSpec& s) { s.scaling = KvScaling::kPerTokenHead; },
       absl::StatusCode::kUnimplemented,
       "dtype is f8e4m3 and scaling per_token_head; need f32, bf16 or f16, or "
       "f8e4m3 with per_block"},
      {[](KvLayoutSpec& s) { s.page_size = 24; },
       absl::StatusCode::kInvalidArgument, "page_size=24; need a multiple"},
      {[](KvLayoutSpec& s) { s.v_head_dim = 126; },
       absl::StatusCode::kInvalidArgument, "v_head_dim=126; need a multiple"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.words);
    KvLayoutSpec spec = BlockSpec(128, 4);
    c.change(spec);
    ExpectRefusal(KvLayout::Create(spec).status(), c.code, c.words);
  }
}

}  // namespace
}  // namespace quern
