#include "quern/ops/norm/rms_norm.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_norm.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 64, 67, 769, 5125};

// Relative error of the f32 arithmetic: the sum of squares goes through at most
// hidden / 16 + 12 additions (four sums of at least four lanes, their tails and
// their total), and the root halves its error; division, eps, root, reciprocal
// and two products add one rounding each.
double RelativeBound(int64_t hidden) {
  const double additions = static_cast<double>(hidden) / 16 + 12;
  return (additions / 2 + 6) * std::ldexp(1.0, -24);
}

RmsNormSpec Spec(int64_t hidden, DType x = DType::kF32,
                 DType weight = DType::kF32, DType out = DType::kF32,
                 DType residual = DType::kF32) {
  RmsNormSpec spec;
  spec.hidden = hidden;
  spec.x_dtype = x;
  spec.weight_dtype = weight;
  spec.out_dtype = out;
  spec.residual_dtype = residual;
  return spec;
}

class RmsNormTest : public IsaTest {
 protected:
  RmsNormPlan Plan(const RmsNormSpec& spec) {
    auto plan = RmsNormPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(RmsNormTest);

// If all elements are +-2 and eps is 0, the scale is exactly 1/2.
TEST_P(RmsNormTest, IsExactWhereTheRootIs) {
  TestRng rng;
  for (const int64_t hidden : kWidths) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << hidden << DTypeName(dtype));
      RmsNormSpec spec = Spec(hidden, dtype, dtype, dtype);
      spec.eps = 0.0f;
      const RmsNormPlan plan = Plan(spec);
      const auto x =
          ToDoubles(ChosenFrom<float>(rng, 2 * hidden, {2.0f, -2.0f}));
      const auto w = ToDoubles(SmallIntegers<float>(rng, hidden));
      const AnyMatrix mx(dtype, x, 2, hidden, hidden + 3);
      const AnyMatrix mw(dtype, w, 1, hidden, hidden);
      const AnyMatrix out(dtype, 2, hidden, hidden + 1);
      ASSERT_EQ(plan.CheckArgs(mx.view(), mw.vector(), out.view()),
                absl::OkStatus());
      plan.Execute(mx.view(), mw.vector(), out.view(), executor_);
      std::vector<double> want;
      for (int64_t i = 0; i < 2 * hidden; ++i) {
        want.push_back(x[static_cast<size_t>(i)] / 2 *
                       w[static_cast<size_t>(i % hidden)]);
      }
      EXPECT_TRUE(AllEqual(out.doubles(), want));
    }
  }
}

TEST_P(RmsNormTest, AgreesWithTheReference) {
  TestRng rng;
  for (const DType x_dtype : kDTypes) {
    for (const DType w_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        for (const int64_t hidden : kWidths) {
          SCOPED_TRACE(testing::Message()
                       << hidden << " " << DTypeName(x_dtype) << " "
                       << DTypeName(w_dtype) << " " << DTypeName(out_dtype));
          const int64_t rows = 3;
          const RmsNormPlan plan =
              Plan(Spec(hidden, x_dtype, w_dtype, out_dtype));
          // The shift misaligns the base by one element.
          const AnyMatrix x(x_dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 5, Edge::kBegin, 1);
          const AnyMatrix w(w_dtype,
                            ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                            hidden, hidden);
          const AnyMatrix out(out_dtype, rows, hidden, hidden);
          plan.Execute(x.view(), w.vector(), out.view(), executor_);
          const auto want =
              ReferenceRmsNorm(rows, hidden, x.doubles(), w.doubles(), 1e-6f);
          EXPECT_TRUE(
              AllWithin(out.doubles(), want, [&](double value, int64_t) {
                return ResultBound(out_dtype, value, RelativeBound(hidden));
              }));
        }
      }
    }
  }
}

TEST_P(RmsNormTest, AddsTheResidualFirstAndNormalisesTheRoundedSum) {
  TestRng rng;
  for (const DType x_dtype : kDTypes) {
    for (const DType r_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        for (const int64_t hidden : kWidths) {
          SCOPED_TRACE(testing::Message()
                       << hidden << " " << DTypeName(x_dtype) << " "
                       << DTypeName(r_dtype) << " " << DTypeName(out_dtype));
          const int64_t rows = 2;
          const RmsNormPlan plan =
              Plan(Spec(hidden, x_dtype, DType::kBF16, out_dtype, r_dtype));
          const AnyMatrix x(x_dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 2);
          const AnyMatrix r(r_dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 1);
          const AnyMatrix w(DType::kBF16,
                            ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                            hidden, hidden);
          const AnyMatrix out(out_dtype, rows, hidden, hidden + 4);
          const AnyMatrix r_out(r_dtype, rows, hidden, hidden + 3);
          const RmsNormArgs args = {x.const_view(), w.vector(), out.view(),
                                    r.const_view(), r_out.view()};
          ASSERT_EQ(plan.CheckAddArgs(args), absl::OkStatus());
          plan.ExecuteAdd(args, executor_);

          std::vector<double> sum;
          const auto xs = x.doubles(), rs = r.doubles();
          for (size_t i = 0; i < xs.size(); ++i) {
            sum.push_back(RoundThroughF32(r_dtype, xs[i] + rs[i]));
          }
          EXPECT_TRUE(AllEqual(r_out.doubles(), sum));
          EXPECT_TRUE(AllWithin(
              out.doubles(),
              ReferenceRmsNorm(rows, hidden, sum, w.doubles(), 1e-6f),
              [&](double value, int64_t) {
                return ResultBound(out_dtype, value, RelativeBound(hidden));
              }));

          // The norm of residual_out alone must give the same bits.
          const RmsNormPlan alone =
              Plan(Spec(hidden, r_dtype, DType::kBF16, out_dtype));
          const AnyMatrix again(out_dtype, rows, hidden, hidden);
          alone.Execute(r_out.view(), w.vector(), again.view(), executor_);
          EXPECT_EQ(again.bits(), out.bits());
        }
      }
    }
  }
}

// The norm of the exact sum rounds the product alone. It runs in place, as its
// callers do.
TEST_P(RmsNormTest, NormalisesTheExactSumWhereAsked) {
  TestRng rng;
  const int64_t rows = 2;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType w_dtype : {dtype, DType::kF32}) {
      for (const int64_t hidden : kWidths) {
        for (const int64_t span : {int64_t{0}, (hidden + 1) / 2}) {
          SCOPED_TRACE(testing::Message() << hidden << " " << DTypeName(dtype)
                                          << " " << DTypeName(w_dtype));
          RmsNormSpec spec = Spec(hidden, dtype, w_dtype, dtype, dtype);
          spec.sum = NormSum::kExact;
          spec.span = span;
          const RmsNormPlan plan = Plan(spec);
          const AnyMatrix x(dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 2, Edge::kBegin, 1);
          const AnyMatrix r(dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 1);
          const AnyMatrix w(w_dtype,
                            ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                            hidden, hidden);
          const auto xs = x.doubles(), rs = r.doubles(), ws = w.doubles();
          const RmsNormArgs args = {x.view(), w.vector(), x.view(), r.view(),
                                    r.view()};
          ASSERT_EQ(plan.CheckAddArgs(args), absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan.ExecuteAdd(args, executor_));

          std::vector<double> sums, rounded, want;
          for (size_t i = 0; i < xs.size(); ++i) {
            sums.push_back(RoundThroughF32(DType::kF32, xs[i] + rs[i]));
            rounded.push_back(RoundThroughF32(dtype, xs[i] + rs[i]));
          }
          const int64_t n = span == 0 ? hidden : span;
          for (int64_t i = 0; i < rows * hidden; ++i) {
            double squares = 0;
            for (int64_t j = 0; j < n; ++j) {
              const double v =
                  sums[static_cast<size_t>(i / hidden * hidden + j)];
              squares += v * v;
            }
            want.push_back(sums[static_cast<size_t>(i)] *
                           ws[static_cast<size_t>(i % hidden)] /
                           std::sqrt(squares / static_cast<double>(n) + 1e-6));
          }
          EXPECT_TRUE(AllEqual(r.doubles(), rounded));
          EXPECT_TRUE(AllWithin(x.doubles(), want, [&](double value, int64_t) {
            return ResultBound(dtype, value, RelativeBound(hidden) + 0x1p-23);
          }));
        }
      }
    }
  }
  RmsNormSpec spec = Spec(8, DType::kBF16, DType::kBF16, DType::kBF16);
  spec.sum = NormSum::kExact;
  EXPECT_EQ(RmsNormPlan::Create(spec).status().code(),
            absl::StatusCode::kUnimplemented);
}

TEST_P(RmsNormTest, HasWeightsOfThreeKindsSpansAndF16) {
  TestRng rng;
  constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16, kF16 = DType::kF16;
  struct Types {
    DType x, residual;
  };
  for (const Types types :
       {Types{kF32, kF32}, Types{kF32, kBF16}, Types{kBF16, kF32},
        Types{kBF16, kBF16}, Types{kF16, kF16}}) {
    const DType dtype = types.x, r_dtype = types.residual;
    for (const NormWeight kind :
         {NormWeight::kPlain, NormWeight::kOnePlus, NormWeight::kNone}) {
      for (const int64_t hidden : {1, 17, 769}) {
        for (const int64_t span : {int64_t{0}, (hidden + 1) / 2}) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(dtype) << DTypeName(r_dtype) << hidden);
          RmsNormSpec spec = Spec(hidden, dtype, dtype, dtype, r_dtype);
          spec.weight = kind;
          spec.span = span;
          spec.stores = Stores::kStream;
          const RmsNormPlan plan = Plan(spec);
          spec.x_dtype = r_dtype;
          const RmsNormPlan alone = Plan(spec);
          const int64_t rows = 2;
          const AnyMatrix x(dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden + 1);
          const AnyMatrix r(r_dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -3, 3)),
                            rows, hidden, hidden);
          const AnyMatrix w(dtype, ToDoubles(UniformReals(rng, hidden, -2, 2)),
                            1, hidden, hidden);
          const AnyTensorView weight =
              kind == NormWeight::kNone ? AnyTensorView() : w.vector();
          const AnyMatrix out(dtype, rows, hidden, hidden + 3);
          const AnyMatrix again(dtype, rows, hidden, hidden);
          const AnyMatrix sum(r_dtype, rows, hidden, hidden);
          const RmsNormArgs args = {x.const_view(), weight, out.view(),
                                    r.const_view(), sum.view()};
          ASSERT_EQ(plan.CheckAddArgs(args), absl::OkStatus());
          plan.ExecuteAdd(args, executor_);
          alone.Execute(sum.view(), weight, again.view(), executor_);
          EXPECT_EQ(again.bits(), out.bits());
          // The whole sum is written, including the columns after the prefix.
          std::vector<double> sums;
          const auto xs = x.doubles(), rs = r.doubles();
          for (size_t i = 0; i < xs.size(); ++i) {
            sums.push_back(RoundThroughF32(r_dtype, xs[i] + rs[i]));
          }
          EXPECT_TRUE(AllEqual(sum.doubles(), sums));
          // The reference takes the mean square of the prefix alone.
          const int64_t n = span == 0 ? hidden : span;
          const auto h = sum.doubles();
          const auto ws = w.doubles();
          std::vector<double> want;
          for (int64_t i = 0; i < rows * hidden; ++i) {
            double squares = 0;
            for (int64_t j = 0; j < n; ++j) {
              const double v = h[static_cast<size_t>(i / hidden * hidden + j)];
              squares += v * v;
            }
            double factor = 1;
            if (kind != NormWeight::kNone) {
              factor = ws[static_cast<size_t>(i % hidden)] +
                       (kind == NormWeight::kOnePlus ? 1 : 0);
            }
            want.push_back(h[static_cast<size_t>(i)] * factor /
                           std::sqrt(squares / static_cast<double>(n) + 1e-6));
          }
          EXPECT_TRUE(
              AllWithin(out.doubles(), want, [&](double value, int64_t) {
                // 1 + weight is rounded once more; eps is the f32 nearest 1e-6.
                return ResultBound(dtype, value,
                                   RelativeBound(hidden) + 0x1p-23);
              }));
        }
      }
    }
  }
}

TEST_P(RmsNormTest, WorksInPlace) {
  TestRng rng;
  const int64_t rows = 3, hidden = 67;
  for (const DType dtype : kDTypes) {
    const RmsNormPlan plan = Plan(Spec(hidden, dtype, dtype, dtype, dtype));
    const auto values = ToDoubles(UniformReals(rng, rows * hidden));
    const auto residual = ToDoubles(UniformReals(rng, rows * hidden));
    const AnyMatrix w(dtype, ToDoubles(UniformReals(rng, hidden)), 1, hidden,
                      hidden);
    const AnyMatrix x(dtype, values, rows, hidden, 70);
    const AnyMatrix out(dtype, rows, hidden, 71);
    plan.Execute(x.view(), w.vector(), out.view(), executor_);
    ASSERT_EQ(plan.CheckArgs(x.view(), w.vector(), x.view()), absl::OkStatus());
    plan.Execute(x.view(), w.vector(), x.view(), executor_);
    EXPECT_EQ(x.bits(), out.bits());

    const AnyMatrix y(dtype, values, rows, hidden, 70);
    const AnyMatrix r(dtype, residual, rows, hidden, 70);
    const AnyMatrix r_out(dtype, rows, hidden, 70);
    plan.ExecuteAdd({y.view(), w.vector(), out.view(), r.view(), r_out.view()},
                    executor_);
    const RmsNormArgs in_place = {y.view(), w.vector(), y.view(), r.view(),
                                  r.view()};
    ASSERT_EQ(plan.CheckAddArgs(in_place), absl::OkStatus());
    plan.ExecuteAdd(in_place, executor_);
    EXPECT_EQ(r.bits(), r_out.bits());
    EXPECT_EQ(y.bits(), out.bits());

    // Crossed in place: the sum overwrites the residual, and the result
    // overwrites x.
    const AnyMatrix x2(dtype, values, rows, hidden, 70);
    const AnyMatrix r2(dtype, residual, rows, hidden, 70);
    const RmsNormArgs crossed = {x2.view(), w.vector(), r2.view(), r2.view(),
                                 x2.view()};
    ASSERT_EQ(plan.CheckAddArgs(crossed), absl::OkStatus());
    plan.ExecuteAdd(crossed, executor_);
    EXPECT_EQ(x2.bits(), r_out.bits());
    EXPECT_EQ(r2.bits(), out.bits());
  }
}

// x and y were computed by another implementation, from bf16 inputs.
TEST_P(RmsNormTest, ReproducesTheGoldenVectors) {
  const std::vector<uint32_t> x = {0xc098, 0xc013, 0xbf8d, 0xbeaa, 0x0000,
                                   0x3d91, 0x3f45, 0x3ff3, 0x4053, 0x40d6};
  const std::vector<uint32_t> y = {0x3fa6, 0xbf33, 0x400d, 0x3f69, 0xbfda,
                                   0x4046, 0xbee6, 0x3f89, 0xc026, 0x3f17};
  const auto matrix = [](const std::vector<uint32_t>& codes) {
    std::vector<double> values;
    for (const uint32_t code : codes) {
      values.push_back(ToDouble(FromBits<BFloat16>(code)));
    }
    return AnyMatrix(DType::kBF16, values, 1, 10, 10);
  };
  const AnyMatrix mx = matrix(x), my = matrix(y);
  const AnyMatrix out(DType::kBF16, 1, 10, 10);
  const AnyMatrix r_out(DType::kBF16, 1, 10, 10);
  const RmsNormPlan plan =
      Plan(Spec(10, DType::kBF16, DType::kBF16, DType::kBF16, DType::kBF16));
  plan.Execute(mx.view(), my.vector(), out.view(), executor_);
  EXPECT_EQ(out.bits(),
            (std::vector<uint32_t>{0xc004, 0x3f0a, 0xbf50, 0xbdd0, 0x8000,
                                   0x3d96, 0xbded, 0x3f2e, 0xc037, 0x3fa9}));
  plan.ExecuteAdd({mx.view(), my.vector(), out.view(), my.view(), r_out.view()},
                  executor_);
  EXPECT_EQ(r_out.bits(),
            (std::vector<uint32_t>{0xc05d, 0xc040, 0x3f8d, 0x3f14, 0xbfda,
                                   0x404b, 0x3ea4, 0x403e, 0x3f34, 0x40e9}));
  EXPECT_EQ(out.bits(),
            (std::vector<uint32_t>{0xbfb7, 0x3f2c, 0x3f47, 0x3e2c, 0x3f6d,
                                   0x4049, 0xbd3c, 0x3f82, 0xbf15, 0x3fb0}));
  RmsNormSpec gemma = plan.spec();
  gemma.weight = NormWeight::kOnePlus;
  Plan(gemma).Execute(mx.view(), my.vector(), out.view(), executor_);
  EXPECT_EQ(out.bits(),
            (std::vector<uint32_t>{0xc06a, 0xbe6d, 0xbf97, 0xbe5a, 0x8000,
                                   0x3dc7, 0x3e12, 0x3fa9, 0xbfe2, 0x4064}));
}

TEST_P(RmsNormTest, KeepsSpecialsInTheirRow) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const RmsNormPlan plan = Plan(Spec(3));
  const AnyMatrix x(DType::kF32,
                    {1, kNaN, 1, 2, 2, -2, 1, kInf, 1, 0, 0, -0.0, 3e20, 1, 1},
                    5, 3, 3);
  const AnyMatrix w(DType::kF32, {1, 1, 1}, 1, 3, 3);
  const AnyMatrix out(DType::kF32, 5, 3, 3);
  plan.Execute(x.view(), w.vector(), out.view(), executor_);
  const auto y = out.doubles();
  for (size_t i : {0, 1, 2}) EXPECT_TRUE(std::isnan(y[i])) << i;
  EXPECT_NEAR(y[3], 1.0, 1e-6);
  EXPECT_NEAR(y[5], -1.0, 1e-6);
  EXPECT_EQ(y[6], 0.0);
  EXPECT_TRUE(std::isnan(y[7]));
  EXPECT_EQ(y[9], 0.0);
  EXPECT_TRUE(std::signbit(y[11]));
  EXPECT_NEAR(y[12], std::sqrt(3.0), 1e-6);
  EXPECT_NEAR(y[13], std::sqrt(3.0) / 3e20, 1e-26);
}

// Squares above 3.4e38 are no numbers of f32; their rows have a norm all the
// same, alone and behind a residual.
TEST_P(RmsNormTest, NormalisesRowsWhoseSquaresOverflow) {
  TestRng rng;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t hidden : {1, 7, 1000}) {
      for (const double size : {1e18, 1e19, 1e25, 1e37}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " " << hidden << " of " << size);
        auto values = ToDoubles(UniformReals(rng, 2 * hidden, 1, 2));
        for (double& v : values) v *= size;
        const AnyMatrix x(dtype, values, 2, hidden, hidden + 3);
        const AnyMatrix zeros(dtype, std::vector<double>(values.size()), 2,
                              hidden, hidden);
        const AnyMatrix w(DType::kF32,
                          ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                          hidden, hidden);
        const AnyMatrix out(DType::kF32, 2, hidden, hidden);
        const AnyMatrix added(DType::kF32, 2, hidden, hidden);
        const AnyMatrix sum(dtype, 2, hidden, hidden);
        const RmsNormPlan plan =
            Plan(Spec(hidden, dtype, DType::kF32, DType::kF32, dtype));
        plan.Execute(x.view(), w.vector(), out.view(), executor_);
        const auto want =
            ReferenceRmsNorm(2, hidden, x.doubles(), w.doubles(), 1e-6f);
        EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double value, int64_t) {
          return ResultBound(DType::kF32, value, RelativeBound(hidden));
        }));
        plan.ExecuteAdd(
            {x.view(), w.vector(), added.view(), zeros.view(), sum.view()},
            executor_);
        EXPECT_EQ(added.bits(), out.bits());
      }
    }
  }
}

TEST_P(RmsNormTest, DoesNotDependOnWorkersOrNeighbours) {
  TestRng rng;
  const int64_t rows = 37, hidden = 769;
  const auto executor = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*executor)->ParallelFor(3, [](int64_t, int) {});
  const RmsNormPlan plan =
      Plan(Spec(hidden, DType::kBF16, DType::kF32, DType::kBF16, DType::kF32));
  const AnyMatrix x(DType::kBF16, ToDoubles(UniformReals(rng, rows * hidden)),
                    rows, hidden, hidden);
  const AnyMatrix r(DType::kF32, ToDoubles(UniformReals(rng, rows * hidden)),
                    rows, hidden, hidden);
  const AnyMatrix w(DType::kF32, ToDoubles(UniformReals(rng, hidden)), 1,
                    hidden, hidden);
  const AnyMatrix one(DType::kBF16, rows, hidden, hidden);
  const AnyMatrix many(DType::kBF16, rows, hidden, hidden);
  const AnyMatrix r_one(DType::kF32, rows, hidden, hidden);
  const AnyMatrix r_many(DType::kF32, rows, hidden, hidden);
  EXPECT_NO_ALLOCATION(
      plan.Execute(x.view(), w.vector(), one.view(), executor_));
  EXPECT_NO_ALLOCATION(
      plan.Execute(x.view(), w.vector(), many.view(), **executor));
  EXPECT_EQ(one.bits(), many.bits());
  EXPECT_NO_ALLOCATION(plan.ExecuteAdd(
      {x.view(), w.vector(), one.view(), r.view(), r_one.view()}, executor_));
  EXPECT_NO_ALLOCATION(plan.ExecuteAdd(
      {x.view(), w.vector(), many.view(), r.view(), r_many.view()},
      **executor));
  EXPECT_EQ(one.bits(), many.bits());
  EXPECT_EQ(r_one.bits(), r_many.bits());

  // Row 5 computed alone must have the same bits.
  const auto row = [&](const AnyMatrix& m) {
    const AnyTensorView v = m.view();
    return AnyTensorView(
        v.dtype(),
        static_cast<char*>(v.mutable_data()) +
            5 * v.stride(0) * static_cast<int64_t>(SizeOf(v.dtype())),
        2, {1, hidden}, {hidden, 1});
  };
  const AnyMatrix alone(DType::kBF16, 1, hidden, hidden);
  const AnyMatrix r_alone(DType::kF32, 1, hidden, hidden);
  plan.ExecuteAdd({row(x), w.vector(), alone.view(), row(r), r_alone.view()},
                  executor_);
  const auto all = one.bits();
  EXPECT_EQ(alone.bits(), std::vector<uint32_t>(all.begin() + 5 * hidden,
                                                all.begin() + 6 * hidden));
}

// The stride of a single row is not used, not even in a product that would
// overflow.
TEST_P(RmsNormTest, IgnoresTheRowStrideOfOneRow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  RmsNormSpec spec = Spec(4);
  spec.eps = 0.0f;
  const RmsNormPlan plan = Plan(spec);
  std::vector<float> x = {2, -2, 2, -2}, out(4);
  const std::vector<float> w = {1, 2, 3, 4};
  const MatrixView<const float> in(x.data(), {1, 4}, {kHuge, 1});
  const MatrixView<float> to(out.data(), {1, 4}, {-kHuge, 1});
  const auto weight = DenseVector(w.data(), 4);
  ASSERT_EQ(plan.CheckArgs(in, weight, to), absl::OkStatus());
  plan.Execute(in, weight, to, executor_);
  EXPECT_EQ(out, (std::vector<float>{1, -2, 3, -4}));
}

TEST_P(RmsNormTest, DoesNothingWithoutRows) {
  const RmsNormPlan plan = Plan(Spec(4));
  const AnyMatrix w(DType::kF32, {1, 1, 1, 1}, 1, 4, 4);
  const AnyTensorView none = DenseMatrix<float>(nullptr, 0, 4);
  EXPECT_EQ(plan.CheckArgs(none, w.vector(), none), absl::OkStatus());
  plan.Execute(none, w.vector(), none, executor_);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(RmsNormPlanTest, RefusesABadSpec) {
  struct Case {
    RmsNormSpec spec;
    absl::StatusCode code;
    std::string words;
  };
  std::vector<Case> cases = {
      {Spec(0), absl::StatusCode::kInvalidArgument,
       "rms_norm: hidden=0; need 1 <= hidden <= 576460752303423487"},
      {Spec(8, DType::kF16), absl::StatusCode::kUnimplemented,
       "rms_norm: x is f16, weight f32, out f32, residual f32; need"},
      {Spec(8, DType::kU8), absl::StatusCode::kUnimplemented,
       "rms_norm: x_dtype is u8; need f32 or bf16 or f16"},
      {Spec(8, DType::kF32, DType::kI8), absl::StatusCode::kUnimplemented,
       "weight_dtype is i8"},
      {Spec(8, DType::kF32, DType::kF32, DType::kU8),
       absl::StatusCode::kUnimplemented, "out_dtype is u8"},
      {Spec(8, DType::kF32, DType::kF32, DType::kF32, DType::kF16),
       absl::StatusCode::kUnimplemented, "residual f16"},
  };
  cases.push_back({Spec(8), absl::StatusCode::kInvalidArgument,
                   "rms_norm: span=9; need 1 <= span <= 8"});
  cases.back().spec.span = 9;
  for (const float eps : {-1.0f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    RmsNormSpec spec = Spec(8);
    spec.eps = eps;
    cases.push_back(
        {spec, absl::StatusCode::kInvalidArgument, "need finite eps >= 0"});
  }
  for (const Case& c : cases) {
    ExpectRefused(RmsNormPlan::Create(c.spec).status(), c.code, c.words);
  }
}

TEST(RmsNormPlanTest, RefusesBadArguments) {
  const auto plan = RmsNormPlan::Create(Spec(4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64), w(8), out(64), r(64), r_out(64);
  const AnyTensorView good_x = DenseMatrix<const float>(x.data(), 2, 4);
  const AnyTensorView good_w = DenseVector<const float>(w.data(), 4);
  const AnyTensorView good_out = DenseMatrix(out.data(), 2, 4);
  const auto refused =
      [&](const AnyTensorView& bad_x, const AnyTensorView& bad_w,
          const AnyTensorView& bad_out, const std::string& words) {
        ExpectRefused(plan->CheckArgs(bad_x, bad_w, bad_out),
                      absl::StatusCode::kInvalidArgument, words);
      };
  EXPECT_EQ(plan->CheckArgs(good_x, good_w, good_out), absl::OkStatus());
  refused(DenseMatrix<const float>(x.data(), 2, 5), good_w, good_out,
          "rms_norm: x is [2, 5]; need [any, 4]");
  refused(DenseVector<const float>(x.data(), 4), good_w, good_out,
          "x is [4]; need [any, 4]");
  refused(DenseMatrix<const float>(nullptr, 2, 4), good_w, good_out,
          "x is null; need [any, 4]");
  refused(DenseMatrix<const int32_t>(nullptr, 2, 4), good_w, good_out,
          "x is i32; need f32");
  refused(good_x, DenseVector<const float>(w.data(), 3), good_out,
          "weight is [3]; need [4]");
  refused(good_x, good_w, DenseMatrix(out.data(), 3, 4),
          "out is [3, 4]; need [2, 4]");
  refused(good_x, good_w, DenseMatrix<const float>(out.data(), 2, 4),
          "out is read-only");
  refused(good_x, good_w, MatrixView<float>(out.data(), {2, 4}, {3, 1}),
          "out has stride 3 in dimension 0; need 4 or more");
  refused(MatrixView<const float>(x.data(), {2, 4}, {-4, 1}), good_w, good_out,
          "x has stride -4 in dimension 0; need 0 or more");
  refused(good_x, good_w, DenseMatrix(x.data() + 1, 2, 4), "out overlaps x");
  refused(good_x, DenseVector<const float>(out.data() + 7, 4), good_out,
          "out overlaps weight");

  RmsNormArgs args = {good_x, good_w, good_out,
                      DenseMatrix<const float>(r.data(), 2, 4),
                      DenseMatrix(r_out.data(), 2, 4)};
  EXPECT_EQ(plan->CheckAddArgs(args), absl::OkStatus());
  const auto refused_add = [&](const RmsNormArgs& bad,
                               const std::string& words) {
    ExpectRefused(plan->CheckAddArgs(bad), absl::StatusCode::kInvalidArgument,
                  words);
  };
  RmsNormArgs bad = args;
  bad.residual = DenseMatrix<const float>(r.data(), 1, 4);
  refused_add(bad, "residual is [1, 4]; need [2, 4]");
  bad = args;
  bad.residual_out = DenseMatrix<const float>(r_out.data(), 2, 4);
  refused_add(bad, "residual_out is read-only");
  bad = args;
  bad.residual_out = bad.out;
  refused_add(bad, "out overlaps residual_out");
  bad = args;
  bad.residual_out = DenseMatrix(r.data() + 4, 2, 4);
  refused_add(bad, "residual_out overlaps residual");
  bad = args;
  bad.residual = DenseMatrix<const float>(out.data() + 1, 2, 4);
  refused_add(bad, "out overlaps residual");
  bad = args;
  bad.x = DenseMatrix<const float>(r_out.data() + 4, 2, 4);
  refused_add(bad, "residual_out overlaps x");
  bad = args;
  bad.weight = DenseVector<const float>(r_out.data() + 7, 4);
  refused_add(bad, "residual_out overlaps weight");
}

}  // namespace
}  // namespace quern
