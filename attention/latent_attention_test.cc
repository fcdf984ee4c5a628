// Attention over the latent form of the cache, which is that of MLA: values are
// the first dims of their keys.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
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
class Mla {
 public:
  static constexpr int64_t kHeads = 3, kLatent = 32, kRotated = 8, kNope = 16;
  static constexpr int64_t kV = 12;

  Mla(TestRng& rng, const Lengths& length)
      : length_(length),
        a_(Integers(rng, kHeads * kNope * kLatent, 1, 1.0 / 32)),
        b_(Integers(rng, kHeads * kV * kLatent, 1, 1.0 / 32)),
        c_(Integers(rng, length.kv_len * kLatent, 64, 1.0 / 64)),
        r_(Integers(rng, length.kv_len * kRotated, 64, 1.0 / 64)),
        x_(Integers(rng, length.q_len * kHeads * kNope, 64, 1.0 / 64)),
        y_(Integers(rng, length.q_len * kHeads * kRotated, 64, 1.0 / 64)) {}

  Sequence Expanded() const {
    Sequence s = {length_, {}, {}, {}};
    for (int64_t t = 0; t < length_.kv_len; ++t) {
      const auto latent = [&](int64_t j) { return At(c_, t * kLatent + j); };
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < kNope; ++d) {
          s.k.push_back(Times(a_, kNope, h, d, latent));
        }
        Append(r_, t * kRotated, kRotated, s.k);
        for (int64_t d = 0; d < kV; ++d) {
          s.v.push_back(Times(b_, kV, h, d, latent));
        }
      }
    }
    for (int64_t i = 0; i < length_.q_len * kHeads; ++i) {
      Append(x_, i * kNope, kNope, s.q);
      Append(y_, i * kRotated, kRotated, s.q);
    }
    return s;
  }

  Sequence Absorbed() const {
    Sequence s = {length_, {}, {}, {}};
    for (int64_t t = 0; t < length_.kv_len; ++t) {
      Append(c_, t * kLatent, kLatent, s.k);
      Append(r_, t * kRotated, kRotated, s.k);
      Append(c_, t * kLatent, kLatent, s.v);
    }
    for (int64_t i = 0; i < length_.q_len * kHeads; ++i) {
      for (int64_t j = 0; j < kLatent; ++j) {
        double sum = 0;
        for (int64_t d = 0; d < kNope; ++d) {
          sum += At(a_, (i % kHeads * kNope + d) * kLatent + j) *
                 At(x_, i * kNope + d);
        }
        s.q.push_back(sum);
      }
      Append(y_, i * kRotated, kRotated, s.q);
    }
    return s;
  }

  // B o, for the outputs o of the absorbed form.
  std::vector<double> Output(const std::vector<float>& o) const {
    std::vector<double> out;
    for (int64_t i = 0; i < length_.q_len * kHeads; ++i) {
      for (int64_t d = 0; d < kV; ++d) {
        out.push_back(Times(b_, kV, i % kHeads, d, [&](int64_t j) {
          return ToDouble(o.at(static_cast<size_t>(i * kLatent + j)));
        }));
      }
    }
    return out;
  }

 private:
  static std::vector<double> Integers(TestRng& rng, int64_t count, int64_t most,
                                      double unit) {
    std::vector<double> x(static_cast<size_t>(count));
    for (double& e : x) {
      e = static_cast<double>(rng.Integer(-most, most)) * unit;
    }
    return x;
  }
  static double At(const std::vector<double>& v, int64_t i) {
    return v.at(static_cast<size_t>(i));
  }
  static void Append(const std::vector<double>& from, int64_t begin,
                     int64_t count, std::vector<double>& to) {
    for (int64_t i = begin; i < begin + count; ++i) to.push_back(At(from, i));
  }
  // sum over j of m[head, row, j] * from(j)
  template <typename From>
  static double Times(const std::vector<double>& m, int64_t rows, int64_t head,
                      int64_t row, const From& from) {
    double sum = 0;
    for (int64_t j = 0; j < kLatent; ++j) {
      sum += At(m, (head * rows + row) * kLatent + j) * from(j);
    }
    return sum;
  }

  Lengths length_;
  std::vector<double> a_, b_, c_, r_, x_, y_;
};

TEST_P(LatentAttentionTest, AbsorbedAndExpandedFormsAgree) {
  TestRng rng;
  constexpr float kScale = 0.5f;
  const Lengths length = {4, 290};
  const Mla mla(rng, length);
  const Sequence expanded = mla.Expanded();
  Heads wide;
  wide.q_heads = wide.kv_heads = Mla::kHeads;
  wide.head_dim = Mla::kNope + Mla::kRotated;
  wide.v_head_dim = Mla::kV;
  wide.scale = kScale;
  Heads narrow;
  narrow.q_heads = Mla::kHeads;
  narrow.head_dim = Mla::kLatent + Mla::kRotated;
  narrow.v_head_dim = Mla::kLatent;
  narrow.scale = kScale;
  Variant variant;
  variant.form = KvForm::kPaired;
  const Attention<float, float, float> want(wide, variant, {expanded});
  variant.form = KvForm::kLatent;
  const Attention<float, float, float> got(narrow, variant, {mla.Absorbed()});
  EXPECT_RAN_ON(got.plan());
  // |A c|, |A' x| and |B c| are at most 1, as the bounds ask for, and a row of
  // B multiplies the error by at most 1.
  const double bound =
      Bounds(wide, length.kv_len, UnitRoundoff<float>(), want.plan()).out +
      Bounds(narrow, length.kv_len, UnitRoundoff<float>(), got.plan()).out;
  EXPECT_TRUE(AllClose(want.result().out, mla.Output(got.result().out), bound));
  EXPECT_TRUE(AllClose(
      want.result().out, Reference(wide, {expanded}).out,
      Bounds(wide, length.kv_len, UnitRoundoff<float>(), want.plan()).out));
}

}  // namespace
}  // namespace quern
