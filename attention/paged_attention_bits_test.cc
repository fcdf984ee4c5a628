// What the bits of a row depend on, and what they do not.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

// One instance per instruction set that this CPU has.
class PagedAttentionBitsTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(PagedAttentionBitsTest);

TEST_P(PagedAttentionBitsTest, DependOnNothingButTheSequence) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  std::vector<Sequence> batch;
  for (const Lengths length : {Lengths{1, 900}, Lengths{30, 600}, Lengths{1, 3},
                               Lengths{0, 10}, Lengths{40, 40}}) {
    batch.push_back(RandomSequence<BFloat16, BFloat16>(rng, heads, length));
  }
  using Run = Attention<BFloat16, BFloat16, float>;
  const Run first(heads, Variant(), batch);
  EXPECT_RAN_ON(first.plan());
  EXPECT_TRUE(first.args().schedule.merges().empty());
  const auto want = first.result();
  const auto expect_same = [&](const Variant& variant, const char* what) {
    const Run run(heads, variant, batch);
    EXPECT_TRUE(AllBitsEqual(run.result().out, want.out)) << what;
    EXPECT_TRUE(AllBitsEqual(run.result().lse, want.lse)) << what;
  };
  Variant variant;
  variant.schedule_workers = 8;
  EXPECT_FALSE(Run(heads, variant, batch).args().schedule.merges().empty());
  expect_same(variant, "8 workers planned, 1 at work");
  for (const int workers : {2, 3, 5}) {
    const auto executor = Workers(workers);
    variant.executor = executor.get();
    variant.schedule_workers = workers;
    expect_same(variant, "several workers");
  }
  for (const int64_t page_size : {1, 13, 256}) {
    variant = Variant();
    variant.page_size = page_size;
    variant.page_order = 99;
    expect_same(variant, "another page size and order");
  }

  // Each sequence alone gives the same bits.
  std::vector<float> out, lse;
  for (const Sequence& s : batch) {
    const Run run(heads, Variant(), {s});
    const auto alone = run.result();
    out.insert(out.end(), alone.out.begin(), alone.out.end());
    lse.insert(lse.end(), alone.lse.begin(), alone.lse.end());
  }
  EXPECT_TRUE(AllBitsEqual(out, want.out)) << "alone";
  EXPECT_TRUE(AllBitsEqual(lse, want.lse)) << "alone";
}

// Several spans of chunks, cut within spans and between them.
TEST_P(PagedAttentionBitsTest, DoNotDependOnWhereABlockIsCut) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 3;
  heads.head_dim = 16;
  const std::vector<Sequence> batch = {
      RandomSequence<float, BFloat16>(rng, heads, {1, 3500}),
      RandomSequence<float, BFloat16>(rng, heads, {6, 2100})};
  using Run = Attention<float, BFloat16, float>;
  const Run whole(heads, Variant(), batch);
  EXPECT_RAN_ON(whole.plan());
  for (const int workers : {2, 3, 4, 6, 9, 64}) {
    Variant variant;
    variant.schedule_workers = workers;
    const Run cut(heads, variant, batch);
    EXPECT_FALSE(cut.args().schedule.merges().empty()) << workers;
    EXPECT_TRUE(AllBitsEqual(cut.result().out, whole.result().out)) << workers;
    EXPECT_TRUE(AllBitsEqual(cut.result().lse, whole.result().lse)) << workers;
  }
}

// Two groups, of decode and of several queries; members with too many queries
// for a block of several, or with none, compute for themselves.
TEST_P(PagedAttentionBitsTest, DoNotDependOnBlocksOfSharedPrefixes) {
  TestRng rng;
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0f, -0.25f, 1.0f};
  const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f};
  const auto expect_same = [&](auto kv, KvScaling scaling) {
    using Kv = decltype(kv);
    using Run = Attention<BFloat16, Kv, float>;
    Heads heads;
    heads.q_heads = 6;
    heads.kv_heads = 2;
    heads.head_dim = 20;
    heads.soft_cap = 5;
    heads.alibi_slopes = slopes;
    heads.sinks = sinks;
    std::vector<Sequence> batch;
    for (const Lengths length :
         {Lengths{1, 900}, Lengths{1, 1400}, Lengths{3, 700}, Lengths{0, 600},
          Lengths{1, 1300}, Lengths{2, 2000, false}, Lengths{60, 800},
          Lengths{1, 5}, Lengths{1, 1281}}) {
      batch.push_back(RandomSequence<BFloat16, Kv>(rng, heads, length));
    }
    Variant variant;
    variant.scaling = scaling;
    variant.prefix_groups = {{0, 5, 512}, {5, 8, 1280}};
    variant.prefix_members = {0, 2, 3, 5, 6, 1, 4, 8};
    for (const PrefixGroup& group : variant.prefix_groups) {
      const auto member = [&](int32_t i) -> Sequence& {
        return batch.at(static_cast<size_t>(
            variant.prefix_members.at(static_cast<size_t>(i))));
      };
      const auto count =
          static_cast<size_t>(group.tokens * heads.kv_heads * heads.head_dim);
      for (int32_t i = group.begin + 1; i < group.end; ++i) {
        std::copy_n(member(group.begin).k.begin(), count, member(i).k.begin());
        std::copy_n(member(group.begin).v.begin(), count, member(i).v.begin());
      }
    }
    variant.plan_prefixes = false;
    const auto want = Run(heads, variant, batch).result();
    variant.plan_prefixes = true;
    for (const int64_t page_size : {1, 16, 256}) {
      for (const int workers : {1, 2, 5, 64}) {
        const auto executor = Workers(2);
        variant.page_size = page_size;
        variant.form = std::nullopt;
        variant.schedule_workers = workers;
        variant.executor = workers == 1 ? nullptr : executor.get();
        const Run run(heads, variant, batch);
        EXPECT_RAN_ON(run.plan());
        const AttentionSchedule& schedule = run.args().schedule;
        ASSERT_EQ(schedule.prefixes().size(), 2u);
        EXPECT_THAT(schedule.Members(schedule.prefixes()[0]),
                    ::testing::ElementsAre(0, 2, 5));
        EXPECT_THAT(schedule.Members(schedule.prefixes()[1]),
                    ::testing::ElementsAre(1, 4, 8));
        EXPECT_TRUE(AllBitsEqual(run.result().out, want.out))
            << page_size << " " << workers << "\n"
            << schedule.DebugString();
        EXPECT_TRUE(AllBitsEqual(run.result().lse, want.lse));
      }
    }
  };
  expect_same(BFloat16(), KvScaling::kNone);
  expect_same(int8_t(), KvScaling::kPerTokenHead);
}

class PagedAttentionStepsTest : public AttentionIsaTest {
 protected:
  // Prefill in one step, in chunks, and one token at a time.
  template <typename T>
  void ExpectTheSameBits(int64_t head_dim) {
    TestRng rng;
    Heads heads;
    heads.q_heads = 4;
    heads.kv_heads = 2;
    heads.head_dim = head_dim;
    constexpr int64_t kLength = 290;
    const Sequence whole = RandomSequence<T, T>(rng, heads, {kLength, kLength});
    using Run = Attention<T, T, float>;
    const Run prefill(heads, Variant(), {whole});
    EXPECT_RAN_ON(prefill.plan());
    const int64_t q_row = 4 * head_dim, kv_row = 2 * head_dim;
    for (const int64_t step : {1, 7, 64}) {
      std::vector<float> out;
      for (int64_t begin = 0; begin < kLength; begin += step) {
        const int64_t end = std::min(kLength, begin + step);
        const auto head = [](const std::vector<double>& x, int64_t from,
                             int64_t to) {
          return std::vector<double>(x.begin() + from, x.begin() + to);
        };
        const Sequence part = {{end - begin, end},
                               head(whole.q, begin * q_row, end * q_row),
                               head(whole.k, 0, end * kv_row),
                               head(whole.v, 0, end * kv_row)};
        const auto result = Run(heads, Variant(), {part}).result();
        out.insert(out.end(), result.out.begin(), result.out.end());
      }
      EXPECT_TRUE(AllBitsEqual(out, prefill.result().out))
          << "steps of " << step;
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(PagedAttentionStepsTest);

TEST_P(PagedAttentionStepsTest, ChangeNoBit) {
  ExpectTheSameBits<BFloat16>(16);
  // The last dims are half a tile, and then too few for a vector of 8.
  ExpectTheSameBits<Float16>(24);
  ExpectTheSameBits<BFloat16>(22);
}

// A NaN in token 285 of sequence 0, which its queries 15 and up see.
class PagedAttentionNanTest : public AttentionIsaTest {
 protected:
  template <typename T>
  void ExpectReachesOnlyWhoSeesIt(const Variant& variant,
                                  int64_t v_head_dim = 19) {
    TestRng rng;
    Heads heads;
    heads.q_heads = 6;
    heads.kv_heads = 2;
    heads.head_dim = 20;
    heads.v_head_dim = v_head_dim;
    const std::vector<Sequence> clean = {
        RandomSequence<T, T>(rng, heads, {30, 300}),
        RandomSequence<T, T>(rng, heads, {1, 300})};
    using Run = Attention<T, T, float>;
    const auto want = Run(heads, variant, clean).result();
    for (const bool in_key : {true, false}) {
      const int64_t dims = in_key ? 20 : v_head_dim;
      for (const int64_t dim : {int64_t{0}, dims - 1}) {
        std::vector<Sequence> batch = clean;
        auto& rows = in_key ? batch[0].k : batch[0].v;
        // Key/value head 1: query heads 3, 4, 5.
        rows[static_cast<size_t>((285 * 2 + 1) * dims + dim)] = std::nan("");
        const Run run(heads, variant, batch);
        EXPECT_RAN_ON(run.plan());
        const auto got = run.result();
        for (int64_t token = 0; token < 31; ++token) {
          for (int64_t h = 0; h < 6; ++h) {
            const bool sees = token >= 15 && token < 30 && h >= 3;
            for (int64_t d = 0; d < v_head_dim; ++d) {
              const auto i =
                  static_cast<size_t>((token * 6 + h) * v_head_dim + d);
              if (sees && (in_key || d == dim)) {
                ASSERT_TRUE(std::isnan(got.out[i])) << token << " " << h;
              } else {
                ASSERT_EQ(got.out[i], want.out[i]) << token << " " << h;
              }
            }
            ASSERT_EQ(std::isnan(got.lse[static_cast<size_t>(token * 6 + h)]),
                      sees && in_key);
          }
        }
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(PagedAttentionNanTest);

TEST_P(PagedAttentionNanTest, ReachesOnlyTheRowsThatSeeIt) {
  Variant variant;
  ExpectReachesOnlyWhoSeesIt<BFloat16>(variant);
  variant.form = KvForm::kPaired;  // read where it lies
  ExpectReachesOnlyWhoSeesIt<BFloat16>(variant);
  ExpectReachesOnlyWhoSeesIt<BFloat16>(variant, /*v_head_dim=*/24);
  ExpectReachesOnlyWhoSeesIt<float>(variant);
}

TEST_P(PagedAttentionBitsTest, ServesTwoCallersAtOnce) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  const std::vector<Sequence> batch = {
      RandomSequence<BFloat16, BFloat16>(rng, heads, {20, 400})};
  using Run = Attention<BFloat16, BFloat16, float>;
  const Run run(heads, Variant(), batch);
  EXPECT_RAN_ON(run.plan());
  const auto want = run.result();
  const auto call = [&](std::vector<float>* out) {
    PagedAttentionArgs args = run.args();
    out->resize(20 * 4 * 16);
    args.out =
        DenseTensor<float>(out->data(), std::array<int64_t, 3>{20, 4, 16});
    args.lse = {};
    InlineExecutor executor;
    const int64_t bytes = run.plan().WorkspaceBytes(args.schedule, 1).value();
    AlignedBuffer memory = AlignedBuffer::Create(bytes).value();
    for (int i = 0; i < 20; ++i) {
      run.plan().Execute(args, Workspace(memory), executor);
    }
  };
  std::vector<float> a, b;
  std::thread other(call, &b);
  call(&a);
  other.join();
  EXPECT_TRUE(AllBitsEqual(a, want.out));
  EXPECT_TRUE(AllBitsEqual(b, want.out));
}

}  // namespace
}  // namespace quern
