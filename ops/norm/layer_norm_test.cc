#include "quern/ops/norm/layer_norm.h"

#include <algorithm>
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

using Doubles = std::vector<double>;

constexpr int64_t kWidths[] = {1,  7,   8,   15,  16,  17,  33,
                               64, 255, 256, 257, 769, 5125};
constexpr struct {
  DType x, weight, out;
} kDTypes[] = {
    {DType::kF32, DType::kF32, DType::kF32},
    {DType::kF32, DType::kBF16, DType::kF16},
    {DType::kBF16, DType::kBF16, DType::kBF16},
    {DType::kBF16, DType::kF32, DType::kF32},
    {DType::kF16, DType::kF16, DType::kF16},
};

// What a result is made of, in double: (h - mean) / deviation * weight, and
// the bias apart from it.
struct Parts {
  Doubles scaled, bias;
  double deviation = 0;  // the least of the rows
};
Parts Reference(int64_t hidden, double eps, const Doubles& h,
                const Doubles& weight, const Doubles& bias) {
  const auto n = static_cast<size_t>(hidden);
  Parts parts;
  parts.deviation = std::numeric_limits<double>::infinity();
  for (size_t row = 0; row < h.size(); row += n) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n; ++i) mean += h[row + i];
    mean /= static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) {
      squares += (h[row + i] - mean) * (h[row + i] - mean);
    }
    const double deviation = std::sqrt(squares / static_cast<double>(n) + eps);
    parts.deviation = std::min(parts.deviation, deviation);
    for (size_t i = 0; i < n; ++i) {
      const double w = weight.empty() ? 1.0 : weight[i];
      parts.scaled.push_back((h[row + i] - mean) / deviation * w);
      parts.bias.push_back(bias.empty() ? 0.0 : bias[i]);
    }
  }
  return parts;
}

// Errors of the f32 arithmetic, in units of 2^-24, relative to the result
// without its bias. A lane adds at most 64 squares of a block of 256 elements,
// and a block at most 4 lanes more; the root halves that. The two differences,
// the root, the scale, its product and the weight round once each.
constexpr double kUnits = (64 + 4) / 2.0 + 8;
// The error of the corrected mean: that of an f32 sum of h - mean, 68 additions
// in a block, relative to the mean of |h - mean|, which is at most the
// deviation; and the square of such an error, relative to the largest |h|.
constexpr double kMean = 68.0 * 0x1p-24;
constexpr double kMostWeight = 2;

// Whether `have` is the reference's, where `largest` is the largest |h|.
testing::AssertionResult Near(DType dtype, const Doubles& have,
                              const Parts& want, double largest) {
  Doubles sums;
  for (size_t i = 0; i < want.scaled.size(); ++i) {
    sums.push_back(want.scaled[i] + want.bias[i]);
  }
  const double mean =
      kMostWeight * (kMean + kMean * kMean * largest / want.deviation);
  return AllWithin(have, sums, [&](double value, int64_t i) {
    const double scaled = std::abs(want.scaled[static_cast<size_t>(i)]);
    // The sum with the bias rounds once, before the result does.
    return scaled * kUnits * 0x1p-24 + mean +
           ResultBound(dtype, value, 2 * 0x1p-24);
  });
}

LayerNormSpec Spec(int64_t hidden, DType x = DType::kF32,
                   DType weight = DType::kF32, DType out = DType::kF32) {
  LayerNormSpec spec;
  spec.hidden = hidden;
  spec.dtype = x;
  spec.weight_dtype = weight;
  spec.out_dtype = out;
  return spec;
}

class LayerNormTest : public IsaTest {
 protected:
  LayerNormPlan Plan(const LayerNormSpec& spec) {
    auto plan = LayerNormPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(LayerNormTest);

// Half of the elements are mean + 2, and half mean - 2: the deviation is 2.
TEST_P(LayerNormTest, IsExactWhereTheRootIs) {
  for (const int64_t hidden : {2, 16, 18, 34, 256, 1030}) {
    for (const double mean : {0.0, 64.0, -3.0}) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        SCOPED_TRACE(testing::Message()
                     << hidden << " " << mean << " " << DTypeName(dtype));
        LayerNormSpec spec = Spec(hidden, dtype, dtype, dtype);
        spec.eps = 0.0f;
        Doubles x, weight, bias, want;
        for (int64_t i = 0; i < hidden; ++i) {
          const double sign = i % 2 == 0 ? 1 : -1;
          x.push_back(mean + 2 * sign);
          weight.push_back(static_cast<double>(i % 3) - 1);
          bias.push_back(static_cast<double>(i % 5));
          want.push_back(sign * weight.back() + bias.back());
        }
        const AnyMatrix mx(dtype, x, 1, hidden, hidden);
        const AnyMatrix w(dtype, weight, 1, hidden, hidden);
        const AnyMatrix b(dtype, bias, 1, hidden, hidden);
        const AnyMatrix out(dtype, 1, hidden, hidden);
        LayerNormArgs args;
        args.x = mx.const_view();
        args.weight = w.vector();
        args.bias = b.vector();
        args.out = out.view();
        Plan(spec).Execute(args, executor_);
        EXPECT_TRUE(AllEqual(out.doubles(), want));
      }
    }
  }
}

TEST_P(LayerNormTest, AgreesWithTheReference) {
  TestRng rng;
  constexpr int64_t kRows = 3;
  for (const int64_t hidden : kWidths) {
    for (const auto& dtype : kDTypes) {
      for (const int parts : {0, 1, 2, 3, 7}) {
        SCOPED_TRACE(testing::Message()
                     << hidden << " " << DTypeName(dtype.x) << " " << parts);
        LayerNormSpec spec = Spec(hidden, dtype.x, dtype.weight, dtype.out);
        spec.eps = hidden == 64 ? 0.5f : 1e-5f;
        spec.weight = (parts & 1) != 0;
        spec.bias = (parts & 2) != 0;
        spec.residual = (parts & 4) != 0;
        const LayerNormPlan plan = Plan(spec);
        const AnyMatrix x(dtype.x,
                          ToDoubles(UniformReals(rng, kRows * hidden, -1, 3)),
                          kRows, hidden, hidden + 3);
        const AnyMatrix r(dtype.x,
                          ToDoubles(UniformReals(rng, kRows * hidden, -2, 2)),
                          kRows, hidden, hidden + 5);
        const AnyMatrix w(dtype.weight,
                          ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                          hidden, hidden);
        const AnyMatrix b(dtype.weight,
                          ToDoubles(UniformReals(rng, hidden, -2, 2)), 1,
                          hidden, hidden);
        const AnyMatrix out(dtype.out, kRows, hidden, hidden + 1);
        const AnyMatrix sums(dtype.x, kRows, hidden, hidden + 2);
        LayerNormArgs args;
        args.x = x.const_view();
        args.out = out.view();
        if (spec.weight) args.weight = w.vector();
        if (spec.bias) args.bias = b.vector();
        if (spec.residual) {
          args.residual = r.const_view();
          args.residual_out = sums.view();
        }
        ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
        EXPECT_NO_ALLOCATION(plan.Execute(args, executor_));
        Doubles h = x.doubles();
        if (spec.residual) {
          const Doubles more = r.doubles();
          for (size_t i = 0; i < h.size(); ++i) h[i] += more[i];
          Doubles rounded = h;
          for (double& v : rounded) v = RoundThroughF32(dtype.x, v);
          EXPECT_TRUE(AllEqual(sums.doubles(), rounded));
        }
        EXPECT_TRUE(Near(dtype.out, out.doubles(),
                         Reference(hidden, double{spec.eps}, h,
                                   spec.weight ? w.doubles() : Doubles(),
                                   spec.bias ? b.doubles() : Doubles()),
                         5));

        // The bits are those of many workers, and in place.
        const AnyMatrix again(dtype.out, kRows, hidden, hidden + 2);
        ManyWorkers many(3);
        args.out = again.view();
        plan.Execute(args, many);
        EXPECT_EQ(again.bits(), out.bits());
        if (dtype.x != dtype.out) continue;
        args.out = x.view();
        if (spec.residual) args.residual_out = r.view();
        ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
        plan.Execute(args, many);
        EXPECT_EQ(x.bits(), out.bits());
        if (spec.residual) {
          EXPECT_EQ(r.bits(), sums.bits());
        }
      }
    }
  }
}

// A mean of 1000 beside a deviation of 1 costs no digits: x is a whole number
// of sixteenths, which f32 has exactly.
TEST_P(LayerNormTest, ALargeMeanCostsNothing) {
  TestRng rng;
  for (const int64_t hidden : {33, 256, 5125}) {
    Doubles values;
    for (int64_t i = 0; i < hidden; ++i) {
      values.push_back(1000 + static_cast<double>(rng.Integer(-32, 32)) / 16);
    }
    LayerNormSpec spec = Spec(hidden);
    spec.weight = spec.bias = false;
    const AnyMatrix x(DType::kF32, values, 1, hidden, hidden);
    const AnyMatrix out(DType::kF32, 1, hidden, hidden);
    LayerNormArgs args;
    args.x = x.view();
    args.out = out.view();
    Plan(spec).Execute(args, executor_);
    EXPECT_TRUE(Near(DType::kF32, out.doubles(),
                     Reference(hidden, double{spec.eps}, values, {}, {}),
                     1002));
  }
}

TEST_P(LayerNormTest, ARowOfOneNumberBecomesTheBias) {
  for (const int64_t hidden : {1, 16, 17, 300, 1001}) {
    const Doubles values(static_cast<size_t>(hidden), double{0.1f} * 1000);
    LayerNormSpec spec = Spec(hidden);
    spec.weight = false;
    const AnyMatrix x(DType::kF32, values, 1, hidden, hidden);
    const AnyMatrix b(DType::kF32, Doubles(values.size(), 0.75), 1, hidden,
                      hidden);
    const AnyMatrix out(DType::kF32, 1, hidden, hidden);
    LayerNormArgs args;
    args.x = x.view();
    args.bias = b.vector();
    args.out = out.view();
    Plan(spec).Execute(args, executor_);
    for (const double y : out.doubles()) {
      EXPECT_NEAR(y, 0.75, 0x1p-30 * 100 / std::sqrt(1e-5) + 0x1p-24);
    }
  }
}

TEST_P(LayerNormTest, TakesHeadsOfWiderRows) {
  TestRng rng;
  constexpr int64_t kTokens = 3, kHeads = 5, kDim = 24, kStride = 29;
  for (const auto& dtype : kDTypes) {
    SCOPED_TRACE(testing::Message() << DTypeName(dtype.x));
    LayerNormSpec spec = Spec(kDim, dtype.x, dtype.weight, dtype.out);
    spec.weight = spec.bias = false;
    const LayerNormPlan plan = Plan(spec);
    const int64_t width = kHeads * kStride + 7;
    const AnyMatrix x(dtype.x,
                      ToDoubles(UniformReals(rng, kTokens * width, -1, 1)),
                      kTokens, width, width);
    const AnyMatrix out(dtype.out, kTokens, width, width + 2);
    LayerNormArgs args;
    args.x = x.heads(kHeads, kDim, kStride);
    args.out = out.heads(kHeads, kDim, kStride);
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    const std::vector<uint32_t> before = out.bits();
    ManyWorkers many(4);
    plan.Execute(args, many);
    const std::vector<uint32_t> after = out.bits();
    const Doubles values = x.doubles(), results = out.doubles();
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        if (c < kHeads * kStride && c % kStride < kDim) continue;
        const auto i = static_cast<size_t>(t * width + c);
        ASSERT_EQ(after[i], before[i]) << "token " << t << " column " << c;
      }
      for (int64_t h = 0; h < kHeads; ++h) {
        const auto at = static_cast<ptrdiff_t>(t * width + h * kStride);
        const auto head = [&](const Doubles& v) {
          return Doubles(v.begin() + at, v.begin() + at + kDim);
        };
        EXPECT_TRUE(
            Near(dtype.out, head(results),
                 Reference(kDim, double{spec.eps}, head(values), {}, {}), 1));
      }
    }
  }
}

TEST_P(LayerNormTest, KeepsNaNAndInfinityInTheirRows) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const AnyMatrix x(DType::kF32, {nan, 1, 1, -1, inf, 1}, 3, 2, 2);
  const AnyMatrix out(DType::kF32, 3, 2, 2);
  LayerNormSpec spec = Spec(2);
  spec.weight = spec.bias = false;
  LayerNormArgs args;
  args.x = x.view();
  args.out = out.view();
  Plan(spec).Execute(args, executor_);
  const Doubles y = out.doubles();
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_NEAR(y[2], 1, 1e-5);
  EXPECT_NEAR(y[3], -1, 1e-5);
  EXPECT_TRUE(std::isnan(y[4]) && std::isnan(y[5]));
}

// Sums and squares above 3.4e38 are no numbers of f32; their rows have a norm
// all the same. The residual is the sum, which is infinite there.
TEST_P(LayerNormTest, NormalisesRowsWhoseSumsOverflow) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const AnyMatrix x(dtype, {3e38, 1e38, 3e38, 3e19, 4e19, 3e19, 3, 4, 3}, 3,
                      3, 3);
    const AnyMatrix r(dtype, {3e38, 1e38, -3e38, 0, 0, 0, 0, 0, 0}, 3, 3, 3);
    const AnyMatrix out(dtype, 3, 3, 3);
    LayerNormSpec spec = Spec(3, dtype, dtype, dtype);
    spec.weight = spec.bias = false;
    spec.residual = true;
    Doubles h = x.doubles();
    const Doubles more = r.doubles();
    for (size_t i = 0; i < h.size(); ++i) h[i] += more[i];
    LayerNormArgs args;
    args.x = x.view();
    args.out = out.view();
    args.residual = args.residual_out = r.view();
    Plan(spec).Execute(args, executor_);
    const Parts want = Reference(3, double{spec.eps}, h, {}, {});
    EXPECT_TRUE(
        AllWithin(out.doubles(), want.scaled, [&](double value, int64_t) {
          return ResultBound(dtype, value, 64 * 0x1p-24);
        }));
    EXPECT_TRUE(std::isinf(r.doubles()[0]));
    EXPECT_EQ(r.doubles()[2], 0);
  }
}

// Squares below 2^-126 lose digits in f32, and those below 2^-150 become 0.
// Without an eps they are all that the deviation is made of.
TEST_P(LayerNormTest, NormalisesRowsWhoseSquaresUnderflow) {
  LayerNormSpec spec = Spec(2);
  spec.weight = spec.bias = false;
  spec.eps = 0.0f;
  const AnyMatrix pairs(DType::kF32,
                        {1e-24, -1e-24, 0x1p-149, -0x1p-149, 0x1p-60, 0x1.8p-59,
                         -0x1p-50, 0x1p-50, 0x1p-51, -0x1p-51},
                        5, 2, 2);
  const AnyMatrix signs(DType::kF32, 5, 2, 2);
  LayerNormArgs args;
  args.x = pairs.const_view();
  args.out = signs.view();
  Plan(spec).Execute(args, executor_);
  EXPECT_TRUE(
      AllEqual(signs.doubles(), Doubles{1, -1, 1, -1, -1, 1, -1, 1, 1, -1}));

  TestRng rng;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t hidden : {7, 257}) {
      // The least number is 2^-149 of f32, and 2^-133 of bf16.
      const int least = dtype == DType::kF32 ? -140 : -124;
      for (int exponent = least; exponent <= -40; ++exponent) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " " << hidden << " " << exponent);
        spec = Spec(hidden, dtype, DType::kF32, DType::kF32);
        spec.eps = exponent % 2 == 0 ? 0.0f : std::ldexp(1.0f, -149);
        spec.weight = spec.bias = false;
        spec.residual = exponent % 4 == 0;
        const auto random = [&] {
          Doubles values = ToDoubles(UniformReals(rng, hidden, -1, 3));
          for (double& v : values) v = std::ldexp(v, exponent);
          return AnyMatrix(dtype, values, 1, hidden, hidden);
        };
        const AnyMatrix x = random(), r = random();
        const AnyMatrix out(DType::kF32, 1, hidden, hidden);
        args.x = x.view();
        args.out = out.view();
        args.residual = args.residual_out = r.view();
        Doubles h = x.doubles();
        Doubles sums = r.doubles();
        for (size_t i = 0; spec.residual && i < h.size(); ++i) h[i] += sums[i];
        ASSERT_EQ(Plan(spec).CheckArgs(args), absl::OkStatus());
        Plan(spec).Execute(args, executor_);
        EXPECT_TRUE(Near(DType::kF32, out.doubles(),
                         Reference(hidden, double{spec.eps}, h, {}, {}),
                         std::ldexp(6.0, exponent)));
        if (!spec.residual) continue;
        for (double& v : h) v = RoundThroughF32(dtype, v);
        EXPECT_TRUE(AllEqual(r.doubles(), h));
      }
    }
  }
}

TEST_P(LayerNormTest, DoesNothingWithoutRows) {
  LayerNormSpec spec = Spec(4);
  spec.weight = spec.bias = false;
  const LayerNormPlan plan = Plan(spec);
  LayerNormArgs args;
  args.x = args.out = DenseMatrix<float>(nullptr, 0, 4);
  ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
  plan.Execute(args, executor_);
}

TEST(LayerNormPlanTest, RefusesSpecs) {
  constexpr auto kWrong = absl::StatusCode::kInvalidArgument;
  constexpr auto kNone = absl::StatusCode::kUnimplemented;
  const auto eps = [](float value) {
    LayerNormSpec spec = Spec(8);
    spec.eps = value;
    return spec;
  };
  const struct {
    LayerNormSpec spec;
    absl::StatusCode code;
    std::string words;
  } cases[] = {
      {Spec(0), kWrong, "layer_norm: hidden=0; need 1 <= hidden <= "},
      {Spec(int64_t{1} << 59), kWrong, "need 1 <= hidden <= "},
      {eps(-1), kWrong, "layer_norm: eps=-1; need finite eps >= 0"},
      {eps(std::numeric_limits<float>::infinity()), kWrong, "eps=inf"},
      {eps(std::numeric_limits<float>::quiet_NaN()), kWrong, "eps=nan"},
      {Spec(8, DType::kI8), kNone, "layer_norm: dtype is i8; need f32"},
      {Spec(8, DType::kF32, DType::kI8), kNone, "weight_dtype is i8; need f32"},
      {Spec(8, DType::kF32, DType::kF32, DType::kI8), kNone,
       "out_dtype is i8; need f32"},
  };
  for (const auto& c : cases) {
    ExpectRefusal(LayerNormPlan::Create(c.spec).status(), c.code, c.words);
  }
}

TEST(LayerNormPlanTest, RefusesArguments) {
  std::vector<float> memory(128);
  float* const data = memory.data();
  LayerNormSpec spec = Spec(8);
  spec.residual = true;
  const auto plan = LayerNormPlan::Create(spec);
  ASSERT_TRUE(plan.ok());
  LayerNormArgs good;
  good.x = DenseMatrix(data, 2, 8);
  good.residual = good.residual_out = DenseMatrix(data + 16, 2, 8);
  good.out = DenseMatrix(data + 32, 2, 8);
  good.weight = DenseVector(data + 48, 8);
  good.bias = DenseVector(data + 56, 8);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  const struct {
    AnyTensorView LayerNormArgs::*field;
    AnyTensorView view;
    std::string words;
  } cases[] = {
      {&LayerNormArgs::x, DenseMatrix(data, 2, 7),
       "x is [2, 7]; need [any, 8]"},
      {&LayerNormArgs::x, DenseTensor<float, 3>(data, {1, 2, 8}),
       "x is [1, 2, 8]; need [any, 8]"},
      {&LayerNormArgs::x, AnyTensorView(), "x is []; need [any, 8]"},
      {&LayerNormArgs::out, DenseMatrix(data + 32, 3, 8),
       "out is [3, 8]; need [2, 8]"},
      {&LayerNormArgs::out, DenseMatrix<const float>(data + 32, 2, 8),
       "out is read-only"},
      {&LayerNormArgs::out, DenseMatrix(data + 1, 2, 8), "out overlaps x"},
      {&LayerNormArgs::out, DenseMatrix(data + 16, 2, 8),
       "out overlaps residual_out"},
      {&LayerNormArgs::out, DenseMatrix(data + 40, 2, 8), "overlaps weight"},
      {&LayerNormArgs::weight, DenseVector(data + 48, 7),
       "weight is [7]; need [8]"},
      {&LayerNormArgs::bias, AnyTensorView(), "bias is []; need [8]"},
      {&LayerNormArgs::bias, DenseVector(data + 16, 8), "overlaps"},
      {&LayerNormArgs::residual, DenseMatrix(data + 17, 2, 8), "overlaps"},
      {&LayerNormArgs::residual, DenseMatrix(data + 64, 1, 8),
       "residual is [1, 8]; need [2, 8]"},
      {&LayerNormArgs::residual_out, DenseMatrix<const float>(data + 64, 2, 8),
       "residual_out is read-only"},
  };
  for (const auto& c : cases) {
    LayerNormArgs args = good;
    args.*c.field = c.view;
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
