#include "quern/ops/norm/l2_norm.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 64, 67, 128, 769, 5125};
constexpr struct {
  DType x, out;
} kDTypes[] = {
    {DType::kF32, DType::kF32},   {DType::kF32, DType::kBF16},
    {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32},
    {DType::kF16, DType::kF16},   {DType::kF16, DType::kF32},
};

// The equation of the header, in double.
std::vector<double> Reference(int64_t hidden, double eps,
                              const std::vector<double>& x) {
  const auto n = static_cast<size_t>(hidden);
  std::vector<double> out;
  for (size_t row = 0; row < x.size(); row += n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += x[row + i] * x[row + i];
    for (size_t i = 0; i < n; ++i) {
      out.push_back(x[row + i] / std::sqrt(sum + eps));
    }
  }
  return out;
}

// Relative error of the f32 arithmetic: the sum of squares goes through at most
// hidden / 16 + 12 additions (four sums of at least four lanes, their tails and
// their total), and the root halves its error; eps, root, reciprocal and
// product add one rounding each.
double RelativeBound(int64_t hidden) {
  const double additions = static_cast<double>(hidden) / 16 + 12;
  return (additions / 2 + 4) * std::ldexp(1.0, -24);
}

L2NormSpec Spec(int64_t hidden, DType x = DType::kF32,
                DType out = DType::kF32) {
  L2NormSpec spec;
  spec.hidden = hidden;
  spec.x_dtype = x;
  spec.out_dtype = out;
  return spec;
}

class L2NormTest : public IsaTest {
 protected:
  L2NormPlan Plan(const L2NormSpec& spec) {
    auto plan = L2NormPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(L2NormTest);

// A row with sixteen elements of +-2 has length 8, wherever they are.
TEST_P(L2NormTest, IsExactWhereTheRootIs) {
  for (const int64_t hidden : {16, 17, 64, 100, 1031}) {
    for (const auto& dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << hidden << DTypeName(dtype.x));
      L2NormSpec spec = Spec(hidden, dtype.x, dtype.out);
      spec.eps = 0.0f;
      std::vector<double> x(static_cast<size_t>(hidden)), want = x;
      for (int64_t k = 0; k < 16; ++k) {
        const auto i = static_cast<size_t>(k * hidden / 16);
        x[i] = k % 3 == 0 ? -2 : 2;
        want[i] = x[i] / 8;
      }
      const AnyMatrix mx(dtype.x, x, 1, hidden, hidden);
      const AnyMatrix out(dtype.out, 1, hidden, hidden);
      Plan(spec).Execute({mx.view(), out.view()}, executor_);
      EXPECT_TRUE(AllEqual(out.doubles(), want));
    }
  }
}

TEST_P(L2NormTest, AgreesWithTheReference) {
  TestRng rng;
  for (const int64_t hidden : kWidths) {
    for (const auto& dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << hidden << " " << DTypeName(dtype.x)
                                      << " " << DTypeName(dtype.out));
      L2NormSpec spec = Spec(hidden, dtype.x, dtype.out);
      spec.eps = hidden == 64 ? 0.5f : 1e-6f;
      const L2NormPlan plan = Plan(spec);
      constexpr int64_t kRows = 3;
      const AnyMatrix x(dtype.x,
                        ToDoubles(UniformReals(rng, kRows * hidden, -3, 3)),
                        kRows, hidden, hidden + 3);
      const AnyMatrix out(dtype.out, kRows, hidden, hidden + 1);
      const L2NormArgs args = {x.const_view(), out.view()};
      ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
      EXPECT_NO_ALLOCATION(plan.Execute(args, executor_));
      EXPECT_TRUE(AllWithin(
          out.doubles(), Reference(hidden, double{spec.eps}, x.doubles()),
          [&](double value, int64_t) {
            return ResultBound(dtype.out, value, RelativeBound(hidden));
          }));

      // The bits are those of many workers, and of a single row in place.
      const AnyMatrix again(dtype.out, kRows, hidden, hidden + 2);
      ManyWorkers many(3);
      plan.Execute({x.view(), again.view()}, many);
      EXPECT_EQ(again.bits(), out.bits());
      if (dtype.x != dtype.out) continue;
      ASSERT_EQ(plan.CheckArgs({x.view(), x.view()}), absl::OkStatus());
      plan.Execute({x.view(), x.view()}, many);
      EXPECT_EQ(x.bits(), out.bits());
    }
  }
}

// q and k are columns of a joint projection.
TEST_P(L2NormTest, TakesHeadsOfWiderRows) {
  TestRng rng;
  constexpr int64_t kTokens = 3, kHeads = 5, kDim = 24, kStride = 29;
  for (const auto& dtype : kDTypes) {
    SCOPED_TRACE(testing::Message() << DTypeName(dtype.x));
    const L2NormPlan plan = Plan(Spec(kDim, dtype.x, dtype.out));
    const int64_t width = kHeads * kStride + 7;
    const AnyMatrix x(dtype.x,
                      ToDoubles(UniformReals(rng, kTokens * width, -1, 1)),
                      kTokens, width, width);
    const AnyMatrix out(dtype.out, kTokens, width, width + 2);
    const L2NormArgs args = {x.heads(kHeads, kDim, kStride),
                             out.heads(kHeads, kDim, kStride)};
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    const std::vector<uint32_t> before = out.bits();
    plan.Execute(args, executor_);
    const std::vector<uint32_t> after = out.bits();
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        if (c < kHeads * kStride && c % kStride < kDim) continue;
        const auto i = static_cast<size_t>(t * width + c);
        ASSERT_EQ(after[i], before[i]) << "token " << t << " column " << c;
      }
      for (int64_t h = 0; h < kHeads; ++h) {
        // The head alone, as a row.
        const auto size = static_cast<int64_t>(SizeOf(dtype.x));
        const auto* const from = static_cast<const char*>(x.view().data()) +
                                 (t * width + h * kStride) * size;
        const AnyTensorView row(dtype.x, static_cast<const void*>(from), 2,
                                {1, kDim}, {kDim, 1});
        const AnyMatrix alone(dtype.out, 1, kDim, kDim);
        plan.Execute({row, alone.view()}, executor_);
        const std::vector<uint32_t> want = alone.bits();
        for (int64_t c = 0; c < kDim; ++c) {
          ASSERT_EQ(after[static_cast<size_t>(t * width + h * kStride + c)],
                    want[static_cast<size_t>(c)])
              << "token " << t << " head " << h << " column " << c;
        }
      }
    }
    ManyWorkers many(4);
    const AnyMatrix again(dtype.out, kTokens, width, width + 2);
    plan.Execute({args.x, again.heads(kHeads, kDim, kStride)}, many);
    EXPECT_EQ(again.bits(), after);
  }
}

TEST_P(L2NormTest, KeepsNaNAndZerosInTheirRows) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const AnyMatrix x(DType::kF32, {nan, 1, 0, 0, 3, 4, inf, 1}, 4, 2, 2);
  const AnyMatrix out(DType::kF32, 4, 2, 2);
  L2NormSpec spec = Spec(2);
  Plan(spec).Execute({x.view(), out.view()}, executor_);
  std::vector<double> y = out.doubles();
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 0);
  EXPECT_NEAR(y[4], 0.6, 1e-6);
  EXPECT_NEAR(y[5], 0.8, 1e-6);
  EXPECT_TRUE(std::isnan(y[6]));
  EXPECT_EQ(y[7], 0);
  spec.eps = 0.0f;
  Plan(spec).Execute({x.view(), out.view()}, executor_);
  y = out.doubles();
  EXPECT_TRUE(std::isnan(y[2]) && std::isnan(y[3]));
}

// Squares above 3.4e38 are no numbers of f32; their rows have a norm all the
// same.
TEST_P(L2NormTest, NormalisesRowsWhoseSquaresOverflow) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const AnyMatrix x(dtype, {3e19, 4e19, 3, 4, 3e37, -4e37}, 3, 2, 2);
    const AnyMatrix out(dtype, 3, 2, 2);
    Plan(Spec(2, dtype, dtype)).Execute({x.view(), out.view()}, executor_);
    EXPECT_TRUE(AllWithin(out.doubles(), Reference(2, 1e-6, x.doubles()),
                          [&](double value, int64_t) {
                            return ResultBound(dtype, value, 8 * 0x1p-24);
                          }));
  }
}

TEST_P(L2NormTest, DoesNothingWithoutRows) {
  const L2NormPlan plan = Plan(Spec(4));
  const L2NormArgs args = {DenseMatrix<float>(nullptr, 0, 4),
                           DenseMatrix<float>(nullptr, 0, 4)};
  ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
  plan.Execute(args, executor_);
}

TEST(L2NormPlanTest, RefusesSpecs) {
  struct Case {
    L2NormSpec spec;
    absl::StatusCode code;
    std::string words;
  };
  constexpr auto kWrong = absl::StatusCode::kInvalidArgument;
  constexpr auto kNone = absl::StatusCode::kUnimplemented;
  const auto eps = [](float value) {
    L2NormSpec spec = Spec(8);
    spec.eps = value;
    return spec;
  };
  const Case cases[] = {
      {Spec(0), kWrong, "l2_norm: hidden=0; need 1 <= hidden <= "},
      {Spec(int64_t{1} << 59), kWrong, "need 1 <= hidden <= "},
      {eps(-1), kWrong, "l2_norm: eps=-1; need finite eps >= 0"},
      {eps(std::numeric_limits<float>::infinity()), kWrong, "eps=inf"},
      {eps(std::numeric_limits<float>::quiet_NaN()), kWrong, "eps=nan"},
      {Spec(8, DType::kI8), kNone,
       "l2_norm: x_dtype is i8; need f32 or bf16 or f16"},
      {Spec(8, DType::kF32, DType::kI8), kNone,
       "l2_norm: out_dtype is i8; need f32 or bf16 or f16"},
      {Spec(8, DType::kF32, DType::kF16), kNone,
       "l2_norm: x is f32, out f16; need f32 or bf16 each, or f16 (out also "
       "f32)"},
      {Spec(8, DType::kF16, DType::kBF16), kNone, "x is f16, out bf16"},
  };
  for (const Case& c : cases) {
    ExpectRefusal(L2NormPlan::Create(c.spec).status(), c.code, c.words);
  }
}

TEST(L2NormPlanTest, RefusesArguments) {
  std::vector<float> memory(64);
  float* const data = memory.data();
  const auto plan = L2NormPlan::Create(Spec(8));
  ASSERT_TRUE(plan.ok());
  const AnyTensorView x = DenseMatrix(data, 2, 8);
  const AnyTensorView apart = DenseMatrix(data + 16, 2, 8);
  EXPECT_EQ(plan->CheckArgs({x, apart}), absl::OkStatus());
  EXPECT_EQ(plan->CheckArgs({x, x}), absl::OkStatus());
  const struct {
    AnyTensorView x, out;
    std::string words;
  } cases[] = {
      {DenseMatrix(data, 2, 7), apart, "x is [2, 7]; need [any, 8]"},
      {DenseVector(data, 8), apart, "x is [8]; need [any, 8]"},
      {DenseTensor<float, 3>(data, {2, 2, 4}), apart,
       "x is [2, 2, 4]; need [any, any, 8]"},
      {DenseTensor<float, 3>(data, {1, 2, 8}), apart,
       "out is [2, 8]; need [1, 2, 8]"},
      {AnyTensorView(), apart, "x is []; need [any, 8]"},
      {x, DenseMatrix(data + 16, 3, 8), "out is [3, 8]; need [2, 8]"},
      {x, DenseMatrix<const float>(data + 16, 2, 8), "out is read-only"},
      {x, MatrixView<float>(data + 16, {2, 8}, {7, 1}),
       "out has stride 7 in dimension 0"},
      {x, DenseMatrix(data + 1, 2, 8), "out overlaps x"},
      {x, DenseMatrix<float>(nullptr, 2, 8), "out is null"},
  };
  for (const auto& c : cases) {
    ExpectRefusal(plan->CheckArgs({c.x, c.out}), c.words);
  }
  const AnyTensorView halves(DType::kBF16, static_cast<void*>(data), 2, {2, 8},
                             {8, 1});
  ExpectRefusal(plan->CheckArgs({halves, apart}), "x is bf16; need f32");
  ExpectRefusal(plan->CheckArgs({apart, halves}), "out is bf16; need f32");
}

}  // namespace
}  // namespace quern
