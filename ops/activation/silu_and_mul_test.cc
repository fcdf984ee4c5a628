#include "ops/activation/silu_and_mul.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/hwy_executor.h"
#include "core/tensor_view.h"
#include "gtest/gtest.h"
#include "ops/any_matrix_testutil.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_activation.h"
#include "testing/reference_convert.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 769};

// The header's 10 units, and one for the product with up.
const double kRelative = 11 * std::ldexp(1.0, -24);
// Where e^gate is below the normal numbers: half a unit of 2^-149 each in it,
// times at most 128, and in the products.
const double kDenormal = 140 * std::ldexp(1.0, -149);

SiluAndMulSpec Spec(int64_t d, DType x = DType::kF32, DType out = DType::kF32) {
  SiluAndMulSpec spec;
  spec.d = d;
  spec.x_dtype = x;
  spec.out_dtype = out;
  return spec;
}

class SiluAndMulTest : public IsaTest {
 protected:
  SiluAndMulPlan Plan(const SiluAndMulSpec& spec) {
    auto plan = SiluAndMulPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(SiluAndMulTest);

TEST_P(SiluAndMulTest, AgreesWithTheReference) {
  TestRng rng;
  for (const DType x_dtype : kDTypes) {
    for (const DType out_dtype : kDTypes) {
      for (const int64_t d : kWidths) {
        SCOPED_TRACE(testing::Message() << d << " " << DTypeName(x_dtype) << " "
                                        << DTypeName(out_dtype));
        const int64_t rows = 3;
        const SiluAndMulPlan plan = Plan(Spec(d, x_dtype, out_dtype));
        const AnyMatrix x(x_dtype,
                          ToDoubles(UniformReals(rng, rows * 2 * d, -9, 9)),
                          rows, 2 * d, 2 * d + 3, Edge::kEnd);
        const AnyMatrix out(out_dtype, rows, d, d + 1, Edge::kBegin, 1);
        ASSERT_EQ(plan.CheckArgs(x.view(), out.view()), absl::OkStatus());
        plan.Execute(x.view(), out.view(), executor_);
        EXPECT_TRUE(AllWithin(out.doubles(),
                              ReferenceSiluAndMul(rows, d, x.doubles()),
                              [&](double value, int64_t) {
                                return ResultBound(out_dtype, value, kRelative);
                              }));

        // As two views, with other strides: the same bits.
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

// Every bf16 as gate: all magnitudes, both infinities, NaN.
TEST_P(SiluAndMulTest, IsAccurateForEveryMagnitude) {
  const int64_t d = 65536;
  std::vector<double> gates, want;
  for (uint32_t code = 0; code < 65536; ++code) {
    const double gate = ToDouble(FromBits<BFloat16>(code));
    gates.push_back(gate);
    want.push_back(gate < -1e30 ? -0.0 : ReferenceSilu(gate));
  }
  const SiluAndMulPlan plan = Plan(Spec(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::isfinite(value) ? std::abs(value) * kRelative + kDenormal : 0.0;
  }));
  // Not even an underflow loses the sign.
  const auto got = out.doubles();
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isnan(got[i])) {
      ASSERT_EQ(std::signbit(got[i]), std::signbit(gates[i])) << gates[i];
    }
  }
}

// The error is of the unrounded f32; a dense sweep finds more than bf16 has.
TEST_P(SiluAndMulTest, IsAccurateBetweenTheBFloat16s) {
  const int64_t d = 200000;
  std::vector<double> gates, want;
  for (int64_t i = 0; i < d; ++i) {
    gates.push_back(
        ToDouble(FromDouble<float>(-110.0 + static_cast<double>(i) * 0.0011)));
    want.push_back(ReferenceSilu(gates.back()));
  }
  const SiluAndMulPlan plan = Plan(Spec(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::abs(value) * kRelative + kDenormal;
  }));
}

TEST_P(SiluAndMulTest, PropagatesNaNAndHasALimitAtMinusInfinity) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kDTypes) {
    const SiluAndMulPlan plan = Plan(Spec(6, dtype, dtype));
    const AnyMatrix gate(dtype, {-kInf, kNaN, 1, kInf, 0, -kInf}, 1, 6, 6);
    const AnyMatrix up(dtype, {2, 1, kNaN, -1, 5, -3}, 1, 6, 6);
    const AnyMatrix out(dtype, 1, 6, 6);
    plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    const auto y = out.doubles();
    EXPECT_TRUE(y[0] == 0.0 && std::signbit(y[0])) << y[0];
    EXPECT_TRUE(std::isnan(y[1]));
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[3], -kInf);
    EXPECT_EQ(y[4], 0.0);
    EXPECT_TRUE(y[5] == 0.0 && !std::signbit(y[5])) << y[5];
  }
}

TEST_P(SiluAndMulTest, ReproducesTheGoldenVectors) {
  std::vector<double> x;
  for (const uint32_t code :
       {0xc098, 0xc013, 0xbf8d, 0xbeaa, 0x0000, 0x3d91, 0x3f45,
        0x3ff3, 0x4053, 0x40d6, 0x3fa6, 0xbf33, 0x400d, 0x3f69,
        0xbfda, 0x4046, 0xbee6, 0x3f89, 0xc026, 0x3f17}) {
    x.push_back(ToDouble(FromBits<BFloat16>(code)));
  }
  const AnyMatrix mx(DType::kBF16, x, 1, 20, 20);
  const AnyMatrix out(DType::kBF16, 1, 10, 10);
  Plan(Spec(10, DType::kBF16, DType::kBF16))
      .Execute(mx.view(), out.view(), executor_);
  EXPECT_EQ(out.bits(),
            (std::vector<uint32_t>{0xbd58, 0x3e16, 0xbf1b, 0xbe01, 0x8000,
                                   0x3de8, 0xbe72, 0x3fe2, 0xc104, 0x407c}));
}

TEST_P(SiluAndMulTest, WorksInPlaceOnAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3);
  ASSERT_TRUE(pool.ok());
  // Threads allocate while they start.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t rows = 61, d = 333;
  for (const DType dtype : kDTypes) {
    const SiluAndMulPlan plan = Plan(Spec(d, dtype, dtype));
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

TEST_P(SiluAndMulTest, DoesNothingWithoutRows) {
  const SiluAndMulPlan plan = Plan(Spec(4));
  const AnyTensorView x = DenseMatrix<const float>(nullptr, 0, 8);
  const AnyTensorView out = DenseMatrix<float>(nullptr, 0, 4);
  EXPECT_EQ(plan.CheckArgs(x, out), absl::OkStatus());
  plan.Execute(x, out, executor_);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(SiluAndMulPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  ExpectRefused(SiluAndMulPlan::Create(Spec(0)).status(), kInvalid,
                "silu_and_mul: d=0; need 1 <= d");
  ExpectRefused(SiluAndMulPlan::Create(Spec(int64_t{1} << 62)).status(),
                kInvalid, "d=4611686018427387904");
  ExpectRefused(SiluAndMulPlan::Create(Spec(8, DType::kF16)).status(),
                kUnimplemented, "x_dtype is f16; need f32 or bf16");
  ExpectRefused(
      SiluAndMulPlan::Create(Spec(8, DType::kF32, DType::kI8)).status(),
      kUnimplemented, "out_dtype is i8; need f32 or bf16");
}

TEST(SiluAndMulPlanTest, RefusesBadArguments) {
  const auto plan = SiluAndMulPlan::Create(Spec(4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64), out(64);
  const AnyTensorView vx = DenseMatrix<const float>(x.data(), 2, 8);
  const AnyTensorView vout = DenseMatrix(out.data(), 2, 4);
  const AnyTensorView gate = DenseMatrix<const float>(x.data(), 2, 4);
  const AnyTensorView up = DenseMatrix<const float>(x.data() + 8, 2, 4);
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefused(status, absl::StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(plan->CheckArgs(vx, vout), absl::OkStatus());
  EXPECT_EQ(plan->CheckSplitArgs(gate, up, vout), absl::OkStatus());
  refused(plan->CheckArgs(DenseMatrix<const float>(x.data(), 2, 7), vout),
          "x is [2, 7]; need [any, 8]");
  refused(plan->CheckArgs(vx, DenseMatrix(out.data(), 1, 4)),
          "out is [1, 4]; need [2, 4]");
  // Dense rows in the memory of x: row 1 of out is the up half of row 0.
  refused(plan->CheckArgs(vx, DenseMatrix(x.data(), 2, 4)),
          "out overlaps the gate half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 2, {2, 4}, {8, 1})),
          "out overlaps the gate half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 5, {1, 4}, {8, 1})),
          "out is [1, 4]");
  refused(plan->CheckSplitArgs(gate, DenseMatrix<const float>(x.data(), 3, 4),
                               vout),
          "up is [3, 4]; need [2, 4]");
  refused(plan->CheckSplitArgs(gate, up, DenseMatrix(x.data() + 12, 2, 4)),
          "out overlaps up");
}

}  // namespace
}  // namespace quern
