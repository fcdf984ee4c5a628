#include "quern/ops/moe/router.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/moe/reference_router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/moe/router_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/sanitized.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr RouterScore kScores[] = {RouterScore::kSoftmax, RouterScore::kSigmoid,
                                   RouterScore::kSqrtSoftplus};

// Whether item i of many is left out, where each takes several times as long.
bool Skipped(int64_t i) { return (kSanitized || QuickTests()) && i % 3 != 1; }

class RouterTest : public RouterFixture {};
QUERN_INSTANTIATE_ISA_TEST(RouterTest);

TEST_P(RouterTest, IsExactWhereScoresAre) {
  // Equal logits: 1 / 2^n each, or 1 / k. Sums of few powers of two are exact.
  RouterSpec spec = MakeRouterSpec(64, 4);
  spec.scale = 2.5f;
  const std::vector<double> equal(64, -3.0);
  EXPECT_EQ(Run(spec, equal).weights, std::vector<float>(4, 2.5f / 64));
  spec.renormalize = true;
  EXPECT_EQ(Run(spec, equal).weights, std::vector<float>(4, 0.625f));
  EXPECT_EQ(Run(spec, equal).ids, (std::vector<int32_t>{0, 1, 2, 3}));
  // One expert takes all: the others are e^-200 of it.
  spec = MakeRouterSpec(33, 3);
  std::vector<double> one(33);
  one[20] = 200;
  EXPECT_EQ(Run(spec, one).weights, (std::vector<float>{1, 0, 0}));
  EXPECT_EQ(Run(spec, one).ids, (std::vector<int32_t>{20, 0, 1}));
  // A sigmoid of 0 is 1 / 2, of 100 is 1 and of -200 is 0.
  spec = MakeRouterSpec(3, 3, RouterScore::kSigmoid);
  EXPECT_EQ(Run(spec, {-200, 100, 0}).weights,
            (std::vector<float>{1, 0.5f, 0}));
  EXPECT_EQ(Run(spec, {-200, 100, 0}).ids, (std::vector<int32_t>{1, 2, 0}));
  // sqrt(softplus(100)) is 10.
  spec = MakeRouterSpec(2, 1, RouterScore::kSqrtSoftplus);
  EXPECT_EQ(Run(spec, {-5, 100}).weights, std::vector<float>{10});
}

TEST_P(RouterTest, TiesGoToTheLowerExpert) {
  TestRng rng;
  for (int64_t experts = 1; experts <= 130; ++experts) {
    if (Skipped(experts)) continue;
    for (const int64_t k : {1, 2, 7, 8, 16, 33}) {
      if (k > experts) continue;
      RouterSpec spec = MakeRouterSpec(experts, k, RouterScore::kSigmoid);
      spec.logits_dtype = kDTypes[experts % 3];
      Compare(spec, ToDoubles(SmallIntegers(rng, 2 * experts, -1, 1)));
      Compare(spec, std::vector<double>(static_cast<size_t>(experts), 1.5));
    }
  }
}

// -0 and +0 are equal numbers.
TEST_P(RouterTest, ZerosOfBothSignsTie) {
  const RouterSpec spec = MakeRouterSpec(4, 4, RouterScore::kSigmoid);
  EXPECT_EQ(Run(spec, {-0.0, 0.0, -0.0, 0.0}).ids,
            (std::vector<int32_t>{0, 1, 2, 3}));
}

// Without a bias the order of logits decides, exactly: two that differ in the
// last bit have the same sigmoid, and the larger is chosen all the same.
TEST_P(RouterTest, TheLogitsDecideWithoutABias) {
  const double larger = 20 + 0x1p-19;
  for (const RouterScore score : kScores) {
    RouterSpec spec = MakeRouterSpec(3, 2, score);
    EXPECT_EQ(Run(spec, {20, larger, 3}).ids, (std::vector<int32_t>{1, 0}));
  }
}

TEST_P(RouterTest, AgreesWithTheReferenceForEveryNumberOfExperts) {
  TestRng rng;
  std::vector<int64_t> all(130);
  std::iota(all.begin(), all.end(), 1);
  for (const int64_t e : {160, 255, 256, 384, 511, 512, 1000, 1023, 1024}) {
    all.push_back(e);
  }
  for (const int64_t experts : all) {
    if (experts < 1000 && Skipped(experts)) continue;
    for (const int64_t k : {1, 2, 5, 8, 16, 22, 64}) {
      if (k > experts) continue;
      RouterSpec spec =
          MakeRouterSpec(experts, k, kScores[experts % 3], experts % 4 >= 2);
      spec.logits_dtype = kDTypes[experts % 2 == 0 ? 0 : experts % 3];
      spec.scale = experts % 5 == 0 ? 2.5f : 1.0f;
      Compare(spec, Rounded(rng, spec.logits_dtype, 3 * experts, -9, 9));
    }
  }
}

// Orders of values that leave many above the first bound that narrows them.
TEST_P(RouterTest, ChoosesFromAnyOrderOfValues) {
  TestRng rng;
  for (const int64_t experts : {33, 64, 200, 512, 1024}) {
    std::vector<double> up(static_cast<size_t>(experts));
    std::iota(up.begin(), up.end(), -100.0);
    std::vector<double> down(up.rbegin(), up.rend());
    std::vector<double> mixed = up;
    rng.Shuffle(mixed);
    std::vector<std::vector<double>> rows = {up, down, mixed};
    for (const size_t columns : {16, 32, 64, 128}) {
      for (const size_t high : {1, 7, 15, 31}) {
        // Few columns have all that is large.
        std::vector<double> row;
        for (size_t e = 0; e < up.size(); ++e) {
          row.push_back(e % columns < high ? 500 + mixed[e] : mixed[e]);
        }
        rows.push_back(row);
        for (double& l : row) l = l > 400 ? 500 : 0;
        rows.push_back(row);
      }
    }
    for (const int64_t k : {1, 7, 8, 9, 16, 33, 64}) {
      if (k > experts) continue;
      for (const auto& row : rows) {
        Compare(MakeRouterSpec(experts, k, RouterScore::kSigmoid), row);
      }
    }
  }
}

TEST_P(RouterTest, TheBiasChoosesAndDoesNotWeigh) {
  // The second has the larger score, the first the larger sum.
  RouterSpec spec = MakeRouterSpec(2, 1, RouterScore::kSigmoid);
  spec.biased = true;
  const Routes routes = Run(spec, {0, 100}, {1, 0.25});
  EXPECT_EQ(routes.ids, std::vector<int32_t>{0});
  EXPECT_EQ(routes.weights, std::vector<float>{0.5f});

  TestRng rng;
  for (const int64_t experts : {1, 2, 15, 16, 17, 33, 64, 129, 384, 512}) {
    for (const int64_t k : {1, 8, 22}) {
      if (k > experts) continue;
      for (const RouterScore score : kScores) {
        for (const DType dtype : kDTypes) {
          spec = MakeRouterSpec(experts, k, score, k == 8);
          spec.biased = true;
          spec.logits_dtype = dtype;
          spec.bias_dtype = dtype == DType::kF32    ? DType::kF32
                            : dtype == DType::kBF16 ? DType::kF16
                                                    : DType::kBF16;
          spec.scale = 1.5f;
          std::vector<double> logits, bias;
          Draw(rng, spec, logits, bias);
          Compare(spec, logits, bias);
        }
      }
    }
  }
}

// The shapes by which others test theirs, and groups of every remainder.
TEST_P(RouterTest, ChoosesWithinTheBestGroups) {
  struct Shape {
    int64_t experts, top_k, groups, top_groups;
  };
  TestRng rng;
  std::vector<Shape> shapes = {
      {16, 2, 8, 2},   {128, 2, 8, 2},   {256, 8, 8, 4},    {384, 8, 1, 1},
      {512, 22, 1, 1}, {160, 6, 8, 3},   {1024, 8, 512, 9}, {64, 8, 32, 4},
      {40, 8, 4, 4},   {1024, 64, 2, 1},
  };
  for (int64_t size = 2; size <= 35; ++size) {
    shapes.push_back({3 * size, 2, 3, 2});
    shapes.push_back({5 * size, 2 * size, 5, 2});
  }
  for (const Shape& s : shapes) {
    if (s.top_k > RouterSpec::kMaxTopK) continue;
    for (const bool biased : {false, true}) {
      for (const RouterScore score : kScores) {
        RouterSpec spec =
            MakeRouterSpec(s.experts, s.top_k, score, s.experts % 2 == 0);
        spec.groups = s.groups;
        spec.top_groups = s.top_groups;
        spec.biased = biased;
        spec.scale = 2.5f;
        std::vector<double> logits, bias;
        Draw(rng, spec, logits, bias);
        Compare(spec, logits, bias);
      }
    }
  }
}

TEST_P(RouterTest, EqualGroupsAndSinglesTieToTheLower) {
  RouterSpec spec = MakeRouterSpec(12, 3, RouterScore::kSigmoid);
  spec.groups = 4;
  spec.top_groups = 2;
  EXPECT_EQ(Run(spec, std::vector<double>(12)).ids,
            (std::vector<int32_t>{0, 1, 2}));
  // Groups 1 and 3 have the largest, and so the only ones.
  EXPECT_EQ(Run(spec, {0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 9}).ids,
            (std::vector<int32_t>{4, 11, 3}));
  // With a bias pairs count: 5 + 5 of group 2 is more than 9 + 0.
  spec.biased = true;
  spec.top_groups = 1;
  EXPECT_EQ(
      Run(spec, std::vector<double>(12), {0, 0, 0, 0, 9, 0, 5, 0, 5, 0, 0, 9})
          .ids,
      (std::vector<int32_t>{6, 8, 7}));
}

// Computed elsewhere, in f32; 7 digits.
TEST_P(RouterTest, ReproducesTheGoldenVectors) {
  const std::vector<double> logits = {0.3f,  -1.2f, 2.1f, 0.7f,
                                      -0.4f, 1.5f,  0.2f, 1.1f};
  const std::vector<double> bias = {0.1f, 0.9f,  -0.5f, 0.2f,
                                    0.6f, -0.3f, 0.05f, 0.0f};
  const auto expect = [&](const RouterSpec& spec,
                          const std::vector<int32_t>& ids,
                          const std::vector<double>& weights) {
    const Routes got = Run(spec, logits, bias);
    EXPECT_EQ(got.ids, ids);
    EXPECT_TRUE(AllClose(got.weights, weights, 4e-7));
  };
  RouterSpec spec = MakeRouterSpec(8, 3, RouterScore::kSigmoid, true);
  spec.groups = 4;
  spec.top_groups = 2;
  spec.biased = true;
  spec.scale = 2.5f;
  expect(spec, {1, 4, 0}, {.4793519, .8310602, 1.1895878});
  spec.score = RouterScore::kSoftmax;
  spec.renormalize = false;
  spec.scale = 1.0f;
  expect(spec, {1, 4, 0}, {.0142015, .0316061, .0636469});
  spec.biased = false;
  expect(spec, {2, 5, 3}, {.3850414, .2113152, .0949500});
}

// One expert, so that each of the 65536 codes is a token of its own.
TEST_P(RouterTest, ScoresAreWithinTheirBoundsForEveryLogit) {
  for (const RouterScore score :
       {RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      RouterSpec spec = MakeRouterSpec(1, 1, score);
      spec.logits_dtype = dtype;
      std::vector<double> logits;
      WithType(dtype, [&](auto type) {
        for (uint32_t code = 0; code < 65536; ++code) {
          if (Skipped(code)) continue;
          logits.push_back(ToDouble(FromBits<decltype(type)>(code)));
        }
      });
      Compare(spec, logits);
    }
  }
}

// The softmax's e^-d for d up to where it vanishes.
TEST_P(RouterTest, SoftmaxIsWithinItsBoundForEveryDifference) {
  const RouterSpec spec = MakeRouterSpec(2, 2);
  std::vector<double> logits;
  for (double d = 0; d < 130; d += 0.01) {
    const float low = static_cast<float>(3 - d);
    logits.push_back(3);
    logits.push_back(double{low});
  }
  Compare(spec, logits);
}

TEST_P(RouterTest, DependsNeitherOnWorkersNorOnTheBatch) {
  TestRng rng;
  const auto pool = Workers(3);
  for (const DType dtype : kDTypes) {
    RouterSpec spec = MakeRouterSpec(129, 8, RouterScore::kSigmoid, true);
    spec.logits_dtype = dtype;
    spec.biased = true;
    const RouterPlan plan = Plan(spec);
    const AnyMatrix bias(DType::kF32, Rounded(rng, DType::kF32, 129, -1, 1), 1,
                         129, 129);
    for (const int64_t tokens : {1, 2, 31, 32, 33, 100}) {
      const AnyMatrix logits(dtype, Rounded(rng, dtype, tokens * 129, -6, 6),
                             tokens, 129, 131);
      StridedMatrix<float> weights(tokens, 8, 8), again(tokens, 8, 8);
      StridedMatrix<int32_t> ids(tokens, 8, 8), ids_again(tokens, 8, 8);
      EXPECT_NO_ALLOCATION(plan.Execute(logits.view(), bias.vector(),
                                        weights.view(), ids.view(), *pool));
      const auto* first = static_cast<const char*>(logits.view().data());
      for (int64_t t = 0; t < tokens; ++t) {
        const char* row = first + t * 131 * static_cast<int64_t>(SizeOf(dtype));
        const AnyTensorView one(dtype, static_cast<const void*>(row), 2,
                                {1, 129}, {131, 1});
        EXPECT_NO_ALLOCATION(plan.Execute(
            one, bias.vector(), DenseMatrix(again.view().Row(t), 1, 8),
            DenseMatrix(ids_again.view().Row(t), 1, 8), executor_));
      }
      EXPECT_TRUE(AllBitsEqual(weights.ToDense(), again.ToDense()));
      EXPECT_EQ(ids.ToDense(), ids_again.ToDense());
    }
  }
}

}  // namespace
}  // namespace quern
