// The truncations of the sampler and its kernels, on every instruction set.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/ops/sampling/sampler_kernels.h"
#include "quern/ops/sampling/sampler_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_sampling.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Tokens = std::set<int32_t>;

class SamplerFiltersTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(SamplerFiltersTest);

SamplingParams MinP(float min_p, float temperature = 1.0f) {
  SamplingParams params = Params(temperature);
  params.min_p = min_p;
  return params;
}
SamplingParams Sigmas(float n, float temperature = 1.0f) {
  SamplingParams params = Params(temperature);
  params.top_n_sigma = n;
  return params;
}
SamplingParams Typical(float p, float temperature = 1.0f) {
  SamplingParams params = Params(temperature);
  params.typical_p = p;
  return params;
}

// The set of tokens that come up in `draws` draws.
Tokens Support(const std::vector<float>& logits, SamplingParams params,
               int draws = 300) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  Tokens tokens;
  for (int i = 0; i < draws; ++i) {
    params.step = static_cast<uint64_t>(i);
    tokens.insert(sampler.Sample(logits, params));
  }
  return tokens;
}

std::vector<float> Block(TestRng& rng, double lo, double hi) {
  return UniformReals(rng, kSamplerBlock, lo, hi);
}

TEST_P(SamplerFiltersTest, WeightsAreThoseOfTheEquation) {
  TestRng rng;
  const SamplerKernels kernels = GetSamplerKernels();
  EXPECT_RAN_ON(Sampler(1).plan());
  const SamplerKernels best = OnTheBestIsa(&GetSamplerKernels);
  for (const double spread : {0.01, 1.0, 20.0, 80.0, 120.0}) {
    for (const float temperature : {1.0f, 0.3f, 1.7f, 0x1p-50f, 0x1p50f}) {
      GuardBuffer<float> logits(Block(rng, -spread, 0));
      logits[7] = kNaN;
      logits[8] = -kInf;
      WeightRule rule;
      rule.largest = logits[255] = 0.5f;
      rule.temperature = temperature;
      rule.least_logit = -kInf;
      GuardBuffer<float> got(kSamplerBlock), same(kSamplerBlock);
      const double total = kernels.weights(logits.data(), rule, got.data());
      EXPECT_EQ(total, best.weights(logits.data(), rule, same.data()));
      EXPECT_EQ(total, kernels.sum(got.data()));
      double want_sum = 0.0;
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        ASSERT_EQ(got[i], same[i]) << i;
        // The difference is the equation's in f32, and the quotient is not
        // rounded.
        const double x = static_cast<double>(logits[i] - rule.largest) /
                         static_cast<double>(temperature);
        const double want = x >= -87.0 ? std::exp(x) : 0.0;
        ASSERT_LE(std::abs(static_cast<double>(got[i]) - want),
                  4 * 0x1p-24 * want)
            << logits[i];
        want_sum += static_cast<double>(got[i]);
      }
      // A filter drops weights and changes none.
      rule.least_logit = -0.25f;
      rule.least_weight = 0.125f;
      GuardBuffer<float> filtered(kSamplerBlock);
      kernels.weights(logits.data(), rule, filtered.data());
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        const bool kept = logits[i] >= -0.25f && got[i] >= 0.125f;
        ASSERT_EQ(filtered[i], kept ? got[i] : 0.0f) << i;
      }
      for (const float value : {-kInf, logits[3], 0.0f, 0.5f}) {
        EXPECT_EQ(kernels.greater(logits.data(), value),
                  std::count_if(logits.data(), logits.data() + kSamplerBlock,
                                [&](float l) { return l > value; }));
      }
      EXPECT_EQ(got[255], 1.0f);
      EXPECT_EQ(got[7], 0.0f);
      EXPECT_EQ(got[8], 0.0f);
      EXPECT_EQ(kernels.sum(got.data()), best.sum(got.data()));
      EXPECT_NEAR(kernels.sum(got.data()), want_sum, 256 * 0x1p-53 * want_sum);
      EXPECT_EQ(kernels.largest(logits.data()), 0.5f);
      const SamplerMoments moments = kernels.moments(logits.data(), rule);
      const SamplerMoments others = best.moments(logits.data(), rule);
      EXPECT_EQ(moments.count, 254);
      EXPECT_EQ(moments.sum, others.sum);
      EXPECT_EQ(moments.squares, others.squares);
      double sum = 0.0, squares = 0.0;
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        if (!(logits[i] > -kInf)) continue;
        const double off = 0.5 - static_cast<double>(logits[i]);
        sum += off;
        squares += off * off;
      }
      EXPECT_NEAR(moments.sum, sum, 256 * 0x1p-53 * sum);
      EXPECT_NEAR(moments.squares, squares, 257 * 0x1p-53 * squares);
    }
  }
}

TEST_P(SamplerFiltersTest, MinPKeepsThatShareOfTheLargestWeight) {
  EXPECT_RAN_ON(Sampler(1).plan());
  // With a temperature of 1 / ln(2), weights are powers of two, nearly.
  const float t = 1.0f / std::log(2.0f);
  EXPECT_EQ(Support({0, -1, -2, -3, 0}, MinP(0.3f, t)), (Tokens{0, 1, 4}));
  EXPECT_EQ(Support({0, -1, -2, -3, 0}, MinP(0.2f, t)), (Tokens{0, 1, 2, 4}));
  EXPECT_EQ(Support({3, 3, 2.9f, 3}, MinP(1.0f)), (Tokens{0, 1, 3}));
  EXPECT_EQ(Support({kNaN, 3, -kInf, 3}, MinP(0.01f)), (Tokens{1, 3}));
  EXPECT_EQ(Support({kInf, 3, -kInf, kInf}, MinP(0.01f)), (Tokens{0, 3}));
  EXPECT_EQ(Sample({kNaN, -kInf}, MinP(0.5f)), kNoToken);
}

TEST_P(SamplerFiltersTest, TopNSigmaKeepsWhatIsNearTheLargest) {
  EXPECT_RAN_ON(Sampler(1).plan());
  // The mean is 5 and the deviation 2. The temperature makes weights nearly
  // equal, so that draws meet every token that is kept.
  const std::vector<float> logits = {2, 4, 4, 4, 5, 5, 7, 9};
  EXPECT_EQ(Support(logits, Sigmas(1, 50)), (Tokens{6, 7}));
  EXPECT_EQ(Support(logits, Sigmas(2, 50)), (Tokens{4, 5, 6, 7}));
  EXPECT_EQ(Support(logits, Sigmas(1.99f, 50)), (Tokens{6, 7}));
  EXPECT_EQ(Support(logits, Sigmas(3.5f, 50)),
            (Tokens{0, 1, 2, 3, 4, 5, 6, 7}));
  // NaN and -infinity have no part in the deviation.
  EXPECT_EQ(Support({2, kNaN, 4, 4, 4, -kInf, 5, 5, 7, 9}, Sigmas(2, 50)),
            (Tokens{6, 7, 8, 9}));
  EXPECT_EQ(Support({7, 7, 7}, Sigmas(0.5f)), (Tokens{0, 1, 2}));
  EXPECT_EQ(Support({7}, Sigmas(0.5f)), (Tokens{0}));
  EXPECT_EQ(Support({7, kInf, 1, kInf}, Sigmas(3)), (Tokens{1, 3}));
  EXPECT_EQ(Support({-3e38f, 3e38f}, Sigmas(1.5f)), (Tokens{1}));
}

TEST_P(SamplerFiltersTest, TypicalPKeepsWhatIsNearTheEntropy) {
  EXPECT_RAN_ON(Sampler(1).plan());
  // Equal probabilities are all at the entropy; the lower ids stay.
  EXPECT_EQ(Support({1, 1, 1, 1}, Typical(0.5f)), (Tokens{0, 1}));
  EXPECT_EQ(Support({1, 1, 1, 1}, Typical(0.51f)), (Tokens{0, 1, 2}));
  // One p of 1/3 and ten of 1/15 have an entropy of 2.17. -log(1/3) = 1.10 is
  // farther from it than -log(1/15) = 2.71, so the likeliest goes.
  std::vector<float> logits(11, 0.0f);
  logits[3] = std::log(5.0f);
  EXPECT_EQ(Support(logits, Typical(0.5f)), (Tokens{0, 1, 2, 4, 5, 6, 7, 8}));
  EXPECT_EQ(Support({kNaN, 2, 2, -kInf}, Typical(0.9f)), (Tokens{1, 2}));
  EXPECT_EQ(Sample({kNaN, -kInf}, Typical(0.5f)), kNoToken);
  EXPECT_EQ(Support({5}, Typical(0.5f)), (Tokens{0}));
}

// Random params; each filter is on in half of the cases.
SamplingParams RandomParams(TestRng& rng, int64_t vocab) {
  SamplingParams params = Params(static_cast<float>(rng.Uniform(0.1, 3)), 0,
                                 1.0f, rng.Next(), rng.Next());
  const auto on = [&] { return rng.Integer(0, 1) == 1; };
  const auto fraction = [&] {
    return static_cast<float>(rng.Uniform(0.01, 0.999));
  };
  if (on()) params.top_k = rng.Integer(1, on() ? vocab + 2 : 8);
  if (on()) params.top_p = fraction();
  if (on()) params.min_p = fraction() * fraction() * fraction();
  if (on()) params.top_n_sigma = static_cast<float>(rng.Uniform(0.1, 4));
  if (on()) params.typical_p = fraction();
  return params;
}

TEST_P(SamplerFiltersTest, AgreeWithTheReference) {
  TestRng rng;
  EXPECT_RAN_ON(Sampler(1).plan());
  int compared = 0, tries = 0;
  for (const int64_t vocab : {1, 2, 17, 255, 256, 257, 1031, 5003}) {
    const int cases = vocab > 1000 ? 60 : 200;
    Sampler sampler(vocab);
    for (int i = 0; i < cases; ++i) {
      auto logits = i % 2 == 0 ? UniformReals(rng, vocab, -6, 6)
                               : SmallIntegers<float>(rng, vocab, -3, 3);
      if (i % 5 == 0 && vocab > 2) {
        logits[static_cast<size_t>(rng.Integer(0, vocab - 1))] = -kInf;
        logits[static_cast<size_t>(rng.Integer(0, vocab - 1))] = kNaN;
      }
      const SamplingParams params = RandomParams(rng, vocab);
      const ReferenceToken want = ReferenceSample(logits, params);
      ++tries;
      // Each weight is within 2^-21 of the equation's, relative, the rounding
      // of its exponent included; so are sums and shares.
      if (want.margin < 2 * 0x1p-21) continue;
      ++compared;
      ASSERT_EQ(sampler.Sample(logits, params), want.token)
          << "vocab=" << vocab << " case " << i
          << " temperature=" << params.temperature << " top_k=" << params.top_k
          << " top_p=" << params.top_p << " min_p=" << params.min_p
          << " top_n_sigma=" << params.top_n_sigma
          << " typical_p=" << params.typical_p;
    }
  }
  EXPECT_GT(compared, tries * 9 / 10);
}

// Peaked rows have few candidates, and flat rows many.
TEST_P(SamplerFiltersTest, AgreeWithTheReferenceOnAWholeVocabulary) {
  TestRng rng;
  EXPECT_RAN_ON(Sampler(1).plan());
  constexpr int64_t kVocab = 40013;
  Sampler sampler(kVocab);
  for (const double spread : {0.5, 12.0}) {
    const auto logits = UniformReals(rng, kVocab, -spread, spread);
    std::vector<SamplingParams> cases = {Params(1.0f),
                                         Params(1.0f, 40),
                                         Params(1.0f, 0, 0.9f),
                                         Params(0.7f, 50, 0.9f),
                                         Params(1.0f, 1000),
                                         Params(1.0f, 156, 0.5f),
                                         Params(1.0f, 1000, 0.9f),
                                         MinP(0.1f),
                                         Sigmas(1.0f),
                                         Typical(0.5f)};
    for (const int64_t top_k : {0, 1000}) {
      cases.push_back(Params(0.8f, top_k, 0.9f));
      cases.back().typical_p = 0.7f;
      cases.back().top_n_sigma = 2.0f;
    }
    for (SamplingParams& params : cases) {
      const auto all = ReferenceSampling(logits, params);
      for (int i = 0; i < 8; ++i) {
        params.seed = rng.Next();
        const ReferenceToken want =
            ReferenceDraw(all, PhiloxUniform(params.seed, params.step));
        const int32_t token = sampler.Sample(logits, params);
        if (want.margin > 0x1p-20) {
          EXPECT_EQ(token, want.token);
          continue;
        }
        // Where shares are smaller than errors of sums, the draw must lie
        // within the token's share, or those beside it.
        double before = 0.0, most = 0.0;
        for (size_t j = 0; j < all.probabilities.size(); ++j) {
          if (static_cast<int32_t>(j) < token) before += all.probabilities[j];
          most = std::max(most, all.probabilities[j]);
        }
        const double u = PhiloxUniform(params.seed, params.step);
        EXPECT_NEAR(u, before, 0x1p-20 + 2 * most);
      }
    }
  }
}

// One of some 10^9 weights that differ where a product and a sum are rounded to
// double and then to f32: the first rounding makes a tie of what is none.
TEST_P(SamplerFiltersTest, WeightsAreFusedWhereNoInstructionFuses) {
  const SamplerKernels kernels = GetSamplerKernels();
  EXPECT_RAN_ON(Sampler(1).plan());
  std::vector<float> logits(kSamplerBlock, -0x1.b3097cp+1f);
  std::vector<float> weights(kSamplerBlock);
  WeightRule rule;
  rule.temperature = 0x1.f619c2p+0f;
  rule.least_logit = -kInf;
  kernels.weights(logits.data(), rule, weights.data());
  EXPECT_EQ(weights[0], 0x1.6a09e2p-3f);
}

// Weights for which 1 / temperature is no number of f32, or nearly none.
TEST_P(SamplerFiltersTest, WeightsOfExtremeTemperatures) {
  const SamplerKernels kernels = GetSamplerKernels();
  EXPECT_RAN_ON(Sampler(1).plan());
  std::vector<float> logits(kSamplerBlock, -1.0f), weights(kSamplerBlock);
  logits[1] = logits[200] = 2.0f;
  logits[2] = 2.0f - 0x1p-22f;
  WeightRule rule;
  rule.largest = 2.0f;
  rule.least_logit = -kInf;
  for (const float temperature : {0x1p-149f, 0x1p-127f, 0x1p-61f}) {
    rule.temperature = temperature;
    EXPECT_EQ(kernels.weights(logits.data(), rule, weights.data()), 2.0);
    EXPECT_EQ(weights[1], 1.0f);
    EXPECT_EQ(weights[200], 1.0f);
  }
  for (const float temperature : {0x1p61f, 3e38f}) {
    rule.temperature = temperature;
    EXPECT_EQ(kernels.weights(logits.data(), rule, weights.data()), 256.0);
  }
}

// Where all tokens are equally far from the first, the lower ids stay, however
// many of them are looked at together.
TEST_P(SamplerFiltersTest, KeepTheLowerIdsOfAWholeVocabulary) {
  EXPECT_RAN_ON(Sampler(1).plan());
  constexpr int64_t kVocab = 40013;
  SamplingParams both = Params(1.0f, 30000, 0.5f);
  SamplingParams hot = Params(3e38f, 15000);
  const std::vector<SamplingParams> cases = {
      Params(1.0f, 15000), Params(1.0f, 0, 0.375f), both, hot, Typical(0.375f)};
  for (const float logit : {-3.0f, kInf}) {
    const std::vector<float> logits(kVocab, logit);
    for (SamplingParams params : cases) {
      const auto kept = static_cast<int32_t>(
          params.top_k == 15000 || params.top_k == 30000
              ? 15000
              : static_cast<int64_t>(std::ceil(0.375 * kVocab)));
      int32_t most = 0;
      Sampler sampler(kVocab);
      for (uint64_t step = 0; step < 12; ++step) {
        params.step = step;
        const int32_t token = sampler.Sample(logits, params);
        most = std::max(most, token);
        // The draw is u * kept, exactly.
        EXPECT_EQ(token, static_cast<int32_t>(PhiloxUniform(params.seed, step) *
                                              kept));
      }
      EXPECT_LT(most, kept);
      EXPECT_GT(most, kept * 3 / 4);
    }
  }
}

TEST_P(SamplerFiltersTest, DrawWithTheProbabilitiesOfTheEquation) {
  EXPECT_RAN_ON(Sampler(1).plan());
  constexpr int64_t kVocab = 12, kDraws = 20000;
  // From -2 to 2 in even steps, so that every filter drops some and keeps more
  // than two.
  std::vector<float> logits;
  for (int64_t i = 0; i < kVocab; ++i) {
    logits.push_back(-2.0f + 4.0f * static_cast<float>(i * 5 % kVocab) / 11.0f);
  }
  SamplingParams all = Params(0.9f, 10, 0.95f);
  all.min_p = 0.05f;
  all.top_n_sigma = 3.0f;
  all.typical_p = 0.9f;
  for (const SamplingParams& base :
       {MinP(0.1f), Sigmas(2.0f), Typical(0.7f), Typical(0.9f, 1.5f), all}) {
    Sampler sampler(kVocab);
    std::vector<int64_t> counts(kVocab);
    SamplingParams params = base;
    for (int64_t i = 0; i < kDraws; ++i) {
      params.step = static_cast<uint64_t>(i);
      const int32_t token = sampler.Sample(logits, params);
      ASSERT_TRUE(0 <= token && token < kVocab);
      ++counts[static_cast<size_t>(token)];
    }
    const auto p = ReferenceSampling(logits, base).probabilities;
    const auto kept =
        std::count_if(p.begin(), p.end(), [](double x) { return x > 0.0; });
    ASSERT_GT(kept, 2);
    ASSERT_LT(kept, kVocab);
    EXPECT_LT(ChiSquare(counts, p, kDraws),
              ChiSquareBound(static_cast<double>(kept - 1)));
  }
}

TEST_P(SamplerFiltersTest, DrawAcrossBlocksWithTheProbabilities) {
  TestRng rng;
  EXPECT_RAN_ON(Sampler(1).plan());
  // Every token is expected nine times or more.
  constexpr int64_t kVocab = 700, kDraws = 20000;
  const auto logits = UniformReals(rng, kVocab, -0.5, 0.5);
  for (const SamplingParams& base : {Params(1.0f), Params(1.0f, 0, 0.8f)}) {
    Sampler sampler(kVocab);
    std::vector<int64_t> counts(kVocab);
    SamplingParams params = base;
    for (int64_t i = 0; i < kDraws; ++i) {
      params.step = static_cast<uint64_t>(i);
      ++counts[static_cast<size_t>(sampler.Sample(logits, params))];
    }
    const auto p = ReferenceSampling(logits, base).probabilities;
    const auto kept =
        std::count_if(p.begin(), p.end(), [](double x) { return x > 0.0; });
    EXPECT_LT(ChiSquare(counts, p, kDraws),
              ChiSquareBound(static_cast<double>(kept - 1)));
  }
}

// Rows that end at a guard page, with any stride, and what the best
// instruction set draws.
TEST_P(SamplerFiltersTest, AreTheSameOnEveryInstructionSet) {
  TestRng rng;
  InlineExecutor executor;
  for (const int64_t vocab : {1, 3, 256, 300, 2049}) {
    constexpr int64_t kRows = 24;
    const StridedMatrix<float> logits(UniformReals(rng, kRows * vocab, -4, 4),
                                      kRows, vocab, vocab + 5);
    std::vector<SamplingParams> params;
    for (int64_t r = 0; r < kRows; ++r) {
      params.push_back(r == 0 ? Params(0) : RandomParams(rng, vocab));
    }
    const auto make = [&] { return *SamplerPlan::Create({vocab}); };
    const SamplerPlan plan = make();
    EXPECT_RAN_ON(plan);
    const SamplerPlan best = OnTheBestIsa(make);
    const int64_t bytes = *plan.WorkspaceBytes(kRows, 1);
    GuardBuffer<uint8_t> memory(bytes);
    const auto run = [&](const SamplerPlan& p) {
      std::vector<int32_t> tokens(kRows, -9);
      p.Execute(logits.view(), params, absl::MakeSpan(tokens),
                Workspace(memory.data(), static_cast<size_t>(bytes)), executor);
      return tokens;
    };
    EXPECT_EQ(run(plan), run(best));
  }
}

TEST(SamplerFilterParamsTest, AreRefused) {
  const auto refused = [](float SamplingParams::*field, float value,
                          const std::string& words) {
    SamplingParams params;
    params.*field = value;
    ExpectRefusal(SamplerPlan::CheckParams(params), words);
  };
  for (const float bad : {-0.1f, 1.001f, kInf, kNaN}) {
    refused(&SamplingParams::min_p, bad, "; need 0 <= min_p <= 1");
    refused(&SamplingParams::typical_p, bad, "; need 0 < typical_p <= 1");
  }
  refused(&SamplingParams::typical_p, 0, "typical_p=0; need 0 < typical_p");
  for (const float bad : {-0.1f, kInf, kNaN}) {
    refused(&SamplingParams::top_n_sigma, bad, "need finite top_n_sigma >= 0");
  }
}

}  // namespace
}  // namespace quern
