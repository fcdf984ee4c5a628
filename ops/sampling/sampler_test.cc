#include "quern/ops/sampling/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

// The set of tokens that come up in `draws` draws.
std::set<int32_t> Support(const std::vector<float>& logits,
                          SamplingParams params, int draws = 400) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  std::set<int32_t> tokens;
  for (int i = 0; i < draws; ++i) {
    params.step = static_cast<uint64_t>(i);
    tokens.insert(sampler.Sample(logits, params));
  }
  return tokens;
}
using Tokens = std::set<int32_t>;

// The known answers were published with the generator.
TEST(PhiloxTest, ReproducesTheKnownAnswers) {
  using Counter = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                       {0xffffffff, 0xffffffff}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, IsUniformOverStepsAndOverSeeds) {
  constexpr int64_t kBins = 64, kDraws = 200000;
  for (const bool over_steps : {true, false}) {
    std::vector<int64_t> counts(kBins);
    for (uint64_t i = 0; i < kDraws; ++i) {
      const double u = over_steps ? PhiloxUniform(7, i) : PhiloxUniform(i, 7);
      ASSERT_TRUE(0.0 <= u && u < 1.0) << u;
      ++counts[static_cast<size_t>(u * kBins)];
    }
    EXPECT_LT(
        ChiSquare(counts, std::vector<double>(kBins, 1.0 / kBins), kDraws),
        ChiSquareBound(kBins - 1));
  }
}

TEST(PhiloxTest, UsesAllBitsOfSeedAndStep) {
  std::set<double> draws;
  for (int bit = 0; bit < 64; ++bit) {
    draws.insert(PhiloxUniform(uint64_t{1} << bit, 0));
    draws.insert(PhiloxUniform(0, uint64_t{1} << bit));
  }
  EXPECT_EQ(draws.size(), 128u);
}

TEST(SamplerTest, GreedyTakesTheLowestIdOfTheLargest) {
  const SamplingParams greedy = Params(0.0f);
  EXPECT_EQ(Sample({1, 3, 2, 3, 3}, greedy), 1);
  EXPECT_EQ(Sample({-5}, greedy), 0);
  EXPECT_EQ(Sample({-0.0f, 0.0f}, greedy), 0);
  EXPECT_EQ(Sample({-3e38f, -kInf, -2e38f}, greedy), 2);
  EXPECT_EQ(Sample({1, kInf, kInf}, greedy), 1);
}

TEST(SamplerTest, NaNAndMinusInfinityNeverWin) {
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams params = Params(temperature);
    EXPECT_EQ(Sample({kNaN, -1, kNaN, -kInf}, params), 1);
    EXPECT_EQ(Sample({kNaN, kNaN}, params), kNoToken);
    EXPECT_EQ(Sample({-kInf, kNaN, -kInf}, params), kNoToken);
    params.top_k = 3;
    params.top_p = 0.9f;
    EXPECT_EQ(Sample({kNaN, -1, kNaN, -kInf}, params), 1);
    EXPECT_EQ(Sample({-kInf, kNaN, -kInf}, params), kNoToken);
  }
  EXPECT_EQ(Support({kNaN, 1, 1, kNaN, -kInf, 1}, Params(1.0f, 2)),
            (Tokens{1, 2}));
  EXPECT_EQ(Support({kNaN, 1, 1, kNaN, -kInf, 1}, Params(1.0f)),
            (Tokens{1, 2, 5}));
}

TEST(SamplerTest, InfinitiesShareEqually) {
  EXPECT_EQ(Support({1, kInf, 3e38f, kInf}, Params(1.0f)), (Tokens{1, 3}));
  EXPECT_EQ(Support({1, kInf, 3e38f, kInf}, Params(1.0f, 0, 0.5f)),
            (Tokens{1}));
}

TEST(SamplerTest, TopKKeepsExactlyKAndTheLowerIdsOfATie) {
  EXPECT_EQ(Support({1, 2, 2, 2, 0}, Params(1.0f, 2)), (Tokens{1, 2}));
  EXPECT_EQ(Support({2, 1, 2, 1, 1}, Params(1.0f, 3)), (Tokens{0, 1, 2}));
  EXPECT_EQ(Support({5, 5, 5, 5}, Params(1.0f, 4)), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(Support({5, 5, 5, 5}, Params(1.0f, 5)), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(Support({5, 5, 5, 5}, Params(1.0f, 1)), (Tokens{0}));
}

// Equal logits have weight 1 each, so the sums are whole numbers.
TEST(SamplerTest, TopPKeepsTheFewestThatReachIt) {
  const std::vector<float> four = {7, 7, 7, 7};
  EXPECT_EQ(Support(four, Params(1.0f, 0, 0.25f)), (Tokens{0}));
  EXPECT_EQ(Support(four, Params(1.0f, 0, std::nextafter(0.25f, 1.0f))),
            (Tokens{0, 1}));
  EXPECT_EQ(Support(four, Params(1.0f, 0, 0.5f)), (Tokens{0, 1}));
  EXPECT_EQ(Support(four, Params(1.0f, 0, 0.51f)), (Tokens{0, 1, 2}));
  EXPECT_EQ(Support(four, Params(1.0f, 0, std::nextafter(1.0f, 0.0f))),
            (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(
      Support(four, Params(1.0f, 0, std::numeric_limits<float>::denorm_min())),
      (Tokens{0}));
  // top_p keeps the largest logits rather than the first ids.
  EXPECT_EQ(Support({0, 9, 0, 9, 0}, Params(0.01f, 0, 0.9f)), (Tokens{1, 3}));
}

TEST(SamplerTest, TopPCountsWhatTopKLeft) {
  const std::vector<float> eight(8, 1.0f);
  EXPECT_EQ(Support(eight, Params(1.0f, 4, 0.5f)), (Tokens{0, 1}));
  EXPECT_EQ(Support(eight, Params(1.0f, 0, 0.5f)), (Tokens{0, 1, 2, 3}));
}

TEST(SamplerTest, OneCandidateIsGreedy) {
  TestRng rng;
  for (int i = 0; i < 200; ++i) {
    // Small integers give many equal logits.
    const auto logits = SmallIntegers<float>(rng, 33, -3, 3);
    const int32_t greedy = Sample(logits, Params(0.0f));
    const uint64_t seed = rng.Next();
    EXPECT_EQ(Sample(logits, Params(1.0f, 1, 1.0f, seed)), greedy);
    EXPECT_EQ(Sample(logits, Params(1.0f, 0, 1e-6f, seed)), greedy);
  }
}

TEST(SamplerTest, ExtremeTemperaturesAreGreedyAndUniform) {
  const std::vector<float> logits = {1.0f, 1.5f, -4.0f, 1.25f};
  for (const float t : {1e-6f, std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(Support(logits, Params(t)), (Tokens{1}));
  }
  EXPECT_EQ(Support(logits, Params(3e38f)), (Tokens{0, 1, 2, 3}));
}

TEST(SamplerTest, AFilterThatKeepsAllChangesNothing) {
  TestRng rng;
  for (int i = 0; i < 200; ++i) {
    const auto logits = UniformReals(rng, 37, -4, 4);
    const uint64_t seed = rng.Next();
    const int32_t token = Sample(logits, Params(1.0f, 0, 1.0f, seed));
    EXPECT_EQ(Sample(logits, Params(1.0f, 37, 1.0f, seed)), token);
    EXPECT_EQ(Sample(logits, Params(1.0f, int64_t{1} << 62, 1.0f, seed)),
              token);
  }
}

TEST(SamplerTest, AgreesWithTheReference) {
  TestRng rng;
  int compared = 0;
  for (int i = 0; i < 3000; ++i) {
    const int64_t vocab = rng.Integer(1, 200);
    const auto logits = i % 2 == 0 ? UniformReals(rng, vocab, -6, 6)
                                   : SmallIntegers<float>(rng, vocab, -2, 2);
    const SamplingParams params = Params(
        static_cast<float>(rng.Uniform(0.1, 3)),
        rng.Integer(0, 1) * rng.Integer(1, vocab + 2),
        rng.Integer(0, 1) == 0 ? 1.0f
                               : static_cast<float>(rng.Uniform(0.01, 0.999)),
        rng.Next(), rng.Next());
    const ReferenceToken want = ReferenceSample(logits, params);
    // The bound covers f32 weights: 200 of them, each within 2^-22 of the sum.
    if (want.margin < 1e-5) continue;
    ++compared;
    ASSERT_EQ(Sample(logits, params), want.token)
        << "vocab=" << vocab << " temperature=" << params.temperature
        << " top_k=" << params.top_k << " top_p=" << params.top_p;
  }
  EXPECT_GT(compared, 2900);
}

TEST(SamplerTest, DrawsWithTheProbabilitiesOfTheSoftmax) {
  TestRng rng;
  constexpr int64_t kVocab = 12, kDraws = 60000;
  const auto logits = UniformReals(rng, kVocab, -2, 2);
  for (const SamplingParams& base :
       {Params(1.0f), Params(0.6f), Params(1.3f, 5), Params(1.0f, 0, 0.8f),
        Params(0.8f, 9, 0.7f)}) {
    for (const bool over_steps : {true, false}) {
      Sampler sampler(kVocab);
      std::vector<int64_t> counts(kVocab);
      SamplingParams params = base;
      for (int64_t i = 0; i < kDraws; ++i) {
        (over_steps ? params.step : params.seed) = static_cast<uint64_t>(i);
        const int32_t token = sampler.Sample(logits, params);
        ASSERT_TRUE(0 <= token && token < kVocab);
        ++counts[static_cast<size_t>(token)];
      }
      const auto p = ReferenceSampling(logits, base).probabilities;
      const auto kept =
          std::count_if(p.begin(), p.end(), [](double x) { return x > 0.0; });
      ASSERT_GT(kept, 2);
      EXPECT_LT(ChiSquare(counts, p, kDraws),
                ChiSquareBound(static_cast<double>(kept - 1)));
    }
  }
}

TEST(SamplerTest, DependsOnNeitherNeighboursNorWorkers) {
  TestRng rng;
  const int64_t rows = 19, vocab = 501;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  InlineExecutor one;
  const StridedMatrix<float> logits(UniformReals(rng, rows * vocab, -3, 3),
                                    rows, vocab, vocab + 3);
  std::vector<SamplingParams> params;
  for (int64_t r = 0; r < rows; ++r) {
    params.push_back(Params(r % 4 == 0 ? 0.0f : 0.9f, r % 3 * 20,
                            r % 2 == 0 ? 1.0f : 0.9f, rng.Next(),
                            static_cast<uint64_t>(r)));
  }
  Sampler sampler(vocab, 3);
  GuardBuffer<int32_t> inline_tokens(rows), pool_tokens(rows);
  const auto span = [](GuardBuffer<int32_t>& tokens) {
    return absl::Span<int32_t>(tokens.data(),
                               static_cast<size_t>(tokens.size()));
  };
  EXPECT_NO_ALLOCATION(sampler.plan().Execute(
      logits.view(), params, span(inline_tokens), sampler.workspace(), one));
  EXPECT_NO_ALLOCATION(sampler.plan().Execute(
      logits.view(), params, span(pool_tokens), sampler.workspace(), **pool));
  EXPECT_EQ(inline_tokens.ToVector(), pool_tokens.ToVector());
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = logits.view().Row(r);
    EXPECT_EQ(Sample(std::vector<float>(row, row + vocab),
                     params[static_cast<size_t>(r)]),
              inline_tokens[r]);
  }
}

TEST(SamplerTest, TakesExactlyTheWorkspaceThatItAskedFor) {
  const int64_t vocab = 77;
  Sampler sampler(vocab);
  const int64_t bytes = *sampler.plan().WorkspaceBytes(1, 1);
  EXPECT_GE(bytes, 8 * vocab);
  // The workspace ends at a guard page, because its size is a multiple of its
  // alignment.
  GuardBuffer<uint8_t> memory(bytes);
  InlineExecutor executor;
  const std::vector<float> logits(static_cast<size_t>(vocab), 1.0f);
  const SamplingParams params = Params(1.0f, 40, 0.9f);
  int32_t token = 0;
  sampler.plan().Execute(DenseMatrix<const float>(logits.data(), 1, vocab),
                         {&params, 1}, {&token, 1},
                         Workspace(memory.data(), static_cast<size_t>(bytes)),
                         executor);
  EXPECT_EQ(token, sampler.Sample(logits, params));
}

TEST(SamplerTest, DoesNothingWithoutRows) {
  Sampler sampler(3);
  InlineExecutor executor;
  const auto none = DenseMatrix<const float>(nullptr, 0, 3);
  EXPECT_EQ(sampler.plan().CheckArgs(none, {}, {}), absl::OkStatus());
  sampler.plan().Execute(none, {}, {}, sampler.workspace(), executor);
}

void ExpectRefused(const absl::Status& status, const std::string& words) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(SamplerPlanTest, RefusesABadVocab) {
  for (const int64_t vocab : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    SamplerSpec spec;
    spec.vocab = vocab;
    ExpectRefused(SamplerPlan::Create(spec).status(),
                  "sampler: vocab=" + std::to_string(vocab) + "; need 1 <=");
  }
}

TEST(SamplerPlanTest, RefusesNonsenseParams) {
  for (const float t : {-1.0f, -1e-30f, kInf, -kInf, kNaN}) {
    ExpectRefused(SamplerPlan::CheckParams(Params(t)),
                  "need finite temperature >= 0");
  }
  ExpectRefused(SamplerPlan::CheckParams(Params(1.0f, -1)),
                "top_k=-1; need top_k >= 0");
  for (const float p : {0.0f, -0.1f, 1.001f, kInf, kNaN}) {
    ExpectRefused(SamplerPlan::CheckParams(Params(1.0f, 0, p)),
                  "need 0 < top_p <= 1");
  }
  // top_p is checked for greedy sampling too.
  ExpectRefused(SamplerPlan::CheckParams(Params(0.0f, 0, 0.0f)),
                "top_p=0; need 0 < top_p <= 1");
  EXPECT_EQ(SamplerPlan::CheckParams(Params(-0.0f)), absl::OkStatus());
}

TEST(SamplerPlanTest, RefusesBadArguments) {
  const Sampler sampler(3);
  const SamplerPlan& plan = sampler.plan();
  std::vector<float> l(9);
  std::vector<SamplingParams> params(2);
  std::vector<int32_t> tokens(2);
  const auto logits = DenseMatrix<const float>(l.data(), 2, 3);
  EXPECT_EQ(plan.CheckArgs(logits, params, tokens), absl::OkStatus());
  ExpectRefused(
      plan.CheckArgs(DenseMatrix<const float>(l.data(), 2, 4), params, tokens),
      "logits.extent(1)=4; need 3, as vocab");
  ExpectRefused(
      plan.CheckArgs(DenseMatrix<const float>(nullptr, 2, 3), params, tokens),
      "logits is null");
  ExpectRefused(plan.CheckArgs(logits, absl::MakeSpan(params).first(1), tokens),
                "params.size=1; need 2, as rows of logits");
  ExpectRefused(plan.CheckArgs(logits, params, absl::MakeSpan(tokens).first(1)),
                "tokens.size=1; need 2, as rows of logits");
  params[1].top_k = -5;
  ExpectRefused(plan.CheckArgs(logits, params, tokens), "top_k=-5");
}

}  // namespace
}  // namespace quern
