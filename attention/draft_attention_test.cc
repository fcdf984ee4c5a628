// Attention along the paths of trees of drafts, against the reference.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
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
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

// One instance per instruction set that this CPU has.
class DraftAttentionTest : public AttentionIsaTest {
 protected:
  template <typename Q, typename Kv, typename Out>
  void ExpectReference(const Heads& heads, const Variant& variant,
                       const std::vector<Sequence>& batch) {
    SCOPED_TRACE(testing::Message()
                 << "q_len " << batch[0].length.q_len << " kv_len "
                 << batch[0].length.kv_len << " page_size " << variant.page_size
                 << " window " << heads.window_left);
    const Attention<Q, Kv, Out> run(heads, variant, batch);
    EXPECT_RAN_ON(run.plan());
    const ReferenceAttentionResult want = Reference(heads, batch);
    const Bounds bounds(heads, LongestKv(batch), UnitRoundoff<Out>(),
                        run.plan());
    EXPECT_TRUE(AllClose(run.result().out, want.out, bounds.out));
    EXPECT_TRUE(AllClose(run.result().lse, want.lse, bounds.lse));
  }
};
QUERN_INSTANTIATE_ISA_TEST(DraftAttentionTest);

// Logits are 0, so that a key's weight is 1 over the number of keys that are
// seen, and value j is the unit vector of dim j: the output is the mask. The
// drafts lie in one chunk, on the edge of two, and at the edge of a span.
TEST_P(DraftAttentionTest, SeesWhatTheMaskSays) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 64;
  for (const int64_t drafts : {1, 2, 15, 17, 63, 64}) {
    for (const int64_t before : {0, 1, 9, 191, 193, 240, 250, 256, 1020}) {
      Sequence s = {{drafts, before + drafts},
                    std::vector<double>(static_cast<size_t>(drafts * 64)),
                    {},
                    {},
                    RandomTree(rng, drafts)};
      for (int64_t t = 0; t < before + drafts; ++t) {
        for (int64_t d = 0; d < 64; ++d) {
          s.k.push_back(0.5);
          s.v.push_back(t - before == d ? 1 : 0);
        }
      }
      for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
        Variant variant;
        variant.form = form;
        const Attention<BFloat16, BFloat16, float> run(heads, variant, {s});
        EXPECT_RAN_ON(run.plan());
        for (int64_t i = 0; i < drafts; ++i) {
          const uint64_t mask = s.draft_masks[static_cast<size_t>(i)];
          int64_t seen = before;
          for (int64_t j = 0; j < 64; ++j) seen += (mask & Bit(j)) != 0;
          const auto lse = run.result().lse[static_cast<size_t>(i)];
          if (seen == 0) {
            EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
          } else {
            EXPECT_NEAR(lse, std::log(static_cast<float>(seen)), 1e-5f);
          }
          for (int64_t j = 0; j < 64; ++j) {
            const float want =
                (mask & Bit(j)) == 0 ? 0 : 1.0f / static_cast<float>(seen);
            ASSERT_EQ(run.result().out[static_cast<size_t>(i * 64 + j)], want)
                << "draft " << i << " of " << drafts << " after " << before
                << ", key " << j << ", mask " << mask;
          }
        }
      }
    }
  }
}

TEST_P(DraftAttentionTest, MatchesTheReference) {
  TestRng rng;
  Heads heads = GroupedHeads();
  for (const int64_t drafts : {1, 5, 16, 33, 64}) {
    for (const int64_t before : {0, 13, 230, 255, 300, 1010}) {
      heads.window_left = kNoWindow;
      const Lengths length = {drafts, before + drafts};
      const Masks masks = RandomTree(rng, drafts);
      Variant variant;
      variant.page_size = before % 2 == 0 ? 7 : 16;
      variant.schedule_workers = drafts == 5 ? 4 : 1;
      ExpectReference<float, float, float>(
          heads, variant,
          {RandomDrafts<float, float>(rng, heads, length, masks)});
      heads.window_left = rng.Integer(0, 70);
      ExpectReference<BFloat16, BFloat16, float>(
          heads, variant,
          {RandomDrafts<BFloat16, BFloat16>(rng, heads, length, masks)});
      variant.page_size = 48;
      variant.form = KvForm::kPaired;
      ExpectReference<BFloat16, BFloat16, BFloat16>(
          heads, variant,
          {RandomDrafts<BFloat16, BFloat16>(rng, heads, length, masks)});
    }
  }
}

// Queries before the drafts, other sequences, caches of bytes, a soft cap and
// sinks.
TEST_P(DraftAttentionTest, MatchesTheReferenceInAMixedBatch) {
  TestRng rng;
  Heads heads = GroupedHeads();
  heads.soft_cap = 2;
  heads.sinks = {0.0f, -3.0f, 4.0f, 12.0f, 1.0f, -80.0f};
  for (const int64_t window : {kNoWindow, int64_t{0}, int64_t{20}}) {
    heads.window_left = window;
    const auto batch = [&](auto kv) {
      using Kv = decltype(kv);
      return std::vector<Sequence>{
          RandomDrafts<BFloat16, Kv>(rng, heads, {40, 270},
                                     RandomTree(rng, 30)),
          RandomDrafts<BFloat16, Kv>(rng, heads, {1, 300}, {}),
          RandomDrafts<BFloat16, Kv>(rng, heads, {20, 35, false}, {}),
          RandomDrafts<BFloat16, Kv>(rng, heads, {64, 530},
                                     RandomTree(rng, 64)),
          RandomDrafts<BFloat16, Kv>(rng, heads, {9, 9}, RandomTree(rng, 2))};
    };
    for (const int workers : {1, 6}) {
      Variant variant;
      variant.schedule_workers = workers;
      ExpectReference<BFloat16, BFloat16, float>(heads, variant,
                                                 batch(BFloat16()));
      variant.form = KvForm::kPaired;
      ExpectReference<BFloat16, Float8E4M3, float>(heads, variant,
                                                   batch(Float8E4M3()));
      variant.scaling = KvScaling::kPerTokenHead;
      ExpectReference<BFloat16, int8_t, float>(heads, variant, batch(int8_t()));
    }
  }
}

// 16 heads of one key/value head: the drafts are several blocks. Drafts that
// follow none stand where the first one does, however late they come, and see
// keys that the drafts between them do not.
TEST_P(DraftAttentionTest, MatchesTheReferenceInManyBlocks) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 16;
  for (const int64_t window : {kNoWindow, int64_t{10}, int64_t{300}}) {
    heads.window_left = window;
    for (const int64_t before : {260, 190, 600}) {
      Masks masks = Chain(64);
      for (const int64_t i : {31, 32, 47, 63}) {
        masks[static_cast<size_t>(i)] = Bit(i);
      }
      const std::vector<Sequence> batch = {
          RandomDrafts<float, BFloat16>(rng, heads, {64, before + 64}, masks)};
      for (const int workers : {1, 5}) {
        Variant variant;
        variant.schedule_workers = workers;
        const Attention<float, BFloat16, float> run(heads, variant, batch);
        EXPECT_GT(run.args().schedule.work().size(), 1u);
        ExpectReference<float, BFloat16, float>(heads, variant, batch);
      }
    }
  }
}

// What an engine verifies with: each draft's output is that of its path as a
// text of its own.
TEST_P(DraftAttentionTest, EachDraftHasTheNumbersOfItsPath) {
  TestRng rng;
  Heads heads = GroupedHeads();
  const auto row = heads.kv_heads * heads.head_dim;
  const auto q_row = heads.q_heads * heads.head_dim;
  for (const int64_t window : {kNoWindow, int64_t{3}, int64_t{40}}) {
    heads.window_left = window;
    constexpr int64_t kBefore = 245, kDrafts = 24;
    Masks masks = RandomTree(rng, kDrafts);
    for (int64_t i = 0; i < kDrafts; ++i)
      masks[static_cast<size_t>(i)] |= Bit(i);
    const Sequence tree = RandomDrafts<BFloat16, BFloat16>(
        rng, heads, {kDrafts, kBefore + kDrafts}, masks);
    std::vector<Sequence> paths;
    for (int64_t i = 0; i < kDrafts; ++i) {
      Sequence path;
      path.q.assign(tree.q.begin() + i * q_row,
                    tree.q.begin() + (i + 1) * q_row);
      for (int64_t t = 0; t < kBefore + kDrafts; ++t) {
        const bool on_path = t < kBefore || (masks[static_cast<size_t>(i)] &
                                             Bit(t - kBefore)) != 0;
        if (!on_path) continue;
        path.k.insert(path.k.end(), tree.k.begin() + t * row,
                      tree.k.begin() + (t + 1) * row);
        path.v.insert(path.v.end(), tree.v.begin() + t * row,
                      tree.v.begin() + (t + 1) * row);
      }
      path.length = {1, static_cast<int64_t>(path.k.size()) / row};
      paths.push_back(path);
    }
    using Run = Attention<BFloat16, BFloat16, float>;
    const Run got(heads, Variant(), {tree});
    EXPECT_RAN_ON(got.plan());
    const auto want = Run(heads, Variant(), paths).result();
    const Bounds bounds(heads, kBefore + kDrafts, UnitRoundoff<float>(),
                        got.plan());
    EXPECT_TRUE(
        AllClose(got.result().out, ToDoubles(want.out), 2 * bounds.out));
    EXPECT_TRUE(
        AllClose(got.result().lse, ToDoubles(want.lse), 2 * bounds.lse));
  }
}

TEST_P(DraftAttentionTest, ADraftThatSeesNothingIsZero) {
  TestRng rng;
  Heads heads = GroupedHeads();
  const std::vector<Sequence> batch = {
      RandomDrafts<float, float>(rng, heads, {3, 3}, {0, 0, 0b011})};
  const Attention<float, float, float> run(heads, Variant(), batch);
  EXPECT_RAN_ON(run.plan());
  const auto got = run.result();
  for (size_t i = 0; i < 2 * 6 * 24; ++i) EXPECT_EQ(got.out[i], 0);
  for (size_t i = 0; i < 2 * 6; ++i) {
    EXPECT_EQ(got.lse[i], -std::numeric_limits<float>::infinity());
  }
  ExpectReference<float, float, float>(heads, Variant(), batch);
  heads.sinks.assign(6, 2.5f);
  ExpectReference<float, float, float>(heads, Variant(), batch);
}

}  // namespace
}  // namespace quern
