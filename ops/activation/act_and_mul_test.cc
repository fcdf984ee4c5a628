#include "quern/ops/activation/act_and_mul.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/activation/act_and_mul_testutil.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 256, 257, 769};

class ActAndMulTest : public ActAndMulFixture {};
QUERN_INSTANTIATE_ISA_TEST(ActAndMulTest);

TEST_P(ActAndMulTest, AgreesWithTheReference) {
  TestRng rng;
  for (const DType x_dtype : kActAndMulTypes) {
    for (const DType out_dtype : kActAndMulTypes) {
      for (const int64_t d : kWidths) {
        SCOPED_TRACE(testing::Message() << d << " " << DTypeName(x_dtype) << " "
                                        << DTypeName(out_dtype));
        const int64_t rows = 3;
        const ActAndMulPlan plan = Plan(ActAndMulSpecOf(d, x_dtype, out_dtype));
        const AnyMatrix x(x_dtype,
                          ToDoubles(UniformReals(rng, rows * 2 * d, -9, 9)),
                          rows, 2 * d, 2 * d + 3, Edge::kEnd);
        const AnyMatrix out(out_dtype, rows, d, d + 1, Edge::kBegin, 1);
        ASSERT_EQ(plan.CheckArgs(x.view(), out.view()), absl::OkStatus());
        plan.Execute(x.view(), out.view(), executor_);
        EXPECT_TRUE(AllWithin(
            out.doubles(), ReferenceSiluAndMul(rows, d, x.doubles()),
            [&](double value, int64_t) {
              return ResultBound(out_dtype, value, kActAndMulRelative);
            }));

        // Two views with other strides must give the same bits.
        std::vector<double> gates, ups;
        const auto all = x.doubles();
        for (int64_t i = 0; i < rows * 2 * d; ++i) {
          (i % (2 * d) < d ? gates : ups)
              .push_back(all[static_cast<size_t>(i)]);
        }
        const AnyMatrix gate(x_dtype, gates, rows, d, d + 2);
        const AnyMatrix up(x_dtype, ups, rows, d, d);
        const AnyMatrix split(out_dtype, rows, d, d);
        ASSERT_EQ(plan.CheckSplitArgs(gate.view(), up.view(), split.view()),
                  absl::OkStatus());
        plan.ExecuteSplit(gate.view(), up.view(), split.view(), executor_);
        EXPECT_EQ(split.bits(), out.bits());
      }
    }
  }
}

// The cutoff is a sum of d terms, and its error reaches the result
// undiminished.
TEST_P(ActAndMulTest, SparseGeluAgreesWithTheReference) {
  TestRng rng;
  for (const double sparsity : {0.2, 0.5, 0.95}) {
    for (const int64_t d : kWidths) {
      SCOPED_TRACE(testing::Message() << d << " " << sparsity);
      const int64_t rows = 2;
      ActAndMulSpec spec = ActAndMulSpecOf(d);
      spec.activation = Activation::kGeluTanh;
      spec.sparsity = sparsity;
      const AnyMatrix x(DType::kF32,
                        ToDoubles(UniformReals(rng, rows * 2 * d, -2, 3)), rows,
                        2 * d, 2 * d + 1);
      const AnyMatrix out(DType::kF32, rows, d, d);
      Plan(spec).Execute(x.view(), out.view(), executor_);
      const std::vector<double> values = x.doubles();
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        const auto row = values.begin() + r * 2 * d;
        const std::vector<double> excess = ReferenceExcess(
            {row, row + d},
            static_cast<double>(static_cast<float>(NormalQuantile(sparsity))));
        for (int64_t i = 0; i < d; ++i) {
          want.push_back(ReferenceGeluTanh(excess[static_cast<size_t>(i)]) *
                         row[d + i]);
        }
      }
      // Bound on the error of mean and deviation: at most 16 additions in one
      // lane of a block of 256, log2(lanes) more to reduce the lanes, and a few
      // roundings, all of numbers up to 5; |gelu'| <= 1.13 and |up| <= 3.
      const double absolute = (16 + 6 + 8) * 5 * 3.4 * 0x1p-23;
      EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double value, int64_t) {
        return std::abs(value) * 40 * 0x1p-24 + absolute;
      }));
    }
  }
}

TEST_P(ActAndMulTest, SparseGeluKnowsItsLimits) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  ActAndMulSpec spec = ActAndMulSpecOf(4);
  spec.activation = Activation::kGelu;
  spec.sparsity = 1.0;
  const AnyMatrix x(DType::kF32,
                    {1, 2,    3, 4, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1,  //
                     1, kNaN, 3, 4, 1, 1, 1, 1},
                    3, 8, 8);
  const AnyMatrix out(DType::kF32, 3, 4, 4);
  Plan(spec).Execute(x.view(), out.view(), executor_);
  const auto y = out.doubles();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(y[i], 0.0);
  for (size_t i = 4; i < 12; ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
}

TEST(NormalQuantileTest, InvertsTheDistribution) {
  EXPECT_NEAR(NormalQuantile(0.5), 0.0, 1e-15);
  EXPECT_EQ(static_cast<float>(NormalQuantile(0.95)), 1.64485363f);
  EXPECT_NEAR(NormalQuantile(0.05), -1.6448536269514722, 1e-14);
  EXPECT_TRUE(std::isinf(NormalQuantile(1.0)));
}

// Streaming stores write the same bits, from any alignment of the row.
TEST_P(ActAndMulTest, StreamsTheSameBits) {
  TestRng rng;
  for (const DType dtype : kActAndMulTypes) {
    for (const int64_t shift : {0, 1, 5}) {
      const int64_t rows = 3, d = 1033;
      const AnyMatrix x(dtype,
                        ToDoubles(UniformReals(rng, rows * 2 * d, -5, 5)), rows,
                        2 * d, 2 * d);
      ActAndMulSpec spec = ActAndMulSpecOf(d, dtype, dtype);
      spec.stores = Stores::kCached;
      const AnyMatrix cached(dtype, rows, d, d);
      Plan(spec).Execute(x.view(), cached.view(), executor_);
      spec.stores = Stores::kStream;
      const AnyMatrix streamed(dtype, rows, d, d + 1, Edge::kBegin, shift);
      Plan(spec).Execute(x.view(), streamed.view(), executor_);
      EXPECT_EQ(cached.bits(), streamed.bits());
    }
  }
}

// The kernel may take a slower path for a vector that holds an unusual gate;
// that must not change the results of the other gates.
TEST_P(ActAndMulTest, AResultDoesNotDependOnItsNeighbours) {
  TestRng rng;
  const int64_t d = 65536;
  std::vector<double> gates, ups, gates_apart, ups_apart;
  const auto reals = UniformReals(rng, d, -5, 5);
  for (uint32_t code = 0; code < 65536; ++code) {
    gates.push_back(ToDouble(FromBits<BFloat16>(code)));
    ups.push_back(double{reals[code]});
    for (const double gate : {gates.back(), -1000.0, -1000.0}) {
      gates_apart.push_back(gate);
      ups_apart.push_back(ups.back());
    }
  }
  const auto run = [&](Activation activation, DType dtype,
                       const std::vector<double>& g,
                       const std::vector<double>& u) {
    const auto n = static_cast<int64_t>(g.size());
    ActAndMulSpec spec = ActAndMulSpecOf(n, dtype, dtype);
    spec.activation = activation;
    const AnyMatrix gate(dtype, g, 1, n, n);
    const AnyMatrix up(dtype, u, 1, n, n);
    const AnyMatrix out(dtype, 1, n, n);
    Plan(spec).ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    return out.bits();
  };
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto together = run(activation, dtype, gates, ups);
      const auto apart = run(activation, dtype, gates_apart, ups_apart);
      // The NaN's payload is unspecified, because a product takes it from
      // either factor.
      const uint32_t sign = dtype == DType::kF32 ? 0x80000000u : 0x8000u;
      const uint32_t infinity = dtype == DType::kF32 ? 0x7f800000u : 0x7f80u;
      const auto is_nan = [&](uint32_t bits) {
        return (bits & ~sign) > infinity;
      };
      for (size_t i = 0; i < together.size(); ++i) {
        ASSERT_EQ(is_nan(together[i]), is_nan(apart[3 * i])) << gates[i];
        if (is_nan(together[i])) continue;
        ASSERT_EQ(together[i], apart[3 * i]) << gates[i] << " " << ups[i];
      }
    }
  }
}

TEST_P(ActAndMulTest, WorksInPlaceOnAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  struct Shape {
    int64_t rows, d;
  };
  // In the second shape, several workers share a row.
  for (const auto& [rows, d] : {Shape{61, 333}, Shape{2, 20011}}) {
    for (const DType dtype : kActAndMulTypes) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << d);
      const ActAndMulPlan plan = Plan(ActAndMulSpecOf(d, dtype, dtype));
      const auto values = ToDoubles(UniformReals(rng, rows * 2 * d, -5, 5));
      const AnyMatrix x(dtype, values, rows, 2 * d, 2 * d);
      const AnyMatrix one(dtype, rows, d, d);
      const AnyMatrix many(dtype, rows, d, d);
      EXPECT_NO_ALLOCATION(plan.Execute(x.view(), one.view(), executor_));
      EXPECT_NO_ALLOCATION(plan.Execute(x.view(), many.view(), **pool));
      EXPECT_EQ(one.bits(), many.bits());

      for (const int64_t half : {0, 1}) {
        const AnyMatrix y(dtype, values, rows, 2 * d, 2 * d);
        const AnyTensorView v = y.view();
        const AnyTensorView out(
            dtype,
            static_cast<char*>(v.mutable_data()) +
                half * d * static_cast<int64_t>(SizeOf(dtype)),
            2, {rows, d}, {2 * d, 1});
        ASSERT_EQ(plan.CheckArgs(v, out), absl::OkStatus());
        EXPECT_NO_ALLOCATION(plan.Execute(v, out, **pool));
        std::vector<uint32_t> got;
        const auto bits = y.bits();
        for (int64_t i = 0; i < rows * 2 * d; ++i) {
          if (i % (2 * d) / d == half)
            got.push_back(bits[static_cast<size_t>(i)]);
        }
        EXPECT_EQ(got, one.bits());
      }
    }
  }
}

TEST_P(ActAndMulTest, DoesNothingWithoutRows) {
  const ActAndMulPlan plan = Plan(ActAndMulSpecOf(4));
  const AnyTensorView x = DenseMatrix<const float>(nullptr, 0, 8);
  const AnyTensorView out = DenseMatrix<float>(nullptr, 0, 4);
  EXPECT_EQ(plan.CheckArgs(x, out), absl::OkStatus());
  plan.Execute(x, out, executor_);
}

}  // namespace
}  // namespace quern
