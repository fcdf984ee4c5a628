#include "quern/ops/speculation/rejection.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/ops/speculation/recovered_tokens.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
constexpr DType kI64 = DType::kI64;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Requests with 2, 0, 3 and 1 drafts, whose rows are filled with -1.
struct Batch {
  explicit Batch(DType dtype, DType lengths = kI64)
      : ids(dtype),
        ends(lengths, {2, 2, 5, 6}),
        drafts(dtype, {10, 11, 12, 13, 14, 15}),
        argmax(dtype, {10, 99, 12, 13, 14, 88}),
        recovered(dtype, {20, 21, 22, 23, 24, 25}),
        bonus(dtype, {70, 71, 72, 73}, 1),
        out(dtype, Values(16, -1), 4, /*gap=*/1) {}

  GreedyRejectionArgs Greedy() const {
    GreedyRejectionArgs args;
    args.output_token_ids = out.view();
    args.cu_num_draft_tokens = ends.view();
    args.draft_token_ids = drafts.view();
    args.target_argmax = argmax.view();
    args.bonus_token_ids = bonus.view();
    return args;
  }

  DType ids;
  Numbers ends, drafts, argmax, recovered, bonus, out;
};

TEST(GreedyRejectionTest, KeepsWhatTheTargetPredicts) {
  for (const DType dtype : {DType::kI32, kI64}) {
    for (const DType lengths : {DType::kI32, kI64}) {
      const Batch batch(dtype, lengths);
      RunPlan<GreedyRejectionPlan>(GreedyRejectionSpec{}, batch.Greedy());
      EXPECT_EQ(batch.out.Read(), (Values{10, 99, -1, -1,     // second rejected
                                          71, -1, -1, -1,     // no drafts
                                          12, 13, 14, 72,     // all accepted
                                          88, -1, -1, -1}));  // none
      EXPECT_TRUE(batch.out.GapsAreIntact());
    }
  }
}

TEST(GreedyRejectionTest, LeavesRequestsOfTheOtherWayAlone) {
  const Batch batch(kI64);
  const Numbers greedy(DType::kU8, {1, 0, 0, 255});
  GreedyRejectionArgs args = batch.Greedy();
  args.is_greedy = greedy.view();
  const Numbers bonus(kI64, {70, 71, 72, 73});  // a vector
  args.bonus_token_ids = bonus.view();
  RunPlan<GreedyRejectionPlan>(GreedyRejectionSpec{3}, args);
  EXPECT_EQ(batch.out.Read(), (Values{10, 99, -1, -1, -1, -1, -1, -1,  //
                                      -1, -1, -1, -1, 88, -1, -1, -1}));
}

// Six tokens with a vocabulary of 16, of which the drafts' probabilities count.
struct Probabilities {
  Probabilities()
      : target(6 * 16), draft(6 * 17), uniform(std::vector<float>(6, 0.5f)) {
    for (int64_t t = 0; t < 6; ++t) {
      for (int64_t v = 0; v < 16; ++v) {
        target.data()[t * 16 + v] = draft.data()[t * 17 + v] = 1.0f / 64;
      }
    }
  }
  void Set(int64_t t, float p, float q) const {
    target.data()[t * 16 + 10 + t] = p;
    draft.data()[t * 17 + 10 + t] = q;
  }
  RandomRejectionArgs Args(const Batch& batch) const {
    RandomRejectionArgs args;
    args.output_token_ids = batch.out.view();
    args.cu_num_draft_tokens = batch.ends.view();
    args.draft_token_ids = batch.drafts.view();
    args.bonus_token_ids = batch.bonus.view();
    args.recovered_token_ids = batch.recovered.view();
    args.target_probs = DenseMatrix(target.data(), 6, 16);
    args.draft_probs =
        MatrixView<float>(draft.data(), {6, 17}, {17, 1});  // wider
    args.uniform_probs = DenseVector(uniform.data(), 6);
    return args;
  }
  mutable GuardBuffer<float> target, draft, uniform;
};

RandomRejectionSpec Vocab(int64_t vocab, bool draft_probs = true,
                          int64_t max_drafts = -1) {
  RandomRejectionSpec spec;
  spec.vocab = vocab;
  spec.draft_probs = draft_probs;
  spec.max_drafts = max_drafts;
  spec.wider = true;
  return spec;
}

TEST(RandomRejectionTest, KeepsWhatIsLikelyEnough) {
  for (const DType dtype : {DType::kI32, kI64}) {
    const Batch batch(dtype);
    const Probabilities probs;
    probs.Set(0, 0.25f, 0.5f);   // the quotient is the bound
    probs.Set(1, 0.249f, 0.5f);  // below it
    probs.Set(2, 0.75f, 0.25f);  // above 1
    probs.Set(3, 0.5f, 0.0f);    // certain not to be drafted
    probs.Set(5, 1.0f, 1.0f);
    RunPlan<RandomRejectionPlan>(Vocab(16, true, 3), probs.Args(batch));
    EXPECT_EQ(batch.out.Read(), (Values{10, 21, -1, -1, 71, -1, -1, -1,  //
                                        12, 23, -1, -1, 15, 73, -1, -1}));
  }
}

TEST(RandomRejectionTest, WithoutDraftProbabilitiesADraftWasCertain) {
  const Batch batch(kI64);
  const Probabilities probs;
  probs.Set(0, 0.5f, 0.0f);
  probs.Set(1, 0.5f, 0.0f);
  probs.Set(2, 0.499f, 0.0f);
  RandomRejectionArgs args = probs.Args(batch);
  args.draft_probs = AnyTensorView();
  const Numbers greedy(DType::kU8, {0, 1, 0, 1});
  args.is_greedy = greedy.view();
  RunPlan<RandomRejectionPlan>(Vocab(16, false), args);
  EXPECT_EQ(batch.out.Read(), (Values{10, 11, 70, -1, -1, -1, -1, -1,  //
                                      22, -1, -1, -1, -1, -1, -1, -1}));
}

TEST(RandomRejectionTest, NanRejectsAndAnUnlikelyDraftNeedsABoundOfZero) {
  const std::vector<std::vector<float>> rejected = {{kNan, 0.5f, 0.0f},
                                                    {0.5f, kNan, 0.5f},
                                                    {0.5f, 0.5f, kNan},
                                                    {0.5f, 0.0f, 0.1f},
                                                    {0.5f, -1.0f, 0.1f}};
  for (const auto& numbers : rejected) {
    const Batch batch(kI64);
    const Probabilities probs;
    probs.Set(5, numbers[0], numbers[1]);
    probs.uniform.data()[5] = numbers[2];
    RunPlan<RandomRejectionPlan>(Vocab(16), probs.Args(batch));
    EXPECT_EQ(batch.out.Read()[12], 25) << numbers[0] << " " << numbers[1];
  }
  // A quotient counts as 0 unless q > 0, which a bound of 0 accepts.
  const std::vector<std::vector<float>> accepted = {
      {0.5f, 0.0f}, {0.5f, -1.0f}, {0.5f, kNan}, {kNan, kNan}, {kNan, 0.0f}};
  for (const auto& numbers : accepted) {
    const Batch batch(kI64);
    const Probabilities probs;
    probs.Set(5, numbers[0], numbers[1]);
    probs.uniform.data()[5] = 0.0f;
    RunPlan<RandomRejectionPlan>(Vocab(16), probs.Args(batch));
    EXPECT_EQ(batch.out.Read()[12], 15) << numbers[0] << " " << numbers[1];
  }
}

TEST(RandomRejectionTest, FlagsAndProbabilitiesLieApartFromTheTokens) {
  const Batch batch(kI64);
  const Probabilities probs;
  const RandomRejectionArgs good = probs.Args(batch);
  const auto refuse = [&](const char* words,
                          AnyTensorView RandomRejectionArgs::*field,
                          DType dtype, int64_t rows, int64_t cols = 0) {
    RandomRejectionArgs args = good;
    args.*field = Alias(good.output_token_ids, dtype, rows, cols);
    ExpectRefusal(StatusOf<RandomRejectionPlan>(Vocab(16), args), words);
  };
  using Args = RandomRejectionArgs;
  refuse("output_token_ids overlaps is_greedy", &Args::is_greedy, DType::kU8,
         4);
  refuse("output_token_ids overlaps uniform_probs", &Args::uniform_probs,
         DType::kF32, 6);
  refuse("output_token_ids overlaps target_probs", &Args::target_probs,
         DType::kF32, 6, 16);
  refuse("output_token_ids overlaps draft_probs", &Args::draft_probs,
         DType::kF32, 6, 17);
}

TEST(RandomRejectionTest, RefusesWhatLeavesATensor) {
  const Probabilities probs;
  const auto refuse = [&](const char* words, int64_t vocab, const Numbers& ends,
                          const Numbers& drafts, int64_t max_drafts = -1) {
    const Batch batch(kI64);
    RandomRejectionArgs args = probs.Args(batch);
    args.cu_num_draft_tokens = ends.view();
    args.draft_token_ids = drafts.view();
    ExpectRefusal(
        StatusOf<RandomRejectionPlan>(Vocab(vocab, true, max_drafts), args),
        words);
  };
  const Values few = {10, 11, 12, 13, 14, 15};
  const auto n = [](const Values& values) { return Numbers(kI64, values); };
  refuse("draft_token_ids[5]=15; need 0 <=", 15, n({2, 2, 5, 6}), n(few));
  refuse("draft_token_ids[1]=-1; need 0 <=", 16, n({2, 2, 5, 6}),
         n({10, -1, 12, 13, 14, 15}));
  refuse("cu_num_draft_tokens[3]=7; need 5 <=", 16, n({2, 2, 5, 7}), n(few));
  refuse("cu_num_draft_tokens[1]=1; need 2 <=", 16, n({2, 1, 5, 6}), n(few));
  refuse("cu_num_draft_tokens[0]=-1; need 0 <=", 16, n({-1, 2, 5, 6}), n(few));
  refuse("gives request 0 4 drafts; need at most 3", 16, n({4, 4, 5, 6}),
         n(few));
  refuse("gives request 2 3 drafts; need at most 2", 16, n({2, 2, 5, 6}),
         n(few), 2);
  refuse("target_probs has 16 columns; need at least vocab=17", 17,
         n({2, 2, 5, 6}), n(few));
  refuse("vocab=0; need 1 <=", 0, n({2, 2, 5, 6}), n(few));
  refuse("draft_token_ids is i32; need i64", 16, n({2, 2, 5, 6}),
         Numbers(DType::kI32, few));
  // Without `wider`, rows have vocab columns.
  {
    const Batch batch(kI64);
    RandomRejectionSpec spec = Vocab(16);
    spec.wider = false;
    ExpectRefusal(StatusOf<RandomRejectionPlan>(spec, probs.Args(batch)),
                  "draft_probs is [6, 17]; need [6, 16]");
  }
  // A draft is not looked up where a request is verified greedily.
  const Batch batch(kI64);
  const Numbers greedy(DType::kU8, {1, 1, 1, 1}), none(kI64, Values(6, -7));
  RandomRejectionArgs args = probs.Args(batch);
  args.is_greedy = greedy.view();
  args.draft_token_ids = none.view();
  EXPECT_EQ(StatusOf<RandomRejectionPlan>(Vocab(16), args), absl::OkStatus());
}

// The largest value that a chi-squared variable of `degrees` degrees exceeds
// with a probability of at most e^-t (Laurent and Massart 2000).
double MostOfChiSquared(double degrees, double t) {
  return degrees + 2 * std::sqrt(degrees * t) + 2 * t;
}

// Where many drafts from one distribution are verified with another, the first
// tokens of the output have the other's.
class DistributionTest : public testing::TestWithParam<bool> {};
TEST_P(DistributionTest, IsTheTargets) {
  const bool draft_probs = GetParam();
  constexpr int64_t kVocab = 21, kTrials = 40000;
  TestRng rng;
  std::vector<double> p(kVocab), q(kVocab);
  const auto draw = [&](std::vector<double>& to) {
    double sum = 0;
    for (double& x : to) sum += x = rng.Uniform(0, 1) * rng.Uniform(0, 1);
    for (double& x : to) x /= sum;
  };
  draw(p);
  draw(q);
  // Without probabilities the draft is always the same.
  const int64_t fixed = 3;
  std::vector<float> target, draft, inv_q, uniform;
  Values ends, ids;
  std::vector<int64_t> drafted(kVocab), seen(kVocab);
  for (int64_t t = 0; t < kTrials; ++t) {
    double u = rng.Uniform(0, 1);
    int64_t id = 0;
    while (id + 1 < kVocab && u >= q[static_cast<size_t>(id)]) {
      u -= q[static_cast<size_t>(id++)];
    }
    if (!draft_probs) id = fixed;
    ids.push_back(id);
    ++drafted[static_cast<size_t>(id)];
    ends.push_back(t + 1);
    uniform.push_back(static_cast<float>(rng.Uniform(0, 1)));
    for (size_t v = 0; v < kVocab; ++v) {
      target.push_back(static_cast<float>(p[v]));
      draft.push_back(static_cast<float>(q[v]));
      inv_q.push_back(
          static_cast<float>(-1 / std::log1p(-rng.Uniform(1e-12, 1))));
    }
  }
  const Numbers cu(kI64, ends), drafts(kI64, ids),
      recovered(kI64, Values(kTrials, -1)), bonus(kI64, Values(kTrials, 0)),
      out(kI64, Values(2 * kTrials, -1), 2);
  RecoveredTokensArgs recover;
  recover.output_token_ids = recovered.view();
  recover.cu_num_draft_tokens = cu.view();
  recover.draft_token_ids = drafts.view();
  recover.target_probs = DenseMatrix(target.data(), kTrials, kVocab);
  recover.inv_q = DenseMatrix(inv_q.data(), kTrials, kVocab);
  if (draft_probs) {
    recover.draft_probs = DenseMatrix(draft.data(), kTrials, kVocab);
  }
  RecoveredTokensSpec spec;
  spec.vocab = kVocab;
  spec.draft_probs = draft_probs;
  RunPlan<RecoveredTokensPlan>(spec, recover);
  RandomRejectionArgs args;
  args.output_token_ids = out.view();
  args.cu_num_draft_tokens = cu.view();
  args.draft_token_ids = drafts.view();
  args.bonus_token_ids = bonus.view();
  args.recovered_token_ids = recovered.view();
  args.target_probs = recover.target_probs;
  args.draft_probs = recover.draft_probs;
  args.uniform_probs = DenseVector(uniform.data(), kTrials);
  RunPlan<RandomRejectionPlan>(Vocab(kVocab, draft_probs), args);

  const Values tokens = out.Read();
  for (int64_t t = 0; t < kTrials; ++t) {
    ++seen[static_cast<size_t>(tokens[static_cast<size_t>(2 * t)])];
  }
  const auto chi_squared = [&](const std::vector<int64_t>& counts) {
    double sum = 0;
    for (size_t v = 0; v < kVocab; ++v) {
      const double want = kTrials * p[v];
      const double more = static_cast<double>(counts[v]) - want;
      sum += more * more / want;
    }
    return sum;
  };
  // One run in 10^9 has more.
  const double most = MostOfChiSquared(kVocab - 1, 9 * std::log(10.0));
  EXPECT_LT(chi_squared(seen), most);
  // The drafts themselves are told apart.
  EXPECT_GT(chi_squared(drafted), 2 * most);
}
INSTANTIATE_TEST_SUITE_P(All, DistributionTest, testing::Bool());

TEST(ExpandTest, GivesEachTokenTheNumberOfItsRequest) {
  for (const DType dtype : {DType::kI32, kI64}) {
    const Numbers ends(kI64, {2, 2, 5}), in(dtype, {7, 8, -3}),
        out(dtype, Values(6, 1));
    RunPlan<ExpandPlan>(ExpandSpec{-3, 5},
                        ExpandArgs{out.view(), in.view(), ends.view()});
    EXPECT_EQ(out.Read(), (Values{7, 7, 5, 5, 5, 1}));
  }
  const Numbers ends(DType::kI32, {1, 3});
  GuardBuffer<float> in(std::vector<float>{0.0f, kNan});
  GuardBuffer<float> out(3);
  RunPlan<ExpandPlan>(ExpandSpec{0, 1},
                      ExpandArgs{DenseVector(out.data(), 3),
                                 DenseVector(in.data(), 2), ends.view()});
  EXPECT_EQ(out.data()[0], 1.0f);
  EXPECT_TRUE(std::isnan(out.data()[1]) && std::isnan(out.data()[2]));
}

// 2^32 + 7 is not a number of i32, and its low bits are 7.
TEST(ExpandTest, ANumberThatTheTypeDoesNotHoldReplacesNothing) {
  const Numbers ends(kI64, {2, 4}), in(DType::kI32, {7, 8}),
      out(DType::kI32, {0, 0, 0, 0});
  RunPlan<ExpandPlan>(ExpandSpec{(int64_t{1} << 32) + 7, 5},
                      ExpandArgs{out.view(), in.view(), ends.view()});
  EXPECT_EQ(out.Read(), (Values{7, 7, 8, 8}));
}

TEST(ExpandTest, FloatsLieApart) {
  const Numbers ends(kI64, {1, 2});
  GuardBuffer<float> out(2);
  ExpandArgs args;
  args.output = DenseVector(out.data(), 2);
  args.input = args.output;
  args.cu_num_tokens = ends.view();
  ExpectRefusal(StatusOf<ExpandPlan>(ExpandSpec{}, args),
                "output overlaps input");
}

TEST(ExpandTest, Refuses) {
  const Numbers ends(kI64, {2, 4}), in(DType::kI32, {7, 8}),
      out(DType::kI32, {0, 0, 0, 0});
  const ExpandArgs args = {out.view(), in.view(), ends.view()};
  ExpectRefusal(StatusOf<ExpandPlan>(ExpandSpec{0, int64_t{1} << 31}, args),
                "replace_to=2147483648; need");
  ExpectRefusal(
      StatusOf<ExpandPlan>(ExpandSpec{0, -(int64_t{1} << 31) - 1}, args),
      "replace_to=-2147483649; need");
  const Numbers more(kI64, {2, 5}), back(kI64, {2, 1}), other(kI64, {7, 8});
  ExpectRefusal(
      StatusOf<ExpandPlan>(ExpandSpec{},
                           ExpandArgs{out.view(), in.view(), more.view()}),
      "cu_num_tokens[1]=5; need 2 <= cu_num_tokens[i] <= 4");
  ExpectRefusal(
      StatusOf<ExpandPlan>(ExpandSpec{},
                           ExpandArgs{out.view(), in.view(), back.view()}),
      "cu_num_tokens[1]=1; need 2 <=");
  ExpectRefusal(
      StatusOf<ExpandPlan>(ExpandSpec{},
                           ExpandArgs{out.view(), other.view(), ends.view()}),
      "output is i32; need i64");
}

}  // namespace
}  // namespace quern
