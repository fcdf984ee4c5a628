#include "quern/ops/rope/mrope.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr RotaryStyle kStyles[] = {RotaryStyle::kHalves, RotaryStyle::kPairs};

MropeSpec Spec(std::vector<int64_t> sections, MropeOrder order,
               RotaryStyle style = RotaryStyle::kHalves,
               DType dtype = DType::kF32) {
  MropeSpec spec;
  int64_t pairs = 0;
  for (const int64_t section : sections) pairs += section;
  spec.rotary.head_dim = spec.rotary.rot_dim = 2 * pairs;
  spec.rotary.max_positions = 100;
  spec.rotary.style = style;
  spec.rotary.dtype = dtype;
  spec.sections = std::move(sections);
  spec.order = order;
  return spec;
}

class MropeTest : public IsaTest {
 protected:
  MropePlan Plan(const MropeSpec& spec) {
    auto plan = MropePlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(MropeTest);

// The expected stream and exponent of each pair, written out.
struct Case {
  MropeSpec spec;
  std::vector<size_t> streams;
  std::vector<double> exponents;  // exponents of base
};

std::vector<Case> Cases(RotaryStyle style, DType dtype) {
  const auto over = [](int64_t rot_dim, std::vector<double> js) {
    for (double& j : js) j *= -2.0 / static_cast<double>(rot_dim);
    return js;
  };
  return {
      {Spec({2, 1, 3}, MropeOrder::kContiguous, style, dtype),
       {0, 0, 1, 2, 2, 2},
       over(12, {0, 1, 2, 3, 4, 5})},
      {Spec({0, 2}, MropeOrder::kContiguous, style, dtype),
       {1, 1},
       over(4, {0, 1})},
      // Row pairs are j < 6 with j % 3 == 1, column pairs j < 3 with j % 3 ==
      // 2; the other pairs are time.
      {Spec({4, 2, 1}, MropeOrder::kInterleaved, style, dtype),
       {0, 1, 2, 0, 1, 0, 0},
       over(14, {0, 1, 2, 3, 4, 5, 6})},
      {Spec({3, 3}, MropeOrder::kSplit, style, dtype),
       {0, 0, 0, 1, 1, 1},
       over(6, {0, 1, 2, 0, 1, 2})},
  };
}

TEST_P(MropeTest, TurnsEachPairByItsStream) {
  TestRng rng;
  for (const RotaryStyle style : kStyles) {
    for (const DType dtype : kDTypes) {
      for (const Case& c : Cases(style, dtype)) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " "
                                        << static_cast<int>(c.spec.order));
        const MropePlan plan = Plan(c.spec);
        const int64_t n = c.spec.rotary.rot_dim, tokens = 3, heads = 2;
        const int64_t streams = static_cast<int64_t>(c.spec.sections.size());
        std::vector<int64_t> positions;
        for (int64_t i = 0; i < streams * tokens; ++i) {
          positions.push_back(i * 37 % 100);
        }
        const IndexView at = DenseVector(positions.data(), streams * tokens);
        const AnyMatrix x(
            dtype, ToDoubles(UniformReals(rng, tokens * heads * n, -3, 3)),
            tokens, heads * n, heads * n + 1);
        const AnyMatrix out(dtype, tokens, heads * n, heads * n + 3);
        ASSERT_EQ(
            plan.CheckArgs(at, x.heads(heads, n, n), out.heads(heads, n, n)),
            absl::OkStatus());
        EXPECT_NO_ALLOCATION(plan.Execute(at, x.heads(heads, n, n),
                                          out.heads(heads, n, n), executor_));
        const auto want =
            TurnedBy(x.doubles(), style, n, [&](size_t head, size_t j) {
              const size_t token = head / 2;
              return static_cast<double>(positions[c.streams[j] * 3 + token]) *
                     std::pow(1e4, c.exponents[j]);
            });
        EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double v, int64_t) {
          return TurnedBound(dtype, v);
        }));

        // In place; the key is the first head of each row of k.
        ManyWorkers many(3);
        const AnyMatrix k(dtype, x.doubles(), tokens, heads * n, heads * n);
        ASSERT_EQ(plan.CheckQkArgs(at, x.heads(heads, n, n), k.heads(1, n, n)),
                  absl::OkStatus());
        plan.ExecuteQk(at, x.heads(heads, n, n), k.heads(1, n, n), many);
        EXPECT_EQ(x.bits(), out.bits());
        const auto ks = k.bits(), outs = out.bits();
        for (int64_t i = 0; i < n; ++i) {
          EXPECT_EQ(ks[static_cast<size_t>(2 * heads * n + i)],
                    outs[static_cast<size_t>(2 * heads * n + i)]);
        }
      }
    }
  }
}

// With text all streams agree, and mrope must equal plain rotary embedding.
TEST_P(MropeTest, IsRotaryEmbeddingWhereAllStreamsAgree) {
  TestRng rng;
  for (const RotaryStyle style : kStyles) {
    for (const MropeOrder order :
         {MropeOrder::kContiguous, MropeOrder::kInterleaved}) {
      MropeSpec spec = Spec({16, 24, 24}, order, style, DType::kBF16);
      spec.rotary.head_dim = 131;
      spec.rotary.rot_offset = 2;
      spec.rotary.turn = RotaryTurn::kBackward;
      spec.rotary.scaling.kind = RotaryScalingKind::kLinear;
      spec.rotary.scaling.factor = 3;
      const auto plain = RotaryEmbeddingPlan::Create(spec.rotary);
      ASSERT_TRUE(plain.ok()) << plain.status();
      const std::vector<int32_t> positions = {99, 4, 99, 4, 99, 4};
      const AnyMatrix x(DType::kBF16, ToDoubles(UniformReals(rng, 2 * 131)), 2,
                        131, 131);
      const AnyMatrix out(DType::kBF16, 2, 131, 131);
      const AnyMatrix want(DType::kBF16, 2, 131, 131);
      Plan(spec).Execute(DenseVector(positions.data(), 6), x.heads(1, 131, 131),
                         out.heads(1, 131, 131), executor_);
      plain->Execute(DenseVector(positions.data(), 2), x.heads(1, 131, 131),
                     want.heads(1, 131, 131), executor_);
      EXPECT_EQ(out.bits(), want.bits());
    }
  }
}

TEST(MropePlanTest, Refuses) {
  struct Bad {
    MropeSpec spec;
    std::string words;
  };
  std::vector<Bad> cases = {
      {Spec({2, 2}, MropeOrder::kInterleaved),
       "mrope: there are 2 sections; need 3 to interleave"},
      {Spec({2, 3}, MropeOrder::kSplit),
       "mrope: sections[1]=3; need 2, as the first"},
      {Spec({512, 1}, MropeOrder::kContiguous),
       "mrope: rot_dim=1026; need 2 <= rot_dim <= 1024"},
  };
  cases.push_back({Spec({2, 2}, MropeOrder::kContiguous),
                   "mrope: sections have 3 pairs; need 4"});
  cases.back().spec.sections[1] = 1;
  cases.push_back({Spec({2, 2}, MropeOrder::kContiguous),
                   "mrope: sections[1]=3; need 0 <= section <= 2"});
  cases.back().spec.sections[1] = 3;
  cases.push_back({Spec({2, 2}, MropeOrder::kContiguous),
                   "mrope: max_positions=0; need max_positions >= 1"});
  cases.back().spec.rotary.max_positions = 0;
  for (const Bad& c : cases) {
    const absl::Status status = MropePlan::Create(c.spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status;
  }
  const auto plan = MropePlan::Create(Spec({1, 1}, MropeOrder::kContiguous));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(32);
  const AnyTensorView in(DType::kF32, static_cast<void*>(x.data()), 3,
                         {2, 1, 4}, {4, 4, 1});
  std::vector<int32_t> positions = {0, 1, 2, 100};
  const absl::Status few =
      plan->CheckArgs(DenseVector(positions.data(), 2), in, in);
  EXPECT_NE(few.message().find("positions.size=2"), std::string::npos) << few;
  const absl::Status far =
      plan->CheckArgs(DenseVector(positions.data(), 4), in, in);
  EXPECT_NE(far.message().find("positions[3]=100; need 0 <= position < 100"),
            std::string::npos)
      << far;
  const AnyTensorView one_on(DType::kF32, static_cast<void*>(x.data() + 1), 3,
                             {2, 1, 4}, {4, 4, 1});
  const IndexView at = DenseVector(positions.data(), 4);
  const absl::Status out = plan->CheckArgs(at, in, one_on);
  EXPECT_NE(out.message().find("out overlaps x"), std::string::npos) << out;
  const absl::Status k = plan->CheckQkArgs(at, in, one_on);
  EXPECT_NE(k.message().find("k overlaps q"), std::string::npos) << k;
}

// Without heads there is no memory, and the number of tokens is the caller's.
TEST(MropePlanTest, TakesTokensWithoutHeads) {
  const auto plan =
      MropePlan::Create(Spec({1, 1, 1, 1}, MropeOrder::kContiguous));
  ASSERT_TRUE(plan.ok());
  const auto none = [](int64_t tokens) {
    return AnyTensorView(DType::kF32, static_cast<void*>(nullptr), 3,
                         {tokens, 0, 8}, {8, 8, 1});
  };
  const std::vector<int32_t> positions(8);
  const IndexView at = DenseVector(positions.data(), 8);
  InlineExecutor executor;
  ASSERT_EQ(plan->CheckArgs(at, none(2), none(2)), absl::OkStatus());
  plan->Execute(at, none(2), none(2), executor);
  ASSERT_EQ(plan->CheckQkArgs(at, none(2), none(2)), absl::OkStatus());
  plan->ExecuteQk(at, none(2), none(2), executor);
  // 4 * tokens would overflow to 0.
  constexpr int64_t kMany = int64_t{1} << 62;
  for (const absl::Status& status :
       {plan->CheckArgs(IndexView(), none(kMany), none(kMany)),
        plan->CheckQkArgs(IndexView(), none(kMany), none(kMany))}) {
    EXPECT_NE(status.message().find("mrope: tokens=4611686018427387904; need"),
              std::string::npos)
        << status;
  }
}

}  // namespace
}  // namespace quern
