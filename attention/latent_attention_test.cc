// Attention over the latent form of the cache, which is that of MLA: values are
// the first dims of their keys.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

class LatentAttentionTest : public IsaTest {
 protected:
  // The paired form with the same numbers, which has tests of its own, bit by
  // bit.
  template <typename Q, typename Kv, typename Out>
  void ExpectBitsOfPaired(const Heads& heads,
                          const std::vector<Lengths>& lengths, Rng& rng) {
    SCOPED_TRACE(testing::Message()
                 << "q_heads " << heads.q_heads << " head_dim "
                 << heads.head_dim << " v_head_dim " << heads.v_head_dim << " "
                 << DTypeName(DTypeOf<Kv>));
    const auto dim = static_cast<size_t>(heads.head_dim);
    const auto v_dim = static_cast<size_t>(heads.v_head_dim);
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      Sequence s = RandomSequence<Q, Kv>(rng, heads, length);
      for (size_t i = 0; i < s.v.size(); ++i) {
        s.v[i] = s.k[i / v_dim * dim + i % v_dim];
      }
      batch.push_back(s);
    }
    Variant variant;
    variant.page_size = 48;
    variant.form = KvForm::kPaired;
    const Attention<Q, Kv, Out> want(heads, variant, batch);
    variant.form = KvForm::kLatent;
    for (const int workers : {1, 5}) {
      variant.schedule_workers = workers;
      const Attention<Q, Kv, Out> got(heads, variant, batch);
      EXPECT_RAN_ON(got.plan());
      EXPECT_TRUE(AllBitsEqual(got.result().out, want.result().out));
      EXPECT_TRUE(AllBitsEqual(got.result().lse, want.result().lse));
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LatentAttentionTest);

TEST_P(LatentAttentionTest, HasTheBitsOfKeysAndValuesApart) {
  TestRng rng;
  Heads heads;
  for (const int64_t v_dim : {4, 8, 20, 36, 64}) {
    for (const int64_t rest : {1, 4, 7}) {
      heads.q_heads = 3;
      heads.head_dim = v_dim + rest;
      heads.v_head_dim = v_dim;
      const std::vector<Lengths> lengths = {{1, 1}, {2, 47}, {5, 300}};
      ExpectBitsOfPaired<BFloat16, BFloat16, BFloat16>(heads, lengths, rng);
      ExpectBitsOfPaired<float, BFloat16, float>(heads, lengths, rng);
      ExpectBitsOfPaired<float, float, float>(heads, lengths, rng);
      ExpectBitsOfPaired<float, Float16, float>(heads, lengths, rng);
    }
  }
}

TEST_P(LatentAttentionTest, HasThemForTheDimsOfDeepSeek) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 576;
  heads.v_head_dim = 512;
  for (const int64_t q_heads : {1, 16}) {
    heads.q_heads = q_heads;
    ExpectBitsOfPaired<BFloat16, BFloat16, BFloat16>(heads, {{1, 270}, {3, 33}},
                                                     rng);
  }
}

// The two ways to compute MLA. With c[t] the latent of a token, r[t] its
// rotated part, and the matrices A and B of a head:
//
//   expanded   k = [A c, r]   v = B c   q = [x, y]       out = o
//   absorbed   k = [c, r]     v = c     q = [A' x, y]    out = B o
//
// Numbers are such that A c, A' x and B c are exact in f32.
TEST_P(LatentAttentionTest, AbsorbedAndExpandedFormsAgree) {
  TestRng rng;
  constexpr int64_t kHeads = 3, kLatent = 32, kRotated = 8, kNope = 16, kV = 12;
  constexpr float kScale = 0.5f;
  const Lengths length = {4, 290};
  const auto integers = [&](int64_t count, int64_t most, double unit) {
    std::vector<double> x(static_cast<size_t>(count));
    for (double& e : x)
      e = static_cast<double>(rng.Integer(-most, most)) * unit;
    return x;
  };
  const std::vector<double> a = integers(kHeads * kNope * kLatent, 1, 1.0 / 32);
  const std::vector<double> b = integers(kHeads * kV * kLatent, 1, 1.0 / 32);
  const std::vector<double> c = integers(length.kv_len * kLatent, 64, 1.0 / 64);
  const std::vector<double> r =
      integers(length.kv_len * kRotated, 64, 1.0 / 64);
  const std::vector<double> x =
      integers(length.q_len * kHeads * kNope, 64, 1.0 / 64);
  const std::vector<double> y =
      integers(length.q_len * kHeads * kRotated, 64, 1.0 / 64);
  const auto at = [](const std::vector<double>& v, int64_t i) {
    return v.at(static_cast<size_t>(i));
  };
  // sum over j of m[head, row, j] * from[j]
  const auto times = [&](const std::vector<double>& m, int64_t rows,
                         int64_t head, int64_t row, const auto& from) {
    double sum = 0;
    for (int64_t j = 0; j < kLatent; ++j) {
      sum += at(m, (head * rows + row) * kLatent + j) * from(j);
    }
    return sum;
  };

  Sequence expanded = {length, {}, {}, {}}, absorbed = expanded;
  for (int64_t t = 0; t < length.kv_len; ++t) {
    const auto latent = [&](int64_t j) { return at(c, t * kLatent + j); };
    for (int64_t j = 0; j < kLatent; ++j) absorbed.k.push_back(latent(j));
    for (int64_t j = 0; j < kLatent; ++j) absorbed.v.push_back(latent(j));
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t d = 0; d < kNope; ++d) {
        expanded.k.push_back(times(a, kNope, h, d, latent));
      }
      for (int64_t d = 0; d < kRotated; ++d) {
        expanded.k.push_back(at(r, t * kRotated + d));
      }
      for (int64_t d = 0; d < kV; ++d) {
        expanded.v.push_back(times(b, kV, h, d, latent));
      }
    }
    for (int64_t d = 0; d < kRotated; ++d) {
      absorbed.k.push_back(at(r, t * kRotated + d));
    }
  }
  for (int64_t i = 0; i < length.q_len * kHeads; ++i) {
    for (int64_t d = 0; d < kNope; ++d)
      expanded.q.push_back(at(x, i * kNope + d));
    for (int64_t j = 0; j < kLatent; ++j) {
      double sum = 0;
      for (int64_t d = 0; d < kNope; ++d) {
        sum += at(a, (i % kHeads * kNope + d) * kLatent + j) *
               at(x, i * kNope + d);
      }
      absorbed.q.push_back(sum);
    }
    for (int64_t d = 0; d < kRotated; ++d) {
      expanded.q.push_back(at(y, i * kRotated + d));
      absorbed.q.push_back(at(y, i * kRotated + d));
    }
  }

  Heads wide;
  wide.q_heads = wide.kv_heads = kHeads;
  wide.head_dim = kNope + kRotated;
  wide.v_head_dim = kV;
  wide.scale = kScale;
  Heads narrow;
  narrow.q_heads = kHeads;
  narrow.head_dim = kLatent + kRotated;
  narrow.v_head_dim = kLatent;
  narrow.scale = kScale;
  Variant variant;
  variant.form = KvForm::kPaired;
  const Attention<float, float, float> want(wide, variant, {expanded});
  variant.form = KvForm::kLatent;
  const Attention<float, float, float> got(narrow, variant, {absorbed});
  EXPECT_RAN_ON(got.plan());
  std::vector<double> out;
  for (int64_t i = 0; i < length.q_len * kHeads; ++i) {
    for (int64_t d = 0; d < kV; ++d) {
      out.push_back(times(b, kV, i % kHeads, d, [&](int64_t j) {
        return ToDouble(
            got.result().out.at(static_cast<size_t>(i * kLatent + j)));
      }));
    }
  }
  // |A c|, |A' x| and |B c| are at most 1, as the bounds ask for, and a row of
  // B multiplies the error by at most 1.
  const double bound =
      Bounds(wide, length.kv_len, UnitRoundoff<float>(), want.plan()).out +
      Bounds(narrow, length.kv_len, UnitRoundoff<float>(), got.plan()).out;
  EXPECT_TRUE(AllClose(want.result().out, out, bound));
  EXPECT_TRUE(AllClose(
      want.result().out, Reference(wide, {expanded}).out,
      Bounds(wide, length.kv_len, UnitRoundoff<float>(), want.plan()).out));
}

}  // namespace
}  // namespace quern
