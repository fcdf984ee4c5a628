#include "quern/ops/rope/rotary_embedding.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_tables.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_rope.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr RotaryStyle kStyles[] = {RotaryStyle::kHalves, RotaryStyle::kPairs};

RotaryEmbeddingSpec Spec(int64_t head_dim, int64_t rot_dim,
                         RotaryStyle style = RotaryStyle::kHalves,
                         DType dtype = DType::kF32) {
  RotaryEmbeddingSpec spec;
  spec.head_dim = head_dim;
  spec.rot_dim = rot_dim;
  spec.max_positions = 300;
  spec.style = style;
  spec.dtype = dtype;
  return spec;
}

std::vector<double> Reference(const RotaryEmbeddingSpec& spec,
                              const std::vector<double>& x,
                              const std::vector<int64_t>& positions,
                              int64_t heads) {
  return ReferenceRope(
      x, positions, heads, spec.head_dim, spec.rot_dim, spec.base,
      spec.style == RotaryStyle::kHalves ? ReferenceRopeStyle::kNeox
                                         : ReferenceRopeStyle::kInterleaved);
}

// The elements of [tokens, heads, head_dim], whose heads are head_stride apart,
// and the gaps between the heads.
struct Heads {
  std::vector<double> elements;
  std::vector<double> gaps;
};
Heads Split(const AnyMatrix& m, int64_t head_dim, int64_t head_stride) {
  Heads heads;
  const auto all = m.doubles();
  const int64_t cols = m.view().extent(1);
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) % cols % head_stride;
    (at < head_dim ? heads.elements : heads.gaps).push_back(all[i]);
  }
  return heads;
}

class RotaryEmbeddingTest : public IsaTest {
 protected:
  RotaryEmbeddingPlan Plan(const RotaryEmbeddingSpec& spec) {
    auto plan = RotaryEmbeddingPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(RotaryEmbeddingTest);

TEST_P(RotaryEmbeddingTest, IsTheIdentityAtPositionZero) {
  TestRng rng;
  for (const RotaryStyle style : kStyles) {
    for (const DType dtype : kDTypes) {
      const RotaryEmbeddingPlan plan = Plan(Spec(34, 34, style, dtype));
      const AnyMatrix x(dtype, ToDoubles(UniformReals(rng, 2 * 34)), 2, 34, 34);
      const AnyMatrix out(dtype, 2, 34, 34);
      const std::vector<int32_t> positions = {0, 0};
      plan.Execute(DenseVector(positions.data(), 2), x.heads(1, 34, 34),
                   out.heads(1, 34, 34), executor_);
      EXPECT_TRUE(AllEqual(out.doubles(), x.doubles()));
    }
  }
}

// A range at the end of a head is rotated as a range at its start, and
// kBackward undoes the rotation.
TEST_P(RotaryEmbeddingTest, TurnsAnyRangeOfAHeadAndBack) {
  TestRng rng;
  const std::vector<int32_t> positions = {5, 299};
  const IndexView at = DenseVector(positions.data(), 2);
  for (const RotaryStyle style : kStyles) {
    const int64_t head_dim = 37, rot_dim = 14;
    RotaryEmbeddingSpec spec = Spec(head_dim, rot_dim, style);
    spec.rot_offset = head_dim - rot_dim;
    spec.scaling.kind = RotaryScalingKind::kYarn;
    spec.scaling.factor = 4;
    spec.scaling.original = 64;
    const RotaryEmbeddingPlan plan = Plan(spec);
    const AnyMatrix x(DType::kF32, ToDoubles(UniformReals(rng, 2 * head_dim)),
                      2, head_dim, head_dim);
    const AnyMatrix out(DType::kF32, 2, head_dim, head_dim);
    const AnyMatrix back(DType::kF32, 2, head_dim, head_dim);
    plan.Execute(at, x.heads(1, head_dim, head_dim),
                 out.heads(1, head_dim, head_dim), executor_);
    const auto frequencies =
        ComputeRotaryFrequencies(rot_dim, spec.base, spec.scaling);
    ASSERT_TRUE(frequencies.ok());
    const double magnitude = frequencies->magnitude;
    EXPECT_GT(magnitude, 1.1);
    std::vector<double> want = x.doubles();
    for (size_t t = 0; t < 2; ++t) {
      double* head = want.data() + t * 37 + 23;
      for (size_t j = 0; j < 7; ++j) {
        const bool halves = style == RotaryStyle::kHalves;
        double& a = head[halves ? j : 2 * j];
        double& b = head[halves ? j + 7 : 2 * j + 1];
        const double angle = positions[t] * frequencies->frequencies[j];
        const double c = magnitude * std::cos(angle);
        const double s = magnitude * std::sin(angle);
        const double old = a;
        a = a * c - b * s;
        b = b * c + old * s;
      }
    }
    // Rounding errors of a cosine, a sine, two products and a sum, each below
    // 2.5.
    EXPECT_TRUE(AllClose(out.doubles(), want, 5 * 2.5 * 0x1p-24));

    spec.turn = RotaryTurn::kBackward;
    Plan(spec).Execute(at, out.heads(1, head_dim, head_dim),
                       back.heads(1, head_dim, head_dim), executor_);
    std::vector<double> unturned = x.doubles();
    for (size_t i = 0; i < unturned.size(); ++i) {
      if (i % 37 >= 23) unturned[i] *= magnitude * magnitude;
    }
    EXPECT_TRUE(AllClose(back.doubles(), unturned, 10 * 2.5 * 0x1p-23));
  }
}

TEST_P(RotaryEmbeddingTest, AgreesWithTheReference) {
  TestRng rng;
  const int64_t shapes[][2] = {
      {2, 2},   {8, 4},   {17, 16}, {30, 30},  {34, 34},   {33, 14},  {48, 46},
      {64, 64}, {64, 32}, {80, 80}, {108, 66}, {128, 128}, {576, 576}};
  for (const RotaryStyle style : kStyles) {
    for (const DType dtype : kDTypes) {
      for (const auto& shape : shapes) {
        const int64_t head_dim = shape[0], rot_dim = shape[1];
        SCOPED_TRACE(testing::Message()
                     << head_dim << " " << rot_dim << " " << DTypeName(dtype)
                     << (style == RotaryStyle::kPairs ? " pairs" : " halves"));
        const RotaryEmbeddingSpec spec = Spec(head_dim, rot_dim, style, dtype);
        const RotaryEmbeddingPlan plan = Plan(spec);
        // Few and many heads: the latter share angles in another order.
        const int64_t tokens = 4, heads = shape[0] % 16 == 0 ? 5 : 3;
        const std::vector<int64_t> positions = {0, 299, 1, 42};
        const int64_t stride_in = head_dim + 3, stride_out = head_dim;
        const int64_t cols_in = (heads - 1) * stride_in + head_dim;
        const int64_t cols_out = heads * head_dim;
        const AnyMatrix x(dtype,
                          ToDoubles(UniformReals(rng, tokens * cols_in, -3, 3)),
                          tokens, cols_in, cols_in + 1, Edge::kBegin, 1);
        const AnyMatrix out(dtype, tokens, cols_out, cols_out + 2);
        const AnyTensorView vx = x.heads(heads, head_dim, stride_in);
        const AnyTensorView vout = out.heads(heads, head_dim, stride_out);
        const IndexView at = DenseVector(positions.data(), tokens);
        ASSERT_EQ(plan.CheckArgs(at, vx, vout), absl::OkStatus());
        plan.Execute(at, vx, vout, executor_);

        const Heads before = Split(x, head_dim, stride_in);
        const auto want = Reference(spec, before.elements, positions, heads);
        // With |a|, |b| < 3, cosine, sine, each product and the sum are
        // rounded.
        const double bound = 2 * 3 * 3 * std::ldexp(1.0, -24);
        EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double value, int64_t) {
          return bound + ResultBound(dtype, value, bound / 3);
        }));
        // Elements outside the rotated range must be copied unchanged.
        const auto got = out.doubles();
        for (size_t i = 0; i < got.size(); ++i) {
          if (static_cast<int64_t>(i) % head_dim >= rot_dim) {
            ASSERT_EQ(got[i], before.elements[i]);
          }
        }

        // In place between separated heads: the same bits, and the gaps are
        // unchanged.
        ASSERT_EQ(plan.CheckArgs(at, vx, vx), absl::OkStatus());
        plan.Execute(at, vx, vx, executor_);
        const Heads after = Split(x, head_dim, stride_in);
        EXPECT_TRUE(AllBitsEqual(after.elements, got));
        EXPECT_TRUE(AllBitsEqual(after.gaps, before.gaps));
      }
    }
  }
}

TEST_P(RotaryEmbeddingTest, ReproducesTheGoldenVectors) {
  const std::vector<double> x = {0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2};
  const std::vector<double> want[] = {
      {-.353338, .469780, -.707214, 1.014548, 1.25, 1.5, 1.75, 2},
      {-.318058, -.459716, .719667, 1.022047, 1.25, 1.5, 1.75, 2}};
  const std::vector<int64_t> positions = {3};
  for (const RotaryStyle style : kStyles) {
    const RotaryEmbeddingPlan plan = Plan(Spec(8, 4, style));
    const AnyMatrix m(DType::kF32, x, 1, 8, 8);
    plan.Execute(DenseVector(positions.data(), 1), m.heads(1, 8, 8),
                 m.heads(1, 8, 8), executor_);
    // The reference table has six decimals.
    EXPECT_TRUE(AllClose(m.doubles(),
                         want[style == RotaryStyle::kHalves ? 0 : 1], 5.1e-7));
  }
}

TEST_P(RotaryEmbeddingTest, IsAccurateAtFarPositions) {
  TestRng rng;
  RotaryEmbeddingSpec spec = Spec(64, 64);
  spec.max_positions = 40000;
  spec.base = 500000;
  const RotaryEmbeddingPlan plan = Plan(spec);
  const std::vector<int64_t> positions = {39999, 32768, 12345};
  const AnyMatrix x(DType::kF32, ToDoubles(UniformReals(rng, 3 * 64)), 3, 64,
                    64);
  const auto want = Reference(spec, x.doubles(), positions, 1);
  plan.Execute(DenseVector(positions.data(), 3), x.heads(1, 64, 64),
               x.heads(1, 64, 64), executor_);
  EXPECT_TRUE(AllClose(x.doubles(), want, 2 * 4 * std::ldexp(1.0, -24)));
}

TEST_P(RotaryEmbeddingTest, TurnsQAndKTogetherOnAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  for (const DType dtype : kDTypes) {
    const int64_t tokens = 97, q_heads = 6, kv_heads = 2, head_dim = 66;
    const RotaryEmbeddingPlan plan =
        Plan(Spec(head_dim, 64, RotaryStyle::kHalves, dtype));
    std::vector<int64_t> positions(static_cast<size_t>(tokens));
    std::vector<int32_t> narrow(positions.size());
    for (size_t t = 0; t < positions.size(); ++t) {
      positions[t] = rng.Integer(0, 299);
      narrow[t] = static_cast<int32_t>(positions[t]);
    }
    const IndexView at = DenseVector(positions.data(), tokens);
    const IndexView at32 = DenseVector(narrow.data(), tokens);
    const int64_t q_cols = q_heads * head_dim, k_cols = kv_heads * head_dim;
    const auto qs = ToDoubles(UniformReals(rng, tokens * q_cols));
    const auto ks = ToDoubles(UniformReals(rng, tokens * k_cols));
    const AnyMatrix q(dtype, qs, tokens, q_cols, q_cols);
    const AnyMatrix k(dtype, ks, tokens, k_cols, k_cols + 1);
    const AnyMatrix q_many(dtype, qs, tokens, q_cols, q_cols);
    const AnyMatrix k_many(dtype, ks, tokens, k_cols, k_cols);
    const AnyMatrix q_alone(dtype, qs, tokens, q_cols, q_cols);
    const AnyTensorView vq = q.heads(q_heads, head_dim, head_dim);
    const AnyTensorView vk = k.heads(kv_heads, head_dim, head_dim);
    ASSERT_EQ(plan.CheckQkArgs(at, vq, vk), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.ExecuteQk(at, vq, vk, executor_));
    const AnyTensorView mq = q_many.heads(q_heads, head_dim, head_dim);
    const AnyTensorView mk = k_many.heads(kv_heads, head_dim, head_dim);
    EXPECT_NO_ALLOCATION(plan.ExecuteQk(at32, mq, mk, **pool));
    EXPECT_EQ(q.bits(), q_many.bits());
    EXPECT_EQ(k.bits(), k_many.bits());
    const AnyTensorView aq = q_alone.heads(q_heads, head_dim, head_dim);
    EXPECT_NO_ALLOCATION(plan.Execute(at, aq, aq, **pool));
    EXPECT_EQ(q.bits(), q_alone.bits());
  }
}

TEST_P(RotaryEmbeddingTest, KeepsNaNInItsPair) {
  const RotaryEmbeddingPlan plan = Plan(Spec(8, 8));
  std::vector<double> x(8, 1.0);
  x[1] = std::numeric_limits<double>::quiet_NaN();
  const AnyMatrix m(DType::kF32, x, 1, 8, 8);
  const std::vector<int64_t> positions = {7};
  plan.Execute(DenseVector(positions.data(), 1), m.heads(1, 8, 8),
               m.heads(1, 8, 8), executor_);
  const auto y = m.doubles();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(std::isnan(y[i]), i % 4 == 1) << i;
}

// The strides of a single token or head are not used, not even in a product
// that would overflow.
TEST_P(RotaryEmbeddingTest, IgnoresTheStridesOfOneTokenAndOneHead) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const RotaryStyle style : kStyles) {
    const RotaryEmbeddingPlan plan = Plan(Spec(8, 6, style));
    const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<float> out(8);
    const int32_t position = 0;  // the identity
    const IndexView positions = DenseVector(&position, 1);
    const TensorView<const float, 3> in(x.data(), {1, 1, 8},
                                        {kHuge, -kHuge, 1});
    const TensorView<float, 3> to(out.data(), {1, 1, 8}, {-kHuge, kHuge, 1});
    ASSERT_EQ(plan.CheckArgs(positions, in, to), absl::OkStatus());
    plan.Execute(positions, in, to, executor_);
    EXPECT_EQ(out, x);
  }
}

TEST_P(RotaryEmbeddingTest, DoesNothingWithoutTokensOrHeads) {
  const RotaryEmbeddingPlan plan = Plan(Spec(8, 8));
  const auto none = [](int64_t tokens, int64_t heads) {
    return AnyTensorView(DType::kF32, static_cast<void*>(nullptr), 3,
                         {tokens, heads, 8}, {8 * heads, 8, 1});
  };
  const std::vector<int64_t> positions = {7, 7};
  EXPECT_EQ(plan.CheckQkArgs(IndexView(), none(0, 2), none(0, 1)),
            absl::OkStatus());
  plan.ExecuteQk(IndexView(), none(0, 2), none(0, 1), executor_);
  const IndexView two = DenseVector(positions.data(), 2);
  EXPECT_EQ(plan.CheckQkArgs(two, none(2, 0), none(2, 0)), absl::OkStatus());
  plan.ExecuteQk(two, none(2, 0), none(2, 0), executor_);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

// Each number of tokens once had a table of its own, of up to 128 MiB.
TEST(RotaryTablesTest, PlansShareTheTablesThatAreEqual) {
  RotaryTables tables;
  const RotaryEmbeddingSpec spec = Spec(16, 8);
  {
    const auto first = RotaryEmbeddingPlan::Create(spec, &tables);
    ASSERT_TRUE(first.ok()) << first.status();
    RotaryEmbeddingSpec same = spec;
    same.head_dim = 32;
    same.dtype = DType::kBF16;
    same.rot_offset = 4;
    const auto second = RotaryEmbeddingPlan::Create(same, &tables);
    EXPECT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(tables.size(), 1u);
    std::vector<RotaryEmbeddingSpec> others(7, spec);
    others[0].rot_dim = 6;
    others[1].max_positions = 299;
    others[2].base = 500.0;
    others[3].style = RotaryStyle::kPairs;
    others[4].turn = RotaryTurn::kBackward;
    others[5].scaling.kind = RotaryScalingKind::kLinear;
    others[6].scaling.factor = 2.0;
    std::vector<RotaryEmbeddingPlan> plans;
    for (const RotaryEmbeddingSpec& other : others) {
      auto plan = RotaryEmbeddingPlan::Create(other, &tables);
      ASSERT_TRUE(plan.ok()) << plan.status();
      plans.push_back(*std::move(plan));
      EXPECT_EQ(tables.size(), 1 + plans.size());
    }
  }
  EXPECT_EQ(tables.size(), 0u);
}

TEST(RotaryEmbeddingPlanTest, RefusesABadSpec) {
  struct Case {
    RotaryEmbeddingSpec spec;
    absl::StatusCode code;
    std::string words;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  std::vector<Case> cases = {
      {Spec(0, 0), kInvalid,
       "rotary_embedding: head_dim=0; need head_dim >= 2"},
      {Spec(8, 0), kInvalid, "rot_dim=0; need 2 <= rot_dim <= 8"},
      {Spec(8, 10), kInvalid, "rot_dim=10; need 2 <= rot_dim <= 8"},
      {Spec(8, 3), kInvalid, "rot_dim=3; need an even number"},
      {Spec(8, 8, RotaryStyle::kPairs, DType::kI8),
       absl::StatusCode::kUnimplemented,
       "dtype is i8; need f32 or bf16 or f16"},
  };
  RotaryEmbeddingSpec spec = Spec(8, 8);
  spec.max_positions = 0;
  cases.push_back({spec, kInvalid, "max_positions=0"});
  spec.max_positions = int64_t{1} << 61;
  cases.push_back({spec, kInvalid, "need their product to be below 2^60"});
  // The frequencies of such a head alone exceed the memory.
  spec = Spec(int64_t{1} << 60, int64_t{1} << 60);
  spec.max_positions = 1;
  cases.push_back(
      {spec, kInvalid, "max_positions=1, rot_dim=1152921504606846976; need"});
  cases.push_back({Spec(int64_t{1} << 50, int64_t{1} << 50),
                   absl::StatusCode::kResourceExhausted, "cannot be"});
  for (const double base : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                            std::numeric_limits<double>::quiet_NaN()}) {
    spec = Spec(8, 8);
    spec.base = base;
    cases.push_back({spec, kInvalid, "need finite base > 0"});
  }
  for (const Case& c : cases) {
    ExpectRefused(RotaryEmbeddingPlan::Create(c.spec).status(), c.code,
                  c.words);
  }
}

TEST(RotaryEmbeddingPlanTest, RefusesBadArguments) {
  const auto plan = RotaryEmbeddingPlan::Create(Spec(4, 4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64), out(64);
  const auto view = [](float* data, int64_t tokens, int64_t heads,
                       int64_t dim) {
    return DenseTensor(data, std::array<int64_t, 3>{tokens, heads, dim});
  };
  const AnyTensorView vx = view(x.data(), 2, 2, 4);
  const AnyTensorView vout = view(out.data(), 2, 2, 4);
  std::vector<int64_t> positions = {0, 299};
  const IndexView at = DenseVector(positions.data(), 2);
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefused(status, absl::StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(plan->CheckArgs(at, vx, vout), absl::OkStatus());
  refused(plan->CheckArgs(at, view(x.data(), 2, 2, 5), vout),
          "x is [2, 2, 5]; need [any, any, 4]");
  refused(plan->CheckArgs(at, vx, view(out.data(), 2, 3, 4)),
          "out is [2, 3, 4]; need [2, 2, 4]");
  refused(plan->CheckArgs(at, vx, view(x.data() + 4, 2, 2, 4)),
          "out overlaps x");
  refused(plan->CheckArgs(DenseVector(positions.data(), 1), vx, vout),
          "positions.size=1; need 2, as tokens");
  refused(
      plan->CheckArgs(VectorView<const int64_t>(nullptr, {2}, {1}), vx, vout),
      "positions is null");
  refused(plan->CheckQkArgs(at, vx, view(x.data() + 8, 2, 1, 4)),
          "k overlaps q");
  refused(plan->CheckQkArgs(at, vx, view(out.data(), 1, 2, 4)),
          "k is [1, 2, 4]; need [2, any, 4]");
  positions[1] = 300;
  refused(plan->CheckArgs(at, vx, vout),
          "positions[1]=300; need 0 <= position < 300");
  positions[1] = -1;
  refused(plan->CheckQkArgs(at, vx, vout), "positions[1]=-1");
}

}  // namespace
}  // namespace quern
