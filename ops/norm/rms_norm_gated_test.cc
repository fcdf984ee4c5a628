#include "quern/ops/norm/rms_norm_gated.h"

#include <cmath>
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
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

constexpr GateWhen kGates[] = {GateWhen::kNone, GateWhen::kNormFirst,
                               GateWhen::kGateFirst};

// The equation of the header, in double.
std::vector<double> Reference(const RmsNormGatedSpec& spec,
                              const std::vector<double>& x,
                              const std::vector<double>& z,
                              const std::vector<double>& weight) {
  const auto hidden = static_cast<size_t>(spec.hidden);
  const auto group = static_cast<size_t>(spec.group);
  const auto act = [&](double v) {
    const double sigmoid = 1 / (1 + std::exp(-v));
    return spec.activation == NormGate::kSilu ? v * sigmoid : sigmoid;
  };
  std::vector<double> out;
  for (size_t g = 0; g < x.size(); g += group) {
    std::vector<double> h(x.begin() + static_cast<int64_t>(g),
                          x.begin() + static_cast<int64_t>(g + group));
    double sum = 0;
    for (size_t i = 0; i < group; ++i) {
      if (spec.gate == GateWhen::kGateFirst) h[i] *= act(z[g + i]);
      sum += h[i] * h[i];
    }
    const double rms =
        std::sqrt(sum / static_cast<double>(group) + double{spec.eps});
    for (size_t i = 0; i < group; ++i) {
      double y = h[i] / rms * weight[(g + i) % hidden];
      if (spec.gate == GateWhen::kNormFirst) y *= act(z[g + i]);
      out.push_back(y);
    }
  }
  return out;
}

class RmsNormGatedTest : public IsaTest {
 protected:
  RmsNormGatedPlan Plan(const RmsNormGatedSpec& spec) {
    auto plan = RmsNormGatedPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(RmsNormGatedTest);

TEST_P(RmsNormGatedTest, AgreesWithTheReference) {
  TestRng rng;
  const int64_t shapes[][2] = {{1, 1},   {15, 5},    {17, 17},    {64, 16},
                               {96, 32}, {771, 257}, {1025, 1025}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const GateWhen gate : kGates) {
      for (const NormGate activation : {NormGate::kSilu, NormGate::kSigmoid}) {
        for (const auto& shape : shapes) {
          SCOPED_TRACE(testing::Message() << DTypeName(dtype) << shape[0]);
          RmsNormGatedSpec spec;
          spec.hidden = shape[0];
          spec.group = shape[1];
          spec.gate = gate;
          spec.activation = activation;
          spec.eps = shape[0] == 64 ? 0.5f : 1e-5f;
          spec.dtype = dtype;
          spec.weight_dtype = DType::kBF16;
          const RmsNormGatedPlan plan = Plan(spec);
          const int64_t rows = 3, n = spec.hidden;
          const auto reals = [&](int64_t count) {
            return ToDoubles(UniformReals(rng, count, -3, 3));
          };
          const AnyMatrix x(dtype, reals(rows * n), rows, n, n + 2);
          const AnyMatrix z(dtype, reals(rows * n), rows, n, n + 1);
          const AnyMatrix w(DType::kBF16, reals(n), 1, n, n);
          const AnyMatrix out(dtype, rows, n, n + 3);
          ASSERT_EQ(plan.CheckArgs(x.view(), z.view(), w.vector(), out.view()),
                    absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan.Execute(x.view(), z.view(), w.vector(),
                                            out.view(), executor_));
          // Relative error. The sum of squares has at most 64 additions in a
          // lane of a block, the additions of the block's lanes, and one per
          // block; the gates add 11 units each, twice in the sum of squares.
          // The root halves these errors. Six more roundings follow.
          const double relative =
              ((64 + 4 + 1 + static_cast<double>(n) / 256 + 2 * 12) / 2 + 12 +
               6) *
              0x1p-24;
          EXPECT_TRUE(
              AllWithin(out.doubles(),
                        Reference(spec, x.doubles(), z.doubles(), w.doubles()),
                        [&](double value, int64_t) {
                          return ResultBound(dtype, value, relative);
                        }));

          ManyWorkers many(3);
          const AnyTensorView in_place =
              gate == GateWhen::kNormFirst ? z.view() : x.view();
          ASSERT_EQ(plan.CheckArgs(x.view(), z.view(), w.vector(), in_place),
                    absl::OkStatus());
          plan.Execute(x.view(), z.view(), w.vector(), in_place, many);
          EXPECT_EQ((gate == GateWhen::kNormFirst ? z : x).bits(), out.bits());
        }
      }
    }
  }
}

TEST_P(RmsNormGatedTest, KeepsNaNInItsGroup) {
  RmsNormGatedSpec spec;
  spec.hidden = 4;
  spec.group = 2;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const AnyMatrix x(DType::kF32, {1, 2, 3, 4}, 1, 4, 4);
  const AnyMatrix z(DType::kF32, {1, nan, 1, 1}, 1, 4, 4);
  const AnyMatrix w(DType::kF32, {1, 1, 1, 1}, 1, 4, 4);
  const AnyMatrix out(DType::kF32, 1, 4, 4);
  Plan(spec).Execute(x.view(), z.view(), w.vector(), out.view(), executor_);
  const auto y = out.doubles();
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_TRUE(std::isfinite(y[2]) && std::isfinite(y[3]));
}

// Squares above 3.4e38 are no numbers of f32; their groups have a norm all the
// same.
TEST_P(RmsNormGatedTest, NormalisesGroupsWhoseSquaresOverflow) {
  for (const GateWhen gate : kGates) {
    RmsNormGatedSpec spec;
    spec.hidden = 4;
    spec.group = 2;
    spec.gate = gate;
    const AnyMatrix x(DType::kF32, {3e19, 4e19, 1, 2}, 1, 4, 4);
    const AnyMatrix z(DType::kF32, {2, 2, 1, -1}, 1, 4, 4);
    const AnyMatrix w(DType::kF32, {1, 2, 1, 1}, 1, 4, 4);
    const AnyMatrix out(DType::kF32, 1, 4, 4);
    Plan(spec).Execute(x.view(), z.view(), w.vector(), out.view(), executor_);
    EXPECT_TRUE(AllWithin(
        out.doubles(), Reference(spec, x.doubles(), z.doubles(), w.doubles()),
        [&](double value, int64_t) {
          return ResultBound(DType::kF32, value, 40 * 0x1p-24);
        }));
  }
}

TEST(RmsNormGatedPlanTest, Refuses) {
  struct Case {
    RmsNormGatedSpec spec;
    absl::StatusCode code;
    std::string words;
  };
  RmsNormGatedSpec good;
  good.hidden = 8;
  std::vector<Case> cases(
      5, {good, absl::StatusCode::kInvalidArgument, std::string()});
  cases[0].spec.hidden = 0;
  cases[0].words = "rms_norm_gated: hidden=0; need 1 <= hidden <= ";
  cases[1].spec.group = 3;
  cases[1].words = "group=3; need a divisor of hidden=8";
  cases[2].spec.group = 16;
  cases[2].words = "group=16; need 0 <= group <= 8";
  cases[3].spec.eps = -1;
  cases[3].words = "eps=-1; need finite eps >= 0";
  cases[4].spec.dtype = DType::kI8;
  cases[4].code = absl::StatusCode::kUnimplemented;
  cases[4].words = "dtype is i8; need f32 or bf16 or f16";
  for (const Case& c : cases) {
    const absl::Status status = RmsNormGatedPlan::Create(c.spec).status();
    EXPECT_EQ(status.code(), c.code);
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status;
  }
  const auto plan = RmsNormGatedPlan::Create(good);
  std::vector<float> x(64);
  const AnyTensorView a = DenseMatrix(x.data(), 2, 8);
  const AnyTensorView b = DenseMatrix(x.data() + 16, 2, 8);
  const AnyTensorView w = DenseVector(x.data() + 32, 8);
  EXPECT_EQ(plan->CheckArgs(a, b, w, a), absl::OkStatus());
  EXPECT_EQ(plan->CheckArgs(a, b, w, b), absl::OkStatus());
  const auto refused = [&](int64_t out, const std::string& words) {
    const absl::Status status =
        plan->CheckArgs(a, b, w, DenseMatrix(x.data() + out, 2, 8));
    EXPECT_NE(status.message().find(words), std::string::npos) << status;
  };
  refused(1, "out overlaps x");
  refused(17, "out overlaps weight");
  const absl::Status z = plan->CheckArgs(DenseMatrix(x.data() + 40, 2, 8), b,
                                         DenseVector(x.data() + 56, 8),
                                         DenseMatrix(x.data() + 17, 2, 8));
  EXPECT_NE(z.message().find("out overlaps z"), std::string::npos) << z;
}

}  // namespace
}  // namespace quern
