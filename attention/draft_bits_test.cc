// What the bits of drafts depend on, and what they do not.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/testing/draft_testutil.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

// One instance per instruction set that this CPU has.
class DraftBitsTest : public AttentionIsaTest {
 protected:
  template <typename Q, typename Kv>
  void ExpectSameBits(const Heads& heads, const Variant& variant,
                      const std::vector<Sequence>& batch,
                      const Result<float>& want, const char* what) {
    const Attention<Q, Kv, float> run(heads, variant, batch);
    EXPECT_RAN_ON(run.plan());
    EXPECT_TRUE(AllBitsEqual(run.result().out, want.out)) << what;
    EXPECT_TRUE(AllBitsEqual(run.result().lse, want.lse)) << what;
  }
};
QUERN_INSTANTIATE_ISA_TEST(DraftBitsTest);

TEST_P(DraftBitsTest, AChainHasTheBitsOfCausalAttention) {
  TestRng rng;
  Heads heads = GroupedHeads();
  heads.soft_cap = 3;
  heads.sinks = {0.0f, -3.0f, 4.0f, 12.0f, 1.0f, -80.0f};
  const auto expect = [&](auto kv, KvScaling scaling, int64_t before,
                          int64_t text, int64_t drafts) {
    using Kv = decltype(kv);
    Variant variant;
    variant.scaling = scaling;
    const Lengths length = {text + drafts, before + text + drafts};
    Sequence s = RandomSequence<BFloat16, Kv>(rng, heads, length);
    const auto want =
        Attention<BFloat16, Kv, float>(heads, variant, {s}).result();
    s.draft_masks = Chain(drafts);
    for (const int workers : {1, 3}) {
      for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
        variant.schedule_workers = workers;
        variant.form = form;
        ExpectSameBits<BFloat16, Kv>(heads, variant, {s}, want, "chain");
      }
    }
  };
  for (const int64_t q_heads : {6, 32}) {  // one block, and several
    heads.q_heads = q_heads;
    heads.sinks.resize(static_cast<size_t>(q_heads), 1.0f);
    for (const int64_t window :
         {kNoWindow, int64_t{0}, int64_t{10}, int64_t{300}}) {
      heads.window_left = window;
      for (const int64_t before : {0, 250, 1000}) {
        expect(BFloat16(), KvScaling::kNone, before, 0, 64);
        expect(int8_t(), KvScaling::kPerTokenHead, before, 3, 17);
        expect(BFloat16(), KvScaling::kNone, before, 0, 1);
      }
    }
  }
}

TEST_P(DraftBitsTest, BitsDependOnNothingButTheSequenceAndItsMasks) {
  TestRng rng;
  const Heads heads = GroupedHeads();
  std::vector<Sequence> batch;
  for (const int64_t drafts : {0, 64, 7, 16}) {
    batch.push_back(RandomDrafts<BFloat16, BFloat16>(
        rng, heads, {drafts + 1, 700 + 300 * drafts / 7},
        RandomTree(rng, drafts)));
  }
  using Run = Attention<BFloat16, BFloat16, float>;
  const auto want = Run(heads, Variant(), batch).result();
  Variant variant;
  variant.schedule_workers = 8;
  EXPECT_FALSE(Run(heads, variant, batch).args().schedule.merges().empty());
  ExpectSameBits<BFloat16, BFloat16>(heads, variant, batch, want,
                                     "8 workers planned, 1 at work");
  for (const int workers : {2, 3, 5}) {
    const auto executor = Workers(workers);
    variant.executor = executor.get();
    variant.schedule_workers = workers;
    ExpectSameBits<BFloat16, BFloat16>(heads, variant, batch, want,
                                       "several workers");
  }
  for (const int64_t page_size : {1, 13, 256}) {
    variant = Variant();
    variant.page_size = page_size;
    variant.page_order = 99;
    ExpectSameBits<BFloat16, BFloat16>(heads, variant, batch, want,
                                       "another page size and order");
  }
  Result<float> alone;
  for (const Sequence& s : batch) {
    const auto one = Run(heads, Variant(), {s}).result();
    alone.out.insert(alone.out.end(), one.out.begin(), one.out.end());
    alone.lse.insert(alone.lse.end(), one.lse.begin(), one.lse.end());
  }
  EXPECT_TRUE(AllBitsEqual(alone.out, want.out)) << "alone";
  EXPECT_TRUE(AllBitsEqual(alone.lse, want.lse)) << "alone";
}

TEST_P(DraftBitsTest, LatentCachesAndSharedPrefixesChangeNoBit) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 3;
  heads.head_dim = 40;
  heads.v_head_dim = 36;
  std::vector<Sequence> batch;
  for (const int64_t drafts : {16, 9, 0, 5}) {
    Sequence s = RandomDrafts<BFloat16, BFloat16>(
        rng, heads, {drafts + 1, 770 + drafts}, RandomTree(rng, drafts));
    for (size_t i = 0; i < s.v.size(); ++i) s.v[i] = s.k[i / 36 * 40 + i % 36];
    for (size_t i = 0; i < 512 * 40 && !batch.empty(); ++i) {
      s.k[i] = batch[0].k[i];
    }
    for (size_t i = 0; i < 512 * 36 && !batch.empty(); ++i) {
      s.v[i] = batch[0].v[i];
    }
    batch.push_back(s);
  }
  Variant variant;
  variant.page_size = 16;
  variant.form = KvForm::kPaired;
  const auto want =
      Attention<BFloat16, BFloat16, float>(heads, variant, batch).result();
  variant.prefix_groups = {{0, 4, 512}};
  variant.prefix_members = {0, 1, 2, 3};
  for (const KvForm form : {KvForm::kPaired, KvForm::kLatent, KvForm::kPlain}) {
    for (const int workers : {1, 5}) {
      variant.form = form;
      variant.schedule_workers = workers;
      const Attention<BFloat16, BFloat16, float> run(heads, variant, batch);
      EXPECT_FALSE(run.args().schedule.prefixes().empty());
      ExpectSameBits<BFloat16, BFloat16>(heads, variant, batch, want, "form");
    }
  }
}

// A NaN in the key or the value of a draft, in each kind of cache. With 32
// heads the drafts are several blocks, and every row of a late block stands
// behind the early drafts.
TEST_P(DraftBitsTest, NanReachesOnlyTheDraftsThatSeeIt) {
  TestRng rng;
  constexpr int64_t kBefore = 230, kDrafts = 40;
  const auto expect = [&](int64_t q_heads, KvForm form) {
    Heads heads = GroupedHeads();
    heads.q_heads = q_heads;
    Variant variant;
    variant.form = form;
    const Sequence clean = RandomDrafts<BFloat16, BFloat16>(
        rng, heads, {kDrafts, kBefore + kDrafts}, RandomTree(rng, kDrafts));
    using Run = Attention<BFloat16, BFloat16, float>;
    const Run run(heads, variant, {clean});
    EXPECT_RAN_ON(run.plan());
    const auto want = run.result();
    for (const int64_t draft : {0, 3, 25, 26, 39}) {
      for (const bool in_key : {true, false}) {
        Sequence s = clean;
        auto& rows = in_key ? s.k : s.v;
        rows[static_cast<size_t>(((kBefore + draft) * 2 + 1) * 24 + 5)] =
            std::nan("");
        const auto got = Run(heads, variant, {s}).result();
        for (int64_t i = 0; i < kDrafts * q_heads * 24; ++i) {
          const int64_t row = i / (q_heads * 24), h = i / 24 % q_heads;
          const bool sees =
              h >= q_heads / 2 &&
              (clean.draft_masks[static_cast<size_t>(row)] & Bit(draft)) != 0;
          const auto at = static_cast<size_t>(i);
          if (sees && (in_key || i % 24 == 5)) {
            ASSERT_TRUE(std::isnan(got.out[at])) << row << " " << h;
          } else {
            ASSERT_EQ(got.out[at], want.out[at]) << row << " " << h;
          }
        }
      }
    }
  };
  for (const int64_t q_heads : {6, 32}) {
    expect(q_heads, KvForm::kPlain);
    expect(q_heads, KvForm::kPaired);
  }
}

}  // namespace
}  // namespace quern
