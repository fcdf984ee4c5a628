// What paged attention computes: exactly, and against the reference.

#include "quern/attention/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// One instance per instruction set that this CPU has.
class PagedAttentionTest : public AttentionIsaTest {};
QUERN_INSTANTIATE_ISA_TEST(PagedAttentionTest);

// Keys of zero give all visible tokens the same weight, exactly 1: the output
// is the correctly rounded mean of small integers.
TEST_P(PagedAttentionTest, IsTheExactMeanWhereKeysAreZero) {
  TestRng rng;
  for (const int64_t dim : {1, 4, 15, 16, 17, 33, 40}) {
    for (const int64_t group : {1, 2, 3, 5, 8}) {
      Heads heads;
      heads.kv_heads = 2;
      heads.q_heads = 2 * group;
      heads.head_dim = 3;
      heads.v_head_dim = dim;
      for (const Lengths length :
           {Lengths{1, 1}, Lengths{1, 17}, Lengths{5, 5}, Lengths{3, 255},
            Lengths{2, 256}, Lengths{7, 261}, Lengths{40, 530}}) {
        Variant variant;
        variant.page_size = group == 3 ? 1 : 7 + group;
        variant.schedule_workers = group % 2 == 0 ? 8 : 1;
        Sequence s = RandomSequence<float, BFloat16>(rng, heads, length);
        std::fill(s.k.begin(), s.k.end(), 0.0);
        s.v = ToDoubles(SmallIntegers(rng, length.kv_len * heads.kv_heads * dim,
                                      -100, 100));
        const Attention<float, BFloat16, float> attention(heads, variant, {s});
        EXPECT_RAN_ON(attention.plan());
        // The sum of the values that all queries see, and one more with each.
        const int64_t first = length.kv_len - length.q_len;
        std::vector<double> sums(static_cast<size_t>(heads.kv_heads * dim));
        std::vector<float> want;
        for (int64_t t = 0; t < length.kv_len; ++t) {
          for (size_t i = 0; i < sums.size(); ++i) {
            sums[i] += s.v[static_cast<size_t>(t) * sums.size() + i];
          }
          if (t < first) continue;
          for (int64_t h = 0; h < heads.q_heads; ++h) {
            for (int64_t d = 0; d < dim; ++d) {
              const double sum = sums[static_cast<size_t>(h / group * dim + d)];
              want.push_back(static_cast<float>(sum) /
                             static_cast<float>(t + 1));
            }
          }
        }
        ASSERT_TRUE(AllEqual(attention.result().out, want))
            << "v_head_dim " << dim << " group " << group << " q_len "
            << length.q_len << " kv_len " << length.kv_len;
      }
    }
  }
}

// A key is +-1 by the bits of its position. A query that is 128 times the key
// of position j has a logit there at least 256 above any other: j has all the
// weight, and the output is its value, exactly.
TEST_P(PagedAttentionTest, FindsTheKeyThatIsAskedFor) {
  TestRng rng;
  constexpr int64_t kBits = 10;
  for (const int64_t dim : {10, 15, 16, 17, 31, 64, 67}) {
    Heads heads;
    heads.kv_heads = 2;
    heads.q_heads = 6;
    heads.head_dim = dim;
    heads.v_head_dim = 5;
    heads.scale = 1;
    const Lengths length = {70, 600};
    Sequence s = RandomSequence<float, float>(rng, heads, length);
    const auto key = [&](int64_t position, int64_t head, int64_t d) {
      // Dims beyond the bits are the same for all keys and move no weight.
      if (d >= kBits) return 1.0;
      const int64_t bit = (d + head) % kBits;
      return ((position >> bit) & 1) != 0 ? 1.0 : -1.0;
    };
    size_t next = 0;
    for (int64_t t = 0; t < length.kv_len; ++t) {
      for (int64_t g = 0; g < heads.kv_heads; ++g) {
        for (int64_t d = 0; d < dim; ++d) s.k[next++] = key(t, g, d);
      }
    }
    std::vector<float> want;
    next = 0;
    for (int64_t i = 0; i < length.q_len; ++i) {
      for (int64_t h = 0; h < heads.q_heads; ++h) {
        const int64_t g = h / 3;
        const int64_t asked = rng.Integer(0, length.kv_len - length.q_len + i);
        for (int64_t d = 0; d < dim; ++d) s.q[next++] = 128 * key(asked, g, d);
        for (int64_t d = 0; d < 5; ++d) {
          want.push_back(static_cast<float>(
              s.v[static_cast<size_t>((asked * 2 + g) * 5 + d)]));
        }
      }
    }
    const Attention<float, float, float> attention(heads, Variant(), {s});
    EXPECT_RAN_ON(attention.plan());
    EXPECT_TRUE(AllEqual(attention.result().out, want)) << "head_dim " << dim;
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryHeadDim) {
  TestRng rng;
  for (const int64_t dim : {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 80, 96, 128}) {
    for (const int64_t v_dim : {dim, dim + 3}) {
      Heads heads;
      heads.q_heads = 4;
      heads.kv_heads = 2;
      heads.head_dim = dim;
      heads.v_head_dim = v_dim;
      ExpectMatchesReference<float, BFloat16, float>(heads, Variant(),
                                                     {{1, 19}, {3, 33}}, rng);
    }
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryGroup) {
  TestRng rng;
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 71}) {
    Heads heads;
    heads.q_heads = 2 * group;
    heads.kv_heads = 2;
    heads.head_dim = 24;
    for (const int workers : {1, 8}) {
      Variant variant;
      variant.schedule_workers = workers;
      ExpectMatchesReference<float, float, float>(
          heads, variant, {{1, 270}, {9, 40}, {3, 3}}, rng);
    }
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryType) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 40;
  const std::vector<Lengths> lengths = {{1, 77}, {20, 50}, {6, 300}};
  ExpectMatchesReference<float, float, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<float, Float16, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<float, BFloat16, BFloat16>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, float, BFloat16>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, BFloat16, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, Float16, BFloat16>(heads, {}, lengths, rng);
  ExpectMatchesReference<Float16, BFloat16, Float16>(heads, {}, lengths, rng);
  ExpectMatchesReference<Float16, Float16, float>(heads, {}, lengths, rng);
}

TEST_P(PagedAttentionTest, MatchesTheReferenceAcrossPagesAndChunks) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 2;
  heads.kv_heads = 1;
  heads.head_dim = 16;
  for (const int64_t page_size : {1, 3, 16, 32, 64, 100, 256, 300}) {
    Variant variant;
    variant.page_size = page_size;
    variant.schedule_workers = 4;
    ExpectMatchesReference<float, BFloat16, float>(heads, variant,
                                                   {{1, 1},
                                                    {2, 15},
                                                    {16, 16},
                                                    {17, 33},
                                                    {1, 255},
                                                    {4, 256},
                                                    {4, 257},
                                                    {33, 513},
                                                    {1, 700}},
                                                   rng);
  }
}

TEST_P(PagedAttentionTest, UsesTheScaleItIsGiven) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 2;
  heads.kv_heads = 2;
  heads.head_dim = 16;
  for (const float scale : {0.03f, 1.0f, 2.5f, -0.5f}) {
    heads.scale = scale;
    ExpectMatchesReference<float, float, float>(heads, Variant(),
                                                {{1, 30}, {5, 20}}, rng);
  }
}

// Logits of +-30000: exp of them, or of a difference, overflows or vanishes.
TEST_P(PagedAttentionTest, SurvivesLargeLogits) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 8;
  heads.scale = 1000;
  std::vector<Sequence> batch = {
      RandomSequence<float, float>(rng, heads, {5, 300})};
  // Integers: the logits are exact, so that large ones are no large errors.
  batch[0].q = ToDoubles(SmallIntegers(rng, 5 * 8, -2, 2));
  batch[0].k = ToDoubles(SmallIntegers(rng, 300 * 8, -2, 2));
  heads.scale = static_cast<float>(1024 * kLn2);
  const Attention<float, float, float> attention(heads, Variant(), batch);
  EXPECT_RAN_ON(attention.plan());
  const ReferenceAttentionResult want = Reference(heads, batch);
  // Distinct logits are at least ln2 * 1024 apart: weights are 0 or equal.
  EXPECT_TRUE(AllClose(attention.result().out, want.out, 300 * 3e-7));
}

// Its weight is 1 however far a float of its size is from the next.
TEST_P(PagedAttentionTest, OneKeyOfALargeLogitIsItsValue) {
  Heads heads;
  heads.head_dim = 1;
  heads.scale = 1;
  for (const double x : {1e3, 7e4, 1e5, 123456.0, 3e15}) {
    const std::vector<Sequence> batch = {{{1, 1}, {x}, {x}, {0.75}}};
    const Attention<float, float, float> attention(heads, Variant(), batch);
    EXPECT_RAN_ON(attention.plan());
    EXPECT_EQ(attention.result().out[0], 0.75f) << x;
    EXPECT_NEAR(attention.result().lse[0] / (x * x), 1, 1e-6) << x;
  }
}

TEST_P(PagedAttentionTest, NoKeyGivesZero) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 10;
  const std::vector<Sequence> batch = {
      RandomSequence<float, float>(rng, heads, {1, 0}),
      RandomSequence<float, float>(rng, heads, {2, 5}),
      RandomSequence<float, float>(rng, heads, {3, 0}),
      RandomSequence<float, float>(rng, heads, {0, 0})};
  const Attention<float, float, float> attention(heads, Variant(), batch);
  EXPECT_RAN_ON(attention.plan());
  const auto got = attention.result();
  for (const int64_t token : {0, 3, 4, 5}) {
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_EQ(BitsOf(got.out[static_cast<size_t>(token * 40 + i)]), 0u);
    }
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_EQ(ToDouble(got.lse[static_cast<size_t>(token * 4 + h)]), -kInf);
    }
  }
  // Nothing at all.
  const Attention<float, float, float> empty(heads, Variant(), {});
  EXPECT_TRUE(empty.result().out.empty());
}

TEST_P(PagedAttentionTest, LogitsOfMinusInfinityHaveNoWeight) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 3;
  heads.scale = 1;
  // The query is all ones. Keys are zero, or -inf in one dimension; all of the
  // first chunk have -inf and so do not count.
  Sequence s = {{1, 300},
                std::vector<double>(3, 1.0),
                std::vector<double>(900, 0.0),
                ToDoubles(SmallIntegers(rng, 900))};
  for (size_t t = 0; t < 298; ++t) s.k[t * 3 + 1] = -kInf;
  const Attention<float, float, float> some(heads, Variant(), {s});
  EXPECT_RAN_ON(some.plan());
  for (size_t d = 0; d < 3; ++d) {
    EXPECT_EQ(ToDouble(some.result().out[d]),
              (s.v[298 * 3 + d] + s.v[299 * 3 + d]) / 2);
  }
  for (size_t t = 0; t < 300; ++t) s.k[t * 3 + 1] = -kInf;
  const auto none =
      Attention<float, float, float>(heads, Variant(), {s}).result();
  EXPECT_TRUE(AllEqual(none.out, std::vector<double>(3, 0.0)));
  EXPECT_TRUE(AllEqual(none.lse, std::vector<double>(1, -kInf)));
}

}  // namespace
}  // namespace quern
