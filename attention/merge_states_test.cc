#include "quern/attention/merge_states.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// [tokens, heads, dim] with gaps between heads and between tokens.
template <typename T>
class Rows {
 public:
  Rows(const std::vector<T>& values, int64_t tokens, int64_t heads, int64_t dim)
      : matrix_(values, tokens * heads, dim, dim + 3),
        extents_({tokens, heads, dim}) {}
  Rows(int64_t tokens, int64_t heads, int64_t dim)
      : matrix_(tokens * heads, dim, dim + 3), extents_({tokens, heads, dim}) {}
  TensorView<T, 3> view() {
    const int64_t row = extents_[2] + 3;
    return {matrix_.view().data(), extents_, {extents_[1] * row, row, 1}};
  }
  std::vector<T> ToDense() const { return matrix_.ToDense(); }

 private:
  StridedMatrix<T> matrix_;
  std::array<int64_t, 3> extents_;
};

// The two parts that are merged, of [tokens, heads] rows each.
template <typename T>
struct Parts {
  std::vector<T> a, b;
  std::vector<float> lse_a, lse_b;
};

template <typename Out>
struct Merged {
  std::vector<Out> out;
  std::vector<float> lse;
};

class MergeStatesTest : public IsaTest {
 protected:
  template <typename T, typename Out>
  MergeStatesPlan Plan(int64_t heads, int64_t dim) {
    MergeStatesSpec spec;
    spec.heads = heads;
    spec.head_dim = dim;
    spec.dtype = DTypeOf<T>;
    spec.out_dtype = DTypeOf<Out>;
    const MergeStatesPlan plan = MergeStatesPlan::Create(spec).value();
    EXPECT_RAN_ON(plan);
    return plan;
  }

  template <typename T, typename Out>
  Merged<Out> Run(const Parts<T>& parts, int64_t tokens, int64_t heads,
                  int64_t dim, int workers = 1) {
    const MergeStatesPlan plan = Plan<T, Out>(heads, dim);
    Rows<T> a(parts.a, tokens, heads, dim), b(parts.b, tokens, heads, dim);
    Rows<Out> out(tokens, heads, dim);
    StridedMatrix<float> lse_a(parts.lse_a, tokens, heads, heads + 1);
    StridedMatrix<float> lse_b(parts.lse_b, tokens, heads, heads + 2);
    StridedMatrix<float> lse(tokens, heads, heads + 3);
    const MergeStatesArgs args = {{a.view(), lse_a.view()},
                                  {b.view(), lse_b.view()},
                                  out.view(),
                                  lse.view()};
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    ManyWorkers executor(workers);
    EXPECT_NO_ALLOCATION(plan.Execute(args, executor));
    return {out.ToDense(), lse.ToDense()};
  }

  // One row of one dim.
  Merged<float> One(float a, float lse_a, float b, float lse_b) {
    return Run<float, float>({{a}, {b}, {lse_a}, {lse_b}}, 1, 1, 1);
  }

  template <typename T, typename Out>
  void ExpectMatchesReference(Rng& rng, int64_t tokens, int64_t heads,
                              int64_t dim) {
    SCOPED_TRACE(testing::Message()
                 << tokens << " x " << heads << " x " << dim << " "
                 << DTypeName(DTypeOf<T>) << " to " << DTypeName(DTypeOf<Out>));
    const int64_t rows = tokens * heads;
    Parts<T> parts = {
        UniformReals<T>(rng, rows * dim), UniformReals<T>(rng, rows * dim),
        UniformReals(rng, rows, -30, 30), UniformReals(rng, rows, -30, 30)};
    for (size_t r = 0; r < parts.lse_a.size(); r += 3) {
      parts.lse_b[r] = parts.lse_a[r] + static_cast<float>(rng.Uniform(-2, 2));
    }
    const Merged<Out> got = Run<T, Out>(parts, tokens, heads, dim);
    std::vector<double> want, want_lse;
    for (size_t r = 0; r < parts.lse_a.size(); ++r) {
      const double a = double{parts.lse_a[r]}, b = double{parts.lse_b[r]};
      const double lse =
          std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
      want_lse.push_back(lse);
      for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
        const size_t i = r * static_cast<size_t>(dim) + d;
        want.push_back(std::exp(a - lse) * ToDouble(parts.a[i]) +
                       std::exp(b - lse) * ToDouble(parts.b[i]));
      }
    }
    // The bound, with eps = 2^-24: w = exp(-x) has 4 eps of its exp2, and three
    // roundings of its argument, which are worth 3 eps * x * exp(-x) < 2 eps.
    // Weights then have a sum and a division, the smaller one a product, which
    // the output weighs with elements below 1. The output has two roundings and
    // that of its type.
    const double eps = std::ldexp(1.0, -24);
    EXPECT_TRUE(AllWithin(got.out, want, [&](double x, int64_t) {
      return (2 * 6 + 2 * 3 + 3) * eps + UnitRoundoff<Out>() * std::abs(x) +
             (DTypeOf<Out> == DType::kF16 ? 0x1p-25 : 0);
    }));
    EXPECT_TRUE(AllWithin(got.lse, want_lse, [&](double x, int64_t) {
      return (6 + 4) * eps + std::abs(x) * eps;
    }));
  }
};
QUERN_INSTANTIATE_ISA_TEST(MergeStatesTest);

TEST_P(MergeStatesTest, WeightsPartsByTheirSums) {
  // Equal sums: the mean, exactly. The lse is above by log(2).
  const Merged<float> mean = One(3, -5, 8, -5);
  EXPECT_EQ(mean.out[0], 5.5f);
  EXPECT_EQ(mean.lse[0], -5 + 0.693147181f);
  // Weights 3/4 and 1/4.
  const float log3 = std::log(3.0f);
  EXPECT_NEAR(One(8, log3, 4, 0).out[0], 7, 1e-5);
  EXPECT_NEAR(One(8, log3, 4, 0).lse[0], std::log(4.0f), 1e-6);
  EXPECT_NEAR(One(8, 0, 4, log3).out[0], 5, 1e-5);
}

TEST_P(MergeStatesTest, NothingIsTheIdentity) {
  for (const float nothing : {0.0f, 7.0f, kNan, kInf}) {
    for (const float lse : {-1e30f, -3.25f, 0.0f, 88.0f}) {
      EXPECT_EQ(One(0.7f, lse, nothing, -kInf).out[0], 0.7f);
      EXPECT_EQ(One(0.7f, lse, nothing, -kInf).lse[0], lse);
      EXPECT_EQ(One(nothing, -kInf, 0.7f, lse).out[0], 0.7f);
      EXPECT_EQ(One(nothing, -kInf, 0.7f, lse).lse[0], lse);
    }
    const Merged<float> none = One(nothing, -kInf, nothing, -kInf);
    EXPECT_EQ(BitsOf(none.out[0]), 0u);
    EXPECT_EQ(none.lse[0], -kInf);
  }
  // Too far below to count.
  EXPECT_EQ(One(0.7f, 50, kNan, -40).out[0], 0.7f);
  EXPECT_EQ(One(kInf, 10, 0.7f, 100).lse[0], 100.0f);
}

// FlashAttention 2 gives a part without keys an lse of +inf.
TEST_P(MergeStatesTest, APartOfInfiniteLseHasNoKeys) {
  for (const float nothing : {0.0f, 7.0f, kNan, kInf}) {
    for (const float lse : {-1e30f, -3.0f, 0.0f, 88.0f, 3e38f}) {
      EXPECT_EQ(One(0.7f, lse, nothing, kInf).out[0], 0.7f);
      EXPECT_EQ(One(0.7f, lse, nothing, kInf).lse[0], lse);
      EXPECT_EQ(One(nothing, kInf, 0.7f, lse).out[0], 0.7f);
      EXPECT_EQ(One(nothing, kInf, 0.7f, lse).lse[0], lse);
    }
    for (const float other : {-kInf, kInf}) {
      for (const bool swapped : {false, true}) {
        const Merged<float> none = swapped ? One(nothing, other, nothing, kInf)
                                           : One(nothing, kInf, nothing, other);
        EXPECT_EQ(none.out[0], 0.0f);
        EXPECT_EQ(none.lse[0], -kInf);
      }
    }
  }
  EXPECT_TRUE(std::isnan(One(1, kNan, 2, kInf).lse[0]));
}

TEST_P(MergeStatesTest, NanStaysInItsRow) {
  EXPECT_TRUE(std::isnan(One(kNan, 1, 2, 1).out[0]));
  EXPECT_EQ(One(kNan, 0, 2, 0).lse[0], std::log(2.0f));
  EXPECT_TRUE(std::isnan(One(1, kNan, 2, 1).out[0]));
  EXPECT_TRUE(std::isnan(One(1, 1, 2, kNan).lse[0]));
  // Row 1 of three: a NaN in dim 4 of a, and as an lse.
  Parts<BFloat16> parts = {
      RoundedTo<BFloat16>(std::vector<double>(3 * 20, 1.0)),
      RoundedTo<BFloat16>(std::vector<double>(3 * 20, 1.0)),
      {0, 0, 0},
      {0, 0, 0}};
  parts.a[24] = Poison<BFloat16>();
  for (const bool whole : {false, true}) {
    if (whole) parts.lse_b[1] = kNan;
    const auto got = Run<BFloat16, float>(parts, 1, 3, 20);
    for (size_t i = 0; i < 60; ++i) {
      const bool hit = whole ? i / 20 == 1 : i == 24;
      EXPECT_EQ(std::isnan(got.out[i]), hit) << i;
    }
  }
}

TEST_P(MergeStatesTest, MatchesTheReference) {
  TestRng rng;
  for (const int64_t dim : {1, 3, 8, 15, 16, 17, 31, 33, 64, 80, 128, 257}) {
    ExpectMatchesReference<float, float>(rng, 3, 5, dim);
    ExpectMatchesReference<BFloat16, BFloat16>(rng, 2, 7, dim);
    ExpectMatchesReference<Float16, Float16>(rng, 2, 3, dim);
  }
  ExpectMatchesReference<float, BFloat16>(rng, 5, 9, 40);
  ExpectMatchesReference<float, Float16>(rng, 5, 9, 40);
  ExpectMatchesReference<BFloat16, float>(rng, 5, 9, 40);
  ExpectMatchesReference<BFloat16, Float16>(rng, 5, 9, 40);
  ExpectMatchesReference<Float16, float>(rng, 5, 9, 40);
  ExpectMatchesReference<Float16, BFloat16>(rng, 5, 9, 40);
  // Every remainder of the heads whose weights are computed at once.
  for (const int64_t heads : {1, 15, 16, 17, 63, 64, 65, 130}) {
    ExpectMatchesReference<float, float>(rng, 3, heads, 5);
  }
}

TEST_P(MergeStatesTest, DoesNotDependOnTheWorkers) {
  TestRng rng;
  constexpr int64_t kTokens = 67, kHeads = 8, kDim = 128;
  const Parts<BFloat16> parts = {
      UniformReals<BFloat16>(rng, kTokens * kHeads * kDim),
      UniformReals<BFloat16>(rng, kTokens * kHeads * kDim),
      UniformReals(rng, kTokens * kHeads, -5, 5),
      UniformReals(rng, kTokens * kHeads, -5, 5)};
  const auto want = Run<BFloat16, BFloat16>(parts, kTokens, kHeads, kDim);
  for (const int workers : {2, 3, 64}) {
    const auto got =
        Run<BFloat16, BFloat16>(parts, kTokens, kHeads, kDim, workers);
    EXPECT_TRUE(AllBitsEqual(got.out, want.out)) << workers;
    EXPECT_TRUE(AllBitsEqual(got.lse, want.lse)) << workers;
  }
}

// Out in the place of a or of b, lse in that of either.
TEST_P(MergeStatesTest, WorksInPlace) {
  TestRng rng;
  constexpr int64_t kTokens = 4, kHeads = 19, kDim = 37;
  constexpr int64_t kRows = kTokens * kHeads;
  Parts<BFloat16> parts = {UniformReals<BFloat16>(rng, kRows * kDim),
                           UniformReals<BFloat16>(rng, kRows * kDim),
                           UniformReals(rng, kRows, -5, 5),
                           UniformReals(rng, kRows, -5, 5)};
  parts.lse_a[5] = parts.lse_b[6] = parts.lse_a[7] = parts.lse_b[7] = -kInf;
  const MergeStatesPlan plan = Plan<BFloat16, Float16>(kHeads, kDim);
  const auto want = Run<BFloat16, Float16>(parts, kTokens, kHeads, kDim);
  InlineExecutor executor;
  for (const bool out_is_a : {true, false}) {
    for (const bool lse_is_a : {true, false}) {
      Rows<BFloat16> a(parts.a, kTokens, kHeads, kDim);
      Rows<BFloat16> b(parts.b, kTokens, kHeads, kDim);
      StridedMatrix<float> lse_a(parts.lse_a, kTokens, kHeads, kHeads + 2);
      StridedMatrix<float> lse_b(parts.lse_b, kTokens, kHeads, kHeads + 2);
      const TensorView<BFloat16, 3> place = (out_is_a ? a : b).view();
      // Two types of one size: the bytes of one become those of the other.
      const AnyTensorView out(
          DType::kF16, static_cast<void*>(place.data()), 3,
          {kTokens, kHeads, kDim, 0, 0},
          {place.stride(0), place.stride(1), place.stride(2), 0, 0});
      const MergeStatesArgs args = {{a.view(), lse_a.view()},
                                    {b.view(), lse_b.view()},
                                    out,
                                    (lse_is_a ? lse_a : lse_b).view()};
      ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
      plan.Execute(args, executor);
      std::vector<Float16> got;
      for (const BFloat16 x : (out_is_a ? a : b).ToDense()) {
        got.push_back(FromBits<Float16>(BitsOf(x)));
      }
      EXPECT_TRUE(AllBitsEqual(got, want.out));
      EXPECT_TRUE(AllBitsEqual((lse_is_a ? lse_a : lse_b).ToDense(), want.lse));
    }
  }
}

TEST_P(MergeStatesTest, NeedsNoLseAndNoTokens) {
  TestRng rng;
  const MergeStatesPlan plan = Plan<float, float>(2, 3);
  Rows<float> a(UniformReals(rng, 12), 2, 2, 3);
  Rows<float> b(UniformReals(rng, 12), 2, 2, 3);
  Rows<float> out(2, 2, 3);
  const std::vector<float> lse_a = {0, 1, 2, 3}, lse_b = {1, 1, 1, 1};
  const auto view = [](const std::vector<float>& lse) {
    return DenseMatrix<const float>(lse.data(), 2, 2);
  };
  MergeStatesArgs args = {
      {a.view(), view(lse_a)}, {b.view(), view(lse_b)}, out.view(), {}};
  InlineExecutor executor;
  ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
  plan.Execute(args, executor);
  const Merged<float> want =
      Run<float, float>({a.ToDense(), b.ToDense(), lse_a, lse_b}, 2, 2, 3);
  EXPECT_TRUE(AllBitsEqual(out.ToDense(), want.out));

  const TensorView<float, 3> empty(nullptr, {0, 2, 3}, {6, 3, 1});
  const MatrixView<float> no_lse(nullptr, {0, 2}, {2, 1});
  args = {{empty, no_lse}, {empty, no_lse}, empty, {}};
  ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
  plan.Execute(args, executor);
}

TEST(MergeStatesPlanTest, RefusesSpecs) {
  const auto expect = [](int64_t heads, int64_t dim, DType dtype, DType out,
                         absl::StatusCode code, const char* words) {
    ExpectRefusal(MergeStatesPlan::Create({heads, dim, dtype, out}).status(),
                  code, words);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  expect(0, 8, DType::kF32, DType::kF32, kInvalid,
         "merge_states: heads=0; need 1 <= heads <= 2147483647");
  expect(1, -3, DType::kF32, DType::kF32, kInvalid, "head_dim=-3");
  expect(int64_t{1} << 40, 3, DType::kF32, DType::kF32, kInvalid, "heads=");
  expect(1, 8, DType::kI8, DType::kF32, kMissing,
         "dtype is i8; need f32 or bf16 or f16");
  expect(1, 8, DType::kF32, DType::kF8E4M3, kMissing, "out_dtype is");
}

TEST(MergeStatesPlanTest, RefusesArguments) {
  const MergeStatesPlan plan =
      MergeStatesPlan::Create({2, 8, DType::kF32, DType::kF32}).value();
  std::vector<float> memory(1000, 0.0f);
  const auto rows = [&](size_t at, int64_t tokens = 3) {
    return TensorView<float, 3>(memory.data() + at, {tokens, 2, 8}, {16, 8, 1});
  };
  const auto lse = [&](size_t at, int64_t tokens = 3) {
    return MatrixView<float>(memory.data() + at, {tokens, 2}, {2, 1});
  };
  const MergeStatesArgs good = {
      {rows(0), lse(300)}, {rows(100), lse(310)}, rows(200), lse(320)};
  ASSERT_EQ(plan.CheckArgs(good), absl::OkStatus());
  const auto expect = [&](const char* words, auto change) {
    MergeStatesArgs args = good;
    change(args);
    ExpectRefusal(plan.CheckArgs(args), words);
  };
  using Args = MergeStatesArgs;
  expect("a.lse is [4, 2]; need [3, 2]",
         [&](Args& x) { x.a.lse = lse(300, 4); });
  expect("b.out is [2, 2, 8]; need [3, 2, 8]",
         [&](Args& x) { x.b.out = rows(100, 2); });
  expect("b.lse is [2, 2]", [&](Args& x) { x.b.lse = lse(310, 2); });
  expect("out is [4, 2, 8]", [&](Args& x) { x.out = rows(200, 4); });
  expect("lse is [1, 2]", [&](Args& x) { x.lse = lse(320, 1); });
  expect("a.out is [3, 2, 4]; need [any, 2, 8]", [&](Args& x) {
    x.a.out = TensorView<float, 3>(memory.data(), {3, 2, 4}, {16, 8, 1});
  });
  expect("b.out is null", [&](Args& x) {
    x.b.out = TensorView<float, 3>(nullptr, {3, 2, 8}, {16, 8, 1});
  });
  expect("a.out is bf16; need f32", [&](Args& x) {
    x.a.out = TensorView<BFloat16, 3>(
        reinterpret_cast<BFloat16*>(memory.data()), {3, 2, 8}, {16, 8, 1});
  });
  expect("b.out has stride -16", [&](Args& x) {
    x.b.out = TensorView<float, 3>(memory.data() + 132, {3, 2, 8}, {-16, 8, 1});
  });
  expect("out has stride 4 in dimension 1", [&](Args& x) {
    x.out = TensorView<float, 3>(memory.data() + 200, {3, 2, 8}, {16, 4, 1});
  });
  expect("out is read-only", [&](Args& x) {
    x.out =
        TensorView<const float, 3>(memory.data() + 200, {3, 2, 8}, {16, 8, 1});
  });
  // Overlaps that are no exchange of element by element.
  expect("out overlaps a.out", [&](Args& x) { x.out = rows(16); });
  expect("out overlaps b.out", [&](Args& x) { x.out = rows(101); });
  expect("out overlaps a.lse", [&](Args& x) { x.a.lse = lse(210); });
  expect("out overlaps b.lse", [&](Args& x) { x.b.lse = lse(210); });
  expect("lse overlaps out", [&](Args& x) { x.lse = lse(210); });
  expect("lse overlaps a.lse", [&](Args& x) { x.lse = lse(302); });
  expect("lse overlaps b.lse", [&](Args& x) { x.lse = lse(312); });
  expect("lse overlaps a.out", [&](Args& x) { x.lse = lse(10); });
  expect("lse overlaps b.out", [&](Args& x) { x.lse = lse(110); });
  // The output takes a's place, and b begins in the midst of it.
  expect("out overlaps b.out", [&](Args& x) {
    x.out = rows(0);
    x.b.out = rows(8);
  });
}

}  // namespace
}  // namespace quern
