// Windows, bidirectional sequences, soft cap, ALiBi, sinks and caches of bytes,
// against the reference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

// One instance per instruction set that this CPU has.
class AttentionFeaturesTest : public AttentionIsaTest {
 protected:
  // Without the pages that the window has left, which are in the table no more,
  // no bit changes.
  template <typename Q, typename Kv>
  void ExpectNoBitChanges(const Heads& heads, Variant variant,
                          const std::vector<Sequence>& batch) {
    SCOPED_TRACE(testing::Message()
                 << "window " << heads.window_left << " page_size "
                 << variant.page_size << " form "
                 << static_cast<int>(variant.form.value()));
    const Attention<Q, Kv, float> whole(heads, variant, batch);
    EXPECT_RAN_ON(whole.plan());
    EXPECT_FALSE(whole.args().pages.has_missing_pages());
    variant.give_back = true;
    const Attention<Q, Kv, float> rest(heads, variant, batch);
    EXPECT_TRUE(rest.args().pages.has_missing_pages());
    EXPECT_TRUE(AllBitsEqual(rest.result().out, whole.result().out));
    EXPECT_TRUE(AllBitsEqual(rest.result().lse, whole.result().lse));
  }
};
QUERN_INSTANTIATE_ISA_TEST(AttentionFeaturesTest);

Heads SmallHeads() {
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 24;
  return heads;
}

const std::vector<Lengths>& MixedLengths() {
  static const auto* lengths = new std::vector<Lengths>{
      {1, 300}, {20, 35, false}, {9, 530}, {40, 40}, {33, 290, false}, {1, 1}};
  return *lengths;
}

TEST_P(AttentionFeaturesTest, SeesWhatTheWindowShows) {
  TestRng rng;
  Heads heads = SmallHeads();
  for (const int64_t left :
       {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{270}, kNoWindow}) {
    for (const int64_t right : {int64_t{0}, int64_t{5}, kNoWindow}) {
      heads.window_left = left;
      heads.window_right = right;
      Variant variant;
      variant.schedule_workers = left == 17 ? 4 : 1;
      ExpectMatchesReference<float, float, float>(heads, variant,
                                                  MixedLengths(), rng);
      ExpectMatchesReference<BFloat16, BFloat16, float>(heads, variant,
                                                        MixedLengths(), rng);
    }
  }
}

TEST_P(AttentionFeaturesTest, TouchesNoPageThatTheWindowHasLeft) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 8;
  const std::vector<Lengths> lengths = {{1, 300},   {3, 35, false},   {9, 530},
                                        {40, 1100}, {20, 290, false}, {1, 1}};
  for (const int64_t left : {0, 1, 17, 270}) {
    heads.window_left = left;
    std::vector<Sequence> batch, bytes;
    for (const Lengths& length : lengths) {
      batch.push_back(RandomSequence<float, BFloat16>(rng, heads, length));
      bytes.push_back(RandomSequence<float, int8_t>(rng, heads, length));
    }
    Variant variant;
    variant.schedule_workers = left == 17 ? 4 : 1;
    for (const int64_t page_size : {1, 7, 16, 48, 256}) {
      variant.page_size = page_size;
      for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
        variant.form = form;
        if (form == KvForm::kPaired && page_size % 16 != 0) continue;
        variant.scaling = KvScaling::kNone;
        ExpectNoBitChanges<float, float>(heads, variant, batch);
        ExpectNoBitChanges<BFloat16, BFloat16>(heads, variant, batch);
        variant.scaling = KvScaling::kPerTokenHead;
        ExpectNoBitChanges<BFloat16, int8_t>(heads, variant, bytes);
      }
    }
  }
}

TEST_P(AttentionFeaturesTest, CapsLogitsSoftly) {
  TestRng rng;
  Heads heads = SmallHeads();
  heads.scale = 1;
  for (const float cap : {0.25f, 2.0f, 50.0f}) {
    heads.soft_cap = cap;
    ExpectMatchesReference<float, float, float>(heads, Variant(),
                                                MixedLengths(), rng);
    ExpectMatchesReference<BFloat16, BFloat16, BFloat16>(heads, Variant(),
                                                         MixedLengths(), rng);
  }
}

// The argument of tanh is in the thousands here, so that tanh is 1.
TEST_P(AttentionFeaturesTest, CapsLogitsOfAnySize) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 8;
  heads.scale = 1e30f;
  heads.soft_cap = 3;
  const Attention<float, float, float> attention(
      heads, Variant(), {RandomSequence<float, float>(rng, heads, {3, 40})});
  EXPECT_RAN_ON(attention.plan());
  for (const float lse : attention.result().lse) {
    EXPECT_LE(std::abs(lse), 3 + std::log(40.0f) + 1e-5f);
  }
}

TEST_P(AttentionFeaturesTest, LeansToNearKeysByAlibi) {
  TestRng rng;
  Heads heads = SmallHeads();
  heads.alibi_slopes = {0.5f, 0.25f, 0.0f, 0.01f, -0.03f, 1.0f};
  ExpectMatchesReference<float, float, float>(heads, Variant(), MixedLengths(),
                                              rng);
  heads.window_left = 100;
  heads.soft_cap = 1;
  ExpectMatchesReference<BFloat16, BFloat16, float>(heads, Variant(),
                                                    MixedLengths(), rng);
}

TEST_P(AttentionFeaturesTest, SinksTakeWeight) {
  TestRng rng;
  Heads heads = SmallHeads();
  heads.sinks = {0.0f, -3.0f, 4.0f, 12.0f, 1.0f, -80.0f};
  for (const int workers : {1, 8}) {
    Variant variant;
    variant.schedule_workers = workers;
    ExpectMatchesReference<float, float, float>(heads, variant, MixedLengths(),
                                                rng);
    ExpectMatchesReference<BFloat16, BFloat16, BFloat16>(heads, variant,
                                                         MixedLengths(), rng);
  }
  // One that leaves nothing to the keys, and one without keys.
  heads.sinks.assign(6, 1000.0f);
  const Attention<float, float, float> attention(
      heads, Variant(),
      {RandomSequence<float, float>(rng, heads, {1, 5}),
       RandomSequence<float, float>(rng, heads, {1, 0})});
  EXPECT_TRUE(AllEqual(attention.result().out, std::vector<float>(288, 0.0f)));
  EXPECT_TRUE(
      AllClose(attention.result().lse, std::vector<double>(12, 1000.0), 1e-3));
}

TEST_P(AttentionFeaturesTest, ReadsBytesWithTheirScales) {
  TestRng rng;
  Heads heads = SmallHeads();
  heads.v_head_dim = 19;
  for (const int64_t page_size : {5, 16, 32}) {
    Variant variant;
    variant.page_size = page_size;
    ExpectMatchesReference<float, Float8E4M3, float>(heads, variant,
                                                     MixedLengths(), rng);
    ExpectMatchesReference<BFloat16, Float8E5M2, float>(heads, variant,
                                                        MixedLengths(), rng);
    for (const KvScaling scaling : {KvScaling::kPerTensor, KvScaling::kPerHead,
                                    KvScaling::kPerTokenHead}) {
      variant.scaling = scaling;
      ExpectMatchesReference<float, int8_t, float>(heads, variant,
                                                   MixedLengths(), rng);
      ExpectMatchesReference<BFloat16, int8_t, BFloat16>(heads, variant,
                                                         MixedLengths(), rng);
    }
  }
  heads.head_dim = 7;
  ExpectMatchesReference<float, Float8E4M3, float>(heads, Variant(),
                                                   MixedLengths(), rng);
}

// Bytes that kernels widen in registers are what they are where they are
// widened in memory first: every finite code, as a key and as a value.
class AttentionBytesTest : public AttentionIsaTest {
 protected:
  template <typename T>
  auto ResultOf(const Heads& heads, const Sequence& sequence, KvForm form) {
    Variant variant;
    variant.form = form;
    const Attention<BFloat16, T, float> run(heads, variant, {sequence});
    EXPECT_RAN_ON(run.plan());
    return run.result();
  }

  template <typename T>
  void ExpectEveryCodeIsOne() {
    TestRng rng;
    Heads heads = SmallHeads();
    heads.v_head_dim = 40;
    heads.scale = 1e-4f;  // keys of any size get some weight
    Sequence sequence = RandomSequence<BFloat16, T>(rng, heads, {1, 512});
    const auto fill = [](std::vector<double>& values) {
      uint32_t code = 0;
      for (double& value : values) {
        do {
          value = Decode(FormatOf<T>(), code++ % 256);
        } while (!std::isfinite(value));
      }
    };
    fill(sequence.k);
    fill(sequence.v);
    const auto plain = ResultOf<T>(heads, sequence, KvForm::kPlain);
    const auto paired = ResultOf<T>(heads, sequence, KvForm::kPaired);
    EXPECT_TRUE(AllBitsEqual(paired.out, plain.out));
    EXPECT_TRUE(AllBitsEqual(paired.lse, plain.lse));
    for (const float value : plain.out) EXPECT_TRUE(std::isfinite(value));
  }

  template <typename T>
  void ExpectNanIsOne() {
    for (const bool key : {false, true}) {
      SCOPED_TRACE(key ? "key" : "value");
      TestRng rng;
      const Heads heads = SmallHeads();
      const Sequence sequence =
          RandomSequence<BFloat16, T>(rng, heads, {1, 512});
      // A word has two dims of a key, or two tokens of a value; each half is
      // widened apart.
      const int64_t next_dim = 1, next_token = heads.kv_heads * heads.head_dim;
      for (const int64_t at : {int64_t{0}, key ? next_dim : next_token}) {
        Sequence some = sequence;
        (key ? some.k : some.v)[static_cast<size_t>(at)] = std::nan("");
        const auto plain = ResultOf<T>(heads, some, KvForm::kPlain);
        const auto paired = ResultOf<T>(heads, some, KvForm::kPaired);
        size_t nans = 0;
        for (size_t i = 0; i < plain.out.size(); ++i) {
          EXPECT_EQ(std::isnan(paired.out[i]), std::isnan(plain.out[i])) << i;
          nans += std::isnan(plain.out[i]) ? 1 : 0;
        }
        EXPECT_GT(nans, 0u);
        EXPECT_LT(nans, plain.out.size());
      }
    }
  }

  // Queries of any size, and weights near 2^-115: where kernels multiply or
  // divide by a power of two on their way, that must not cost a bit.
  template <typename T>
  void ExpectAnySizeIsOne() {
    TestRng rng;
    Heads heads = SmallHeads();
    Variant variant;
    variant.scaling =
        std::is_same_v<T, int8_t> ? KvScaling::kPerTokenHead : KvScaling::kNone;
    const auto expect_one = [&](const Sequence& sequence) {
      using Run = Attention<float, T, float>;
      variant.form = KvForm::kPlain;
      const auto plain = Run(heads, variant, {sequence}).result();
      variant.form = KvForm::kPaired;
      const Run run(heads, variant, {sequence});
      EXPECT_RAN_ON(run.plan());
      const auto paired = run.result();
      EXPECT_TRUE(AllBitsEqual(paired.out, plain.out));
      EXPECT_TRUE(AllBitsEqual(paired.lse, plain.lse));
      for (const float value : plain.out) EXPECT_TRUE(std::isfinite(value));
    };
    for (const int exponent : {-140, -100, 0, 80, 110}) {
      SCOPED_TRACE(exponent);
      heads.scale = std::ldexp(1.0f, std::min(126, -exponent));
      Sequence sequence = RandomSequence<float, T>(rng, heads, {1, 512});
      for (double& q : sequence.q) {
        q = static_cast<double>(static_cast<float>(std::ldexp(q, exponent)));
      }
      expect_one(sequence);
    }
    SCOPED_TRACE("small weights");
    Sequence sequence = RandomSequence<float, T>(rng, heads, {1, 512});
    const double dim = static_cast<double>(heads.head_dim);
    heads.scale = static_cast<float>(58.0 * kLn2 / dim);
    std::fill(sequence.q.begin(), sequence.q.end(), 1.0);
    std::fill(sequence.k.begin(), sequence.k.end(), -1.0);
    // Token 0 has all the weight and no value.
    std::fill_n(sequence.k.begin(), heads.kv_heads * heads.head_dim, 0.875);
    std::fill_n(sequence.v.begin(), heads.kv_heads * heads.head_dim, 0.0);
    expect_one(sequence);
  }
};
QUERN_INSTANTIATE_ISA_TEST(AttentionBytesTest);

TEST_P(AttentionBytesTest, NumbersOfAnySizeAreOneWhereverBytesAreWidened) {
  ExpectAnySizeIsOne<int8_t>();
  ExpectAnySizeIsOne<Float8E4M3>();
}

TEST_P(AttentionBytesTest, EveryCodeOfAByteIsOneWhereverItIsWidened) {
  ExpectEveryCodeIsOne<Float8E4M3>();
  ExpectEveryCodeIsOne<Float8E5M2>();
}
TEST_P(AttentionBytesTest, NanIsOneWhereverItIsWidened) {
  ExpectNanIsOne<Float8E4M3>();
  ExpectNanIsOne<Float8E5M2>();
}

// Keys and values that only others see: behind the window, ahead of it.
TEST_P(AttentionFeaturesTest, NanOutsideTheWindowDoesNothing) {
  TestRng rng;
  Heads heads = SmallHeads();
  heads.window_left = 20;
  heads.window_right = 3;
  const std::vector<Sequence> clean = {
      RandomSequence<BFloat16, BFloat16>(rng, heads, {60, 320, false})};
  using Run = Attention<BFloat16, BFloat16, float>;
  const Run run(heads, Variant(), clean);
  EXPECT_RAN_ON(run.plan());
  const auto want = run.result();
  constexpr int64_t kAt = 290;  // query 30
  for (const bool in_key : {true, false}) {
    std::vector<Sequence> batch = clean;
    auto& rows = in_key ? batch[0].k : batch[0].v;
    rows[static_cast<size_t>((kAt * 2 + 1) * 24 + 5)] = std::nan("");
    const auto got = Run(heads, Variant(), batch).result();
    for (int64_t token = 0; token < 60; ++token) {
      for (int64_t h = 0; h < 6; ++h) {
        const int64_t position = 260 + token;
        const bool sees = h >= 3 && kAt >= position - 20 && kAt <= position + 3;
        for (int64_t d = 0; d < 24; ++d) {
          const auto i = static_cast<size_t>((token * 6 + h) * 24 + d);
          if (sees && (in_key || d == 5)) {
            ASSERT_TRUE(std::isnan(got.out[i])) << token << " " << h;
          } else {
            ASSERT_EQ(got.out[i], want.out[i]) << token << " " << h;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern
