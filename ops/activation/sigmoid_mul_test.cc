#include "quern/ops/activation/sigmoid_mul.h"

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
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// The bounds of sigmoid_mul.h: ten units and one for the product.
constexpr double kRelative = 11 * 0x1p-24;
constexpr double kTiny = 0x1p-149;

SigmoidMulSpec Spec(int64_t d, int64_t gate_cols, DType x = DType::kF32,
                    DType gate = DType::kF32, DType out = DType::kF32) {
  SigmoidMulSpec spec;
  spec.d = d;
  spec.gate_cols = gate_cols;
  spec.x_dtype = x;
  spec.gate_dtype = gate;
  spec.out_dtype = out;
  return spec;
}

double Sigmoid(double g) { return 1 / (1 + std::exp(-g)); }

class SigmoidMulTest : public IsaTest {
 protected:
  SigmoidMulPlan Plan(const SigmoidMulSpec& spec) {
    auto plan = SigmoidMulPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(SigmoidMulTest);

// sigmoid(0) is 1 / 2 to the bit, and a gate of 40 or more passes all of x.
TEST_P(SigmoidMulTest, HalvesAtZeroAndPassesAllAboveForty) {
  const SigmoidMulPlan plan = Plan(Spec(4, 4));
  const AnyMatrix x(DType::kF32, {3, -5, 7, 11}, 1, 4, 4);
  const AnyMatrix gate(DType::kF32, {0, -0.0, 40, 1000}, 1, 4, 4);
  const AnyMatrix out(DType::kF32, 1, 4, 4);
  plan.Execute(x.view(), gate.view(), out.view(), executor_);
  EXPECT_EQ(out.doubles(), (std::vector<double>{1.5, -2.5, 7, 11}));
}

TEST_P(SigmoidMulTest, AgreesWithTheReference) {
  TestRng rng;
  const int64_t rows = 3;
  for (const DType x_dtype : kDTypes) {
    for (const DType gate_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        for (const int64_t d : {1, 7, 16, 17, 33, 256, 257, 521}) {
          for (const int64_t gate_cols : {d, int64_t{1}}) {
            SCOPED_TRACE(testing::Message()
                         << d << " " << gate_cols << " " << DTypeName(x_dtype)
                         << " " << DTypeName(gate_dtype) << " "
                         << DTypeName(out_dtype));
            const SigmoidMulPlan plan =
                Plan(Spec(d, gate_cols, x_dtype, gate_dtype, out_dtype));
            const AnyMatrix x(x_dtype,
                              ToDoubles(UniformReals(rng, rows * d, -9, 9)),
                              rows, d, d + 3, Edge::kEnd);
            const AnyMatrix gate(
                gate_dtype,
                ToDoubles(UniformReals(rng, rows * gate_cols, -9, 9)), rows,
                gate_cols, gate_cols + 2, Edge::kEnd);
            const AnyMatrix out(out_dtype, rows, d, d + 1, Edge::kBegin, 1);
            ASSERT_EQ(plan.CheckArgs(x.view(), gate.view(), out.view()),
                      absl::OkStatus());
            plan.Execute(x.view(), gate.view(), out.view(), executor_);
            std::vector<double> want = x.doubles();
            const std::vector<double> gates = gate.doubles();
            for (int64_t i = 0; i < rows * d; ++i) {
              const int64_t at = gate_cols == 1 ? i / d : i;
              want[static_cast<size_t>(i)] *=
                  Sigmoid(gates[static_cast<size_t>(at)]);
            }
            EXPECT_TRUE(
                AllWithin(out.doubles(), want, [&](double value, int64_t) {
                  return ResultBound(out_dtype, value, kRelative);
                }));
          }
        }
      }
    }
  }
}

// Every bf16 is a gate once: all magnitudes, both infinities and NaN.
TEST_P(SigmoidMulTest, IsAccurateForEveryMagnitude) {
  const int64_t d = 65536;
  std::vector<double> gates;
  for (uint32_t code = 0; code < 65536; ++code) {
    gates.push_back(ToDouble(FromBits<BFloat16>(code)));
  }
  const SigmoidMulPlan plan = Plan(Spec(d, d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  for (const double factor : {1.0, -3.0}) {
    const AnyMatrix x(DType::kF32, std::vector<double>(gates.size(), factor), 1,
                      d, d);
    const AnyMatrix out(DType::kF32, 1, d, d);
    plan.Execute(x.view(), gate.view(), out.view(), executor_);
    const std::vector<double> got = out.doubles();
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(gates[i])) {
        ASSERT_TRUE(std::isnan(got[i])) << i;
        continue;
      }
      const double want = factor * Sigmoid(gates[i]);
      ASSERT_LE(std::abs(got[i] - want),
                std::abs(want) * kRelative + (std::abs(factor) + 1) * kTiny)
          << gates[i];
    }
  }
}

// One gate of a row gives the bits of as many equal gates.
TEST_P(SigmoidMulTest, OneGateIsThatGateInEveryColumn) {
  TestRng rng;
  const int64_t rows = 5, d = 300;
  const AnyMatrix x(DType::kBF16, ToDoubles(UniformReals(rng, rows * d, -2, 2)),
                    rows, d, d);
  const auto values = ToDoubles(UniformReals(rng, rows, -4, 4));
  std::vector<double> repeated;
  for (const double v : values) repeated.insert(repeated.end(), d, v);
  const AnyMatrix one(DType::kF32, values, rows, 1, 1);
  const AnyMatrix all(DType::kF32, repeated, rows, d, d);
  const AnyMatrix by_one(DType::kBF16, rows, d, d);
  const AnyMatrix by_all(DType::kBF16, rows, d, d);
  Plan(Spec(d, 1, DType::kBF16, DType::kF32, DType::kBF16))
      .Execute(x.view(), one.view(), by_one.view(), executor_);
  Plan(Spec(d, d, DType::kBF16, DType::kF32, DType::kBF16))
      .Execute(x.view(), all.view(), by_all.view(), executor_);
  EXPECT_EQ(by_one.bits(), by_all.bits());
}

TEST_P(SigmoidMulTest, ANaNStaysWithItsElementOrItsRow) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const AnyMatrix x(DType::kF32, {1, kNaN, 1, 1, 1, 1}, 2, 3, 3);
  const AnyMatrix out(DType::kF32, 2, 3, 3);
  const auto nans = [&out] {
    std::string marks;
    for (const double v : out.doubles()) marks += std::isnan(v) ? 'n' : '.';
    return marks;
  };
  const AnyMatrix each(DType::kF32, {-kInf, 0, 0, kInf, 0, kNaN}, 2, 3, 3);
  Plan(Spec(3, 3)).Execute(x.view(), each.view(), out.view(), executor_);
  EXPECT_EQ(nans(), ".n...n");
  EXPECT_EQ(out.doubles()[0], 0);
  EXPECT_EQ(out.doubles()[3], 1);
  const AnyMatrix row(DType::kF32, {0, kNaN}, 2, 1, 1);
  Plan(Spec(3, 1)).Execute(x.view(), row.view(), out.view(), executor_);
  EXPECT_EQ(nans(), ".n.nnn");
}

TEST_P(SigmoidMulTest, WorksInPlaceOnAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t rows = 61, d = 1033;
  for (const DType dtype : kDTypes) {
    for (const int64_t gate_cols : {d, int64_t{1}}) {
      const SigmoidMulPlan plan =
          Plan(Spec(d, gate_cols, dtype, DType::kF32, dtype));
      const AnyMatrix x(dtype, ToDoubles(UniformReals(rng, rows * d, -5, 5)),
                        rows, d, d);
      const AnyMatrix gate(
          DType::kF32, ToDoubles(UniformReals(rng, rows * gate_cols, -5, 5)),
          rows, gate_cols, gate_cols);
      const AnyMatrix one(dtype, rows, d, d);
      EXPECT_NO_ALLOCATION(
          plan.Execute(x.view(), gate.view(), one.view(), executor_));
      const AnyMatrix many(dtype, rows, d, d + 1);
      plan.Execute(x.view(), gate.view(), many.view(), **pool);
      EXPECT_EQ(one.bits(), many.bits());
      ASSERT_EQ(plan.CheckArgs(x.view(), gate.view(), x.view()),
                absl::OkStatus());
      EXPECT_NO_ALLOCATION(
          plan.Execute(x.view(), gate.view(), x.view(), **pool));
      EXPECT_EQ(one.bits(), x.bits());
    }
  }
}

// The heads of x are columns of a wider row, and so are those of the gate.
TEST_P(SigmoidMulTest, TakesHeadsOfWiderRows) {
  TestRng rng;
  constexpr int64_t kTokens = 3, kHeads = 5, kDim = 24, kStride = 29;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  for (const DType dtype : kDTypes) {
    for (const int64_t gate_cols : {kDim, int64_t{1}}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << gate_cols);
      const int64_t width = kHeads * kStride + 7;
      const auto values = [&] {
        return ToDoubles(UniformReals(rng, kTokens * width, -4, 4));
      };
      const AnyMatrix x(dtype, values(), kTokens, width, width);
      const AnyMatrix gate(dtype, values(), kTokens, width, width + 1);
      const AnyMatrix out(dtype, kTokens, width, width + 2);
      const SigmoidMulPlan plan =
          Plan(Spec(kDim, gate_cols, dtype, dtype, dtype));
      const AnyTensorView xs = x.heads(kHeads, kDim, kStride);
      const AnyTensorView gates = gate.heads(kHeads, gate_cols, kStride - 3);
      const AnyTensorView outs = out.heads(kHeads, kDim, kStride);
      ASSERT_EQ(plan.CheckArgs(xs, gates, outs), absl::OkStatus());
      const std::vector<uint32_t> before = out.bits();
      plan.Execute(xs, gates, outs, **pool);
      const std::vector<uint32_t> after = out.bits();
      const std::vector<double> in = x.doubles(), g = gate.doubles(),
                                have = out.doubles();
      for (int64_t i = 0; i < kTokens * width; ++i) {
        const int64_t c = i % width, row = i - c, h = c / kStride;
        const auto at = static_cast<size_t>(i);
        if (c >= kHeads * kStride || c % kStride >= kDim) {
          ASSERT_EQ(after[at], before[at]) << i;
          continue;
        }
        const int64_t of_gate =
            row + h * (kStride - 3) + (gate_cols == 1 ? 0 : c % kStride);
        const double want = in[at] * Sigmoid(g[static_cast<size_t>(of_gate)]);
        ASSERT_LE(std::abs(have[at] - want),
                  ResultBound(dtype, want, kRelative))
            << i;
      }
      plan.Execute(xs, gates, xs, executor_);
      const std::vector<double> in_place = x.doubles();
      for (int64_t i = 0; i < kTokens * width; ++i) {
        const auto at = static_cast<size_t>(i);
        const int64_t c = i % width;
        const bool head = c < kHeads * kStride && c % kStride < kDim;
        ASSERT_EQ(in_place[at], head ? have[at] : in[at]) << i;
      }
    }
  }
  // One of the three is no tensor of heads, or of others.
  std::vector<float> memory(64);
  float* const m = memory.data();
  const auto plan = SigmoidMulPlan::Create(Spec(4, 4));
  ASSERT_TRUE(plan.ok());
  const AnyTensorView x = DenseTensor<float, 3>(m, {2, 2, 4});
  EXPECT_EQ(plan->CheckArgs(x, DenseTensor<float, 3>(m + 16, {2, 2, 4}), x),
            absl::OkStatus());
  EXPECT_FALSE(plan->CheckArgs(x, DenseMatrix(m + 16, 4, 4), x).ok());
  EXPECT_FALSE(
      plan->CheckArgs(x, DenseTensor<float, 3>(m + 16, {2, 1, 4}), x).ok());
  EXPECT_FALSE(plan->CheckArgs(x, DenseTensor<float, 3>(m + 16, {2, 2, 4}),
                               DenseMatrix(m + 32, 4, 4))
                   .ok());
}

TEST(SigmoidMulPlanTest, Refuses) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto expect = [](const absl::Status& status, absl::StatusCode code,
                         const std::string& words) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.message().find(words), std::string::npos) << status;
  };
  const struct {
    SigmoidMulSpec spec;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {Spec(0, 0), kInvalid, "sigmoid_mul: d=0; need 1 <= d"},
      {Spec(4, 2), kInvalid, "sigmoid_mul: gate_cols=2; need 1 or d=4"},
      {Spec(4, 4, DType::kI8), kUnimplemented, "x_dtype is i8; need f32"},
      {Spec(4, 4, DType::kF32, DType::kI8), kUnimplemented,
       "gate_dtype is i8; need f32"},
      {Spec(4, 4, DType::kF32, DType::kF32, DType::kI8), kUnimplemented,
       "out_dtype is i8; need f32"},
  };
  for (const auto& c : kCases) {
    expect(SigmoidMulPlan::Create(c.spec).status(), c.code, c.words);
  }

  const auto plan = SigmoidMulPlan::Create(Spec(4, 1));
  ASSERT_TRUE(plan.ok());
  std::vector<float> memory(64);
  float* const m = memory.data();
  const AnyTensorView x = DenseMatrix<const float>(m, 2, 4);
  const AnyTensorView gate = DenseMatrix<const float>(m + 16, 2, 1);
  const AnyTensorView out = DenseMatrix(m + 32, 2, 4);
  EXPECT_EQ(plan->CheckArgs(x, gate, out), absl::OkStatus());
  expect(plan->CheckArgs(x, DenseMatrix<const float>(m + 16, 2, 4), out),
         kInvalid, "sigmoid_mul: gate is [2, 4]; need [2, 1]");
  expect(plan->CheckArgs(x, gate, DenseMatrix(m + 32, 1, 4)), kInvalid,
         "sigmoid_mul: out is [1, 4]; need [2, 4]");
  expect(plan->CheckArgs(x, gate, DenseMatrix(m + 1, 2, 4)), kInvalid,
         "out overlaps x");
  expect(plan->CheckArgs(x, gate, DenseMatrix(m + 12, 2, 4)), kInvalid,
         "overlaps");
  const AnyTensorView none = DenseMatrix<const float>(nullptr, 0, 4);
  InlineExecutor executor;
  plan->Execute(none, DenseMatrix<const float>(nullptr, 0, 1),
                DenseMatrix<float>(nullptr, 0, 4), executor);
}

}  // namespace
}  // namespace quern
