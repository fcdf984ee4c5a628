#include "quern/ops/mla/mla_schedule.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/testing/compare.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Lens = std::vector<int64_t>;
using Tokens = std::vector<int32_t>;

MlaSpec DeepSeekLite() {
  MlaSpec spec;
  spec.hidden = 2048;
  spec.heads = 16;
  spec.kv_lora = 512;
  spec.nope = 128;
  spec.rope = 64;
  spec.v_head_dim = 128;
  spec.dtype = DType::kBF16;
  KvLayoutSpec layout;
  layout.kv_heads = 1;
  layout.head_dim = 576;
  layout.v_head_dim = 512;
  layout.page_size = 16;
  layout.form = KvForm::kLatent;
  spec.cache = KvLayout::Create(layout).value();
  return spec;
}

// Pages 0, 1, ... for sequences of these lengths.
struct Table {
  explicit Table(const Lens& kv_lens) {
    for (const int64_t length : kv_lens) {
      std::vector<int32_t> pages;
      for (int64_t t = 0; t < length; t += 16) pages.push_back(next++);
      storage.Append(pages);
    }
  }
  PageTable table() const { return storage.Build(16, next).value(); }
  PageTableStorage storage;
  int32_t next = 0;
};

TEST(MlaSpecTest, TheDirectFormPaysFromTenTokensOn) {
  MlaSpec spec = DeepSeekLite();
  EXPECT_FALSE(UsesDirectForm(spec, 0, 0));
  EXPECT_FALSE(UsesDirectForm(spec, 1, 1));
  EXPECT_FALSE(UsesDirectForm(spec, 9, 9));
  EXPECT_TRUE(UsesDirectForm(spec, 10, 10));
  EXPECT_TRUE(UsesDirectForm(spec, 4096, 4096));
  // With earlier keys it is never taken.
  EXPECT_FALSE(UsesDirectForm(spec, 100, 101));
  spec.form = MlaForm::kDirect;
  EXPECT_FALSE(UsesDirectForm(spec, 0, 0));
  EXPECT_TRUE(UsesDirectForm(spec, 1, 1));
  EXPECT_FALSE(UsesDirectForm(spec, 1, 2));
  spec.form = MlaForm::kAbsorbed;
  EXPECT_FALSE(UsesDirectForm(spec, 4096, 4096));
  // A latent no longer than what it expands to saves nothing.
  spec = DeepSeekLite();
  spec.kv_lora = 128;
  EXPECT_FALSE(UsesDirectForm(spec, 1 << 20, 1 << 20));
}

TEST(MlaSpecTest, ScaleIsThatOfDeepSeek) {
  EXPECT_FLOAT_EQ(MlaScale(64, {}), 0.125f);
  RotaryScaling yarn;
  yarn.kind = RotaryScalingKind::kYarn;
  yarn.factor = 40;
  EXPECT_FLOAT_EQ(MlaScale(64, yarn), 0.125f);
  // m = 0.1 * 0.707 * ln 40 + 1 = 1.2608038; m^2 = 1.5896261.
  yarn.mscale_all_dim = 0.707;
  EXPECT_FLOAT_EQ(MlaScale(64, yarn), 0.125f * 1.5896261f);
  yarn.factor = 1;
  EXPECT_FLOAT_EQ(MlaScale(64, yarn), 0.125f);
  yarn.factor = 40;
  yarn.kind = RotaryScalingKind::kLinear;
  EXPECT_FLOAT_EQ(MlaScale(64, yarn), 0.125f);
}

TEST(MlaScheduleTest, DividesTokensByTheirSequences) {
  MlaSpec spec = DeepSeekLite();
  spec.heads = 2;
  //             decode, prompt, decode, prompt, none, short prompt
  const Lens q_lens = {1, 12, 2, 11, 0, 3}, kv_lens = {20, 12, 18, 11, 5, 3};
  const Table table(kv_lens);
  MlaScheduleStorage storage;
  const auto built =
      MlaSchedule::Build(spec, {q_lens, kv_lens, table.table()}, 2, storage);
  ASSERT_TRUE(built.ok()) << built.status();
  EXPECT_EQ(built->num_tokens(), 29);
  EXPECT_EQ(built->heads(), 2);
  Tokens direct, absorbed = {0, 13, 14, 26, 27, 28};
  for (int32_t t = 1; t < 13; ++t) direct.push_back(t);
  for (int32_t t = 15; t < 26; ++t) direct.push_back(t);
  EXPECT_TRUE(AllEqual(built->direct_tokens(), direct));
  EXPECT_TRUE(AllEqual(built->absorbed_tokens(), absorbed));
  const Tokens rows = {0, 26, 28, 52, 54, 56, 1, 27, 29, 53, 55, 57};
  EXPECT_TRUE(AllEqual(built->query_rows(), rows));
  EXPECT_TRUE(AllEqual(built->query_ends(), Tokens{0, 6, 12}));

  EXPECT_EQ(built->absorbed().num_tokens(), 6);
  EXPECT_EQ(built->absorbed().group(), 2);
  // The direct one has the decode step among its tokens, without keys.
  EXPECT_EQ(built->direct_begin(), 1);
  EXPECT_EQ(built->direct().num_tokens(), 25);
  EXPECT_EQ(built->direct().kv_heads(), 2);
  const auto sequences = built->direct().sequences();
  ASSERT_EQ(sequences.size(), 6u);
  const Lens direct_q = {0, 12, 2, 11, 0, 0}, direct_kv = {0, 12, 0, 11, 0, 0};
  for (size_t s = 0; s < 6; ++s) {
    EXPECT_EQ(sequences[s].q_len, direct_q[s]) << s;
    EXPECT_EQ(sequences[s].kv_len, direct_kv[s]) << s;
  }
  // Slots: the pages of the sequences are 0-1, 2, 3-4, 5, 6 and 7.
  Lens slots = {19};
  for (int64_t t = 0; t < 12; ++t) slots.push_back(32 + t);
  slots.insert(slots.end(), {48 + 16, 48 + 17});
  for (int64_t t = 0; t < 11; ++t) slots.push_back(80 + t);
  slots.insert(slots.end(), {112, 113, 114});
  EXPECT_TRUE(AllEqual(built->slots(), slots));
}

TEST(MlaScheduleTest, HasNothingForNoTokens) {
  MlaScheduleStorage storage;
  const auto built =
      MlaSchedule::Build(DeepSeekLite(), {{}, {}, PageTable()}, 1, storage);
  ASSERT_TRUE(built.ok()) << built.status();
  EXPECT_EQ(built->num_tokens(), 0);
  EXPECT_EQ(built->direct().num_tokens(), 0);
  EXPECT_EQ(built->absorbed().num_tokens(), 0);
}

TEST(MlaScheduleTest, NamesWhatIsWrong) {
  const MlaSpec spec = DeepSeekLite();
  MlaScheduleStorage storage;
  struct Case {
    Lens q_lens, kv_lens, pages_of;
    std::string words;
  };
  const Case cases[] = {
      {{1}, {1, 1}, {1}, "kv_lens.size()=2; need 1, as q_lens has"},
      {{-1}, {1}, {1}, "sequence 0: q_len=-1; need 0 <= q_len <= 1"},
      {{1, 3}, {1, 2}, {1, 2}, "sequence 1: q_len=3; need 0 <= q_len <= 2"},
      {{1}, {17}, {16}, "sequence 0: kv_len=17; need 0 <= kv_len <= 16"},
      {{1}, {1}, {1, 1}, "kv_lens.size()=1; need 2"},
      {{int64_t{1} << 27}, {int64_t{1} << 27}, {1}, "need at most 134217727"},
  };
  for (const Case& c : cases) {
    const Table table(c.pages_of);
    ExpectRefusal(MlaSchedule::Build(spec, {c.q_lens, c.kv_lens, table.table()},
                                     1, storage)
                      .status(),
                  c.words);
  }
  PageTableStorage shared;
  shared.Append({0});
  shared.Append({0});
  const Lens ones = {1, 1};
  const PageTable both = shared.Build(16, 1).value();
  ExpectRefusal(
      MlaSchedule::Build(spec, {ones, ones, both}, 1, storage).status(),
      "two new tokens go to slot 0");
  const PageTable wide = shared.Build(32, 1).value();
  ExpectRefusal(
      MlaSchedule::Build(spec, {ones, ones, wide}, 1, storage).status(),
      "pages.page_size=32; need 16, as the cache has");
  PageTableStorage missing;
  missing.Append({kNoPage, 0});
  const Lens one = {1}, twenty = {20};
  const PageTable late = missing.Build(16, 1).value();
  ExpectRefusal(
      MlaSchedule::Build(spec, {one, twenty, late}, 1, storage).status(),
      "page 0 is missing");
  ExpectRefusal(
      MlaSchedule::Build({}, {{}, {}, PageTable()}, 1, storage).status(),
      "multi_head_latent_attention: hidden=0; need 1");
}

}  // namespace
}  // namespace quern
