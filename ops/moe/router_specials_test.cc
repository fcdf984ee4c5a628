// What a router does with numbers that are none, with bad values and with bad
// arguments.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/moe/router_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr RouterScore kScores[] = {RouterScore::kSoftmax, RouterScore::kSigmoid,
                                   RouterScore::kSqrtSoftplus};

class RouterSpecialsTest : public RouterFixture {};
QUERN_INSTANTIATE_ISA_TEST(RouterSpecialsTest);

TEST_P(RouterSpecialsTest, NaNAndInfinityAreOrderedAsTheHeaderSays) {
  const struct {
    std::vector<double> logits;
    std::vector<int32_t> ids;
    std::vector<float> weights;  // of a softmax
  } cases[] = {
      {{kNaN, kNaN, kNaN, kNaN}, {0, 1}, {0.25f, 0.25f}},
      {{-kInf, kNaN, -kInf, kNaN}, {0, 1}, {0.25f, 0.25f}},
      {{kNaN, -3, kNaN, kNaN}, {1, 0}, {1, 0}},
      {{kNaN, kNaN, kInf, 5}, {2, 3}, {1, 0}},
      {{1, kInf, 2, kInf}, {1, 3}, {0.5f, 0.5f}},
      {{-kInf, 0, -kInf, 0}, {1, 3}, {0.5f, 0.5f}},
      {{kInf, kNaN, -kInf, kInf}, {0, 3}, {0.5f, 0.5f}},
  };
  for (const auto& c : cases) {
    const Routes got = Run(MakeRouterSpec(4, 2), c.logits);
    EXPECT_EQ(got.ids, c.ids) << testing::PrintToString(c.logits);
    EXPECT_EQ(got.weights, c.weights) << testing::PrintToString(c.logits);
  }
}

// The scores of a row without a number are 0, and so is their sum.
TEST_P(RouterSpecialsTest, AVanishingSumLeavesZeros) {
  for (const RouterScore score :
       {RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    const Routes got =
        Run(MakeRouterSpec(3, 2, score, true), {kNaN, -kInf, kNaN});
    EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(got.weights, (std::vector<float>{0, 0}));
  }
}

// Experts of the best groups come before all others, even if they have no
// number.
TEST_P(RouterSpecialsTest, NaNOfABestGroupIsStillInIt) {
  RouterSpec spec = MakeRouterSpec(6, 2, RouterScore::kSigmoid);
  spec.groups = 3;
  spec.top_groups = 1;
  EXPECT_EQ(Run(spec, {1, 2, 3, kNaN, 2, 2.5}).ids,
            (std::vector<int32_t>{2, 3}));
}

TEST_P(RouterSpecialsTest, AnyBitsGiveDistinctIdsInRangeAndFiniteWeights) {
  TestRng rng;
  std::vector<double> pool = {0, 1, -1, 80, -80, 1e38, -1e38, 1e-40};
  for (int i = 0; i < 4; ++i) {
    for (const double x : {kNaN, kInf, -kInf}) pool.push_back(x);
  }
  for (const int64_t experts : {1, 2, 16, 33, 64, 256, 512}) {
    for (const RouterScore score : kScores) {
      for (const bool biased : {false, true}) {
        for (const int64_t groups : {1, 2, 8}) {
          RouterSpec spec = MakeRouterSpec(
              experts, std::min<int64_t>(experts, 8), score, experts % 3 == 0);
          if (experts / groups < 2 && groups > 1) continue;
          spec.groups = groups;
          spec.top_groups = (groups + 1) / 2;
          spec.top_k =
              std::min(spec.top_k, spec.top_groups * spec.GroupExperts());
          spec.biased = biased;
          if (experts % groups != 0) continue;
          const auto logits = ChosenFrom(rng, 20 * experts, pool);
          const auto bias = ChosenFrom(rng, experts, pool);
          const Routes got = Run(spec, logits, bias);
          const auto k = static_cast<size_t>(spec.top_k);
          for (size_t t = 0; t < 20; ++t) {
            std::set<int32_t> distinct;
            for (size_t j = t * k; j < (t + 1) * k; ++j) {
              EXPECT_TRUE(0 <= got.ids[j] && got.ids[j] < experts);
              distinct.insert(got.ids[j]);
              EXPECT_TRUE(std::isfinite(got.weights[j])) << got.weights[j];
              EXPECT_GE(got.weights[j], 0.0f);
            }
            EXPECT_EQ(distinct.size(), k);
          }
          // Scores without a rounding that could decide.
          if (!biased) Compare(spec, logits);
        }
      }
    }
  }
}

TEST_P(RouterSpecialsTest, ABiasThatIsNoNumberIsTheLowest) {
  RouterSpec spec = MakeRouterSpec(5, 4, RouterScore::kSigmoid);
  spec.biased = true;
  // c is the lowest number, the highest, 0.5, the lowest and 1.5.
  const Routes got = Run(spec, {0, 0, 0, 0, 0}, {kNaN, kInf, 0, -kInf, 1});
  EXPECT_EQ(got.ids, (std::vector<int32_t>{1, 4, 2, 0}));
  EXPECT_EQ(got.weights, std::vector<float>(4, 0.5f));
}

TEST_P(RouterSpecialsTest, NoTokensAreNothingAndOneHasAnyStride) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const RouterPlan plan = Plan(MakeRouterSpec(4, 2));
  const MatrixView<const float> none(nullptr, {0, 4}, {kHuge, 1});
  const MatrixView<float> no_weights(nullptr, {0, 2}, {kHuge, 1});
  const MatrixView<int32_t> no_ids(nullptr, {0, 2}, {kHuge, 1});
  ASSERT_EQ(plan.CheckArgs(none, AnyTensorView(), no_weights, no_ids),
            absl::OkStatus());
  plan.Execute(none, AnyTensorView(), no_weights, no_ids, executor_);

  const std::vector<float> l = {0, 0, 9, 0};
  float weights[2];
  int32_t ids[2];
  const MatrixView<const float> row(l.data(), {1, 4}, {kHuge, 1});
  const MatrixView<float> to(weights, {1, 2}, {kHuge, 1});
  const MatrixView<int32_t> to_ids(ids, {1, 2}, {-kHuge, 1});
  ASSERT_EQ(plan.CheckArgs(row, AnyTensorView(), to, to_ids), absl::OkStatus());
  plan.Execute(row, AnyTensorView(), to, to_ids, executor_);
  EXPECT_EQ(ids[0], 2);
  EXPECT_EQ(ids[1], 0);
}

TEST(RouterPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  struct Case {
    void (*spoil)(RouterSpec&);
    absl::StatusCode code;
    std::string words;
  };
  const Case cases[] = {
      {[](RouterSpec& s) { s.experts = 0; }, kInvalid,
       "router: experts=0; need 1 <= experts <= 1024"},
      {[](RouterSpec& s) { s.experts = 1025; }, kInvalid, "experts=1025"},
      {[](RouterSpec& s) { s.top_k = 0; }, kInvalid,
       "router: top_k=0; need 1 <= top_k <= 8"},
      {[](RouterSpec& s) { s.top_k = 9; }, kInvalid, "top_k=9; need 1 <= "},
      {[](RouterSpec& s) {
         s.experts = 128, s.groups = 1, s.top_groups = 1, s.top_k = 65;
       },
       kInvalid, "top_k=65; need 1 <= top_k <= 64"},
      {[](RouterSpec& s) { s.groups = 0; }, kInvalid, "groups=0; need 1 <= "},
      {[](RouterSpec& s) { s.groups = 3; }, kInvalid,
       "router: groups=3; need a divisor of experts=16"},
      {[](RouterSpec& s) { s.top_groups = 0; }, kInvalid, "top_groups=0"},
      {[](RouterSpec& s) { s.top_groups = 5; }, kInvalid,
       "top_groups=5; need 1 <= top_groups <= 4"},
      {[](RouterSpec& s) { s.groups = s.top_groups = 16, s.biased = true; },
       kInvalid, "groups=16 of experts=16; with a bias, need 2 experts in a"},
      {[](RouterSpec& s) { s.scale = 0; }, kInvalid, "need finite scale > 0"},
      {[](RouterSpec& s) { s.scale = -1; }, kInvalid, "scale=-1"},
      {[](RouterSpec& s) { s.scale = std::nanf(""); }, kInvalid, "scale=nan"},
      {[](RouterSpec& s) { s.scale = HUGE_VALF; }, kInvalid, "scale=inf"},
      {[](RouterSpec& s) { s.logits_dtype = DType::kI32; },
       absl::StatusCode::kUnimplemented,
       "router: logits_dtype is i32; need f32 or bf16 or f16"},
      {[](RouterSpec& s) { s.bias_dtype = DType::kI8; },
       absl::StatusCode::kUnimplemented, "bias_dtype is i8"},
  };
  for (const Case& c : cases) {
    RouterSpec spec = MakeRouterSpec(16, 2);
    spec.groups = 4;
    spec.top_groups = 2;
    ASSERT_TRUE(RouterPlan::Create(spec).ok());
    c.spoil(spec);
    ExpectRefusal(RouterPlan::Create(spec).status(), c.code, c.words);
  }
}

TEST(RouterPlanTest, RefusesBadArguments) {
  RouterSpec spec = MakeRouterSpec(4, 2);
  spec.biased = true;
  const auto biased = RouterPlan::Create(spec);
  spec.biased = false;
  const auto plain = RouterPlan::Create(spec);
  ASSERT_TRUE(biased.ok() && plain.ok());
  std::vector<float> l(8), b(4), w(8);
  std::vector<int32_t> i(8);
  std::vector<uint16_t> half(8);
  const AnyTensorView logits = DenseMatrix<const float>(l.data(), 2, 4);
  const AnyTensorView bias = DenseVector<const float>(b.data(), 4);
  const auto weights = DenseMatrix(w.data(), 2, 2);
  const auto ids = DenseMatrix(i.data(), 2, 2);
  EXPECT_EQ(biased->CheckArgs(logits, bias, weights, ids), absl::OkStatus());
  EXPECT_EQ(plain->CheckArgs(logits, AnyTensorView(), weights, ids),
            absl::OkStatus());
  const AnyTensorView bf16(DType::kBF16, static_cast<const void*>(half.data()),
                           2, {2, 4}, {4, 1});
  const MatrixView<float> overlapping_w(w.data(), {2, 2}, {1, 1});
  const MatrixView<float> onto_logits(l.data(), {2, 2}, {4, 1});
  const MatrixView<float> onto_bias(b.data(), {2, 2}, {2, 1});
  const MatrixView<int32_t> onto_weights(reinterpret_cast<int32_t*>(w.data()),
                                         {2, 2}, {2, 1});
  const AnyTensorView short_bias = DenseVector<const float>(b.data(), 3);
  const auto three = DenseMatrix(w.data(), 2, 3);
  const struct {
    absl::Status status;
    const char* words;
  } cases[] = {
      {biased->CheckArgs(bf16, bias, weights, ids), "logits is bf16; need f32"},
      {biased->CheckArgs(DenseMatrix<const float>(l.data(), 4, 2), bias,
                         weights, ids),
       "logits is [4, 2]; need [any, 4]"},
      {biased->CheckArgs(logits, AnyTensorView(), weights, ids), "bias"},
      {biased->CheckArgs(logits, short_bias, weights, ids),
       "bias is [3]; need [4]"},
      {plain->CheckArgs(logits, bias, weights, ids),
       "router: bias is given; need none"},
      {biased->CheckArgs(logits, bias, three, ids),
       "weights is [2, 3]; need [2, 2]"},
      {biased->CheckArgs(logits, bias, weights, DenseMatrix(i.data(), 1, 2)),
       "ids is [1, 2]; need [2, 2]"},
      {biased->CheckArgs(logits, bias, overlapping_w, ids), "weights"},
      {biased->CheckArgs(logits, bias, onto_logits, ids), "weights overlaps"},
      {biased->CheckArgs(logits, bias, onto_bias, ids), "weights overlaps"},
      {biased->CheckArgs(logits, bias, weights, onto_weights), "overlaps"},
      {biased->CheckArgs(logits, bias, DenseMatrix<float>(nullptr, 2, 2), ids),
       "weights"},
  };
  for (const auto& c : cases) ExpectRefusal(c.status, c.words);
}

}  // namespace
}  // namespace quern
