// kSwigluOai of ops/activation/act_and_mul.h, whose bound grows with |alpha g|.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_activation.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 256, 257, 769};
// activation_spec.h: absolute, where the exponential is a denormal.
constexpr double kTiny = 140 * 0x1p-149;

ActAndMulSpec Spec(int64_t d, DType dtype) {
  ActAndMulSpec spec;
  spec.d = d;
  spec.x_dtype = spec.out_dtype = dtype;
  spec.activation = Activation::kSwigluOai;
  return spec;
}

class SwigluOaiAndMulTest : public IsaTest {
 protected:
  ActAndMulPlan Plan(const ActAndMulSpec& spec) {
    auto plan = ActAndMulPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(SwigluOaiAndMulTest);

TEST_P(SwigluOaiAndMulTest, AgreesWithTheReferenceInEveryOrder) {
  TestRng rng;
  for (const DType dtype : kDTypes) {
    for (const int64_t d : kWidths) {
      SCOPED_TRACE(testing::Message() << d << " " << DTypeName(dtype));
      const int64_t rows = 3;
      const AnyMatrix x(dtype,
                        ToDoubles(UniformReals(rng, rows * 2 * d, -12, 12)),
                        rows, 2 * d, 2 * d + 1, Edge::kEnd);
      const std::vector<double> values = x.doubles();
      for (const GateOrder order :
           {GateOrder::kGateFirst, GateOrder::kGateSecond,
            GateOrder::kInterleaved}) {
        ActAndMulSpec spec = Spec(d, dtype);
        spec.order = order;
        const AnyMatrix out(dtype, rows, d, d + 3, Edge::kEnd);
        ASSERT_EQ(Plan(spec).CheckArgs(x.view(), out.view()), absl::OkStatus());
        Plan(spec).Execute(x.view(), out.view(), executor_);
        std::vector<double> want;
        for (int64_t i = 0; i < rows * d; ++i) {
          const int64_t row = i / d * 2 * d, c = i % d;
          int64_t gate = row + c, up = row + d + c;
          if (order == GateOrder::kGateSecond) std::swap(gate, up);
          if (order == GateOrder::kInterleaved) {
            gate = row + 2 * c;
            up = gate + 1;
          }
          want.push_back(ReferenceSwigluOai(values[static_cast<size_t>(gate)],
                                            values[static_cast<size_t>(up)],
                                            double{spec.params.alpha}, 7));
        }
        // Relative error: the activation's, by activation_spec.h, and a unit
        // each for up + 1 and the product.
        const double relative = (12 + 1.3 * 1.702 * 12) * 0x1p-24;
        EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double value, int64_t) {
          return ResultBound(dtype, value, relative);
        }));
      }
    }
  }
}

TEST_P(SwigluOaiAndMulTest, IsAccurateFarBelowZero) {
  TestRng rng;
  constexpr int64_t kWidth = 20000;
  // Gates whose product with alpha is just beyond -64 have the largest error.
  std::vector<double> values =
      ToDoubles(UniformReals(rng, kWidth / 2, -75, -18));
  for (const double v :
       ToDoubles(UniformReals(rng, kWidth / 2, -38.5, -37.6))) {
    values.push_back(v);
  }
  for (const double v : ToDoubles(UniformReals(rng, kWidth, -7, 7))) {
    values.push_back(v);
  }
  const AnyMatrix x(DType::kF32, values, 1, 2 * kWidth, 2 * kWidth);
  const AnyMatrix out(DType::kF32, 1, kWidth, kWidth);
  const ActAndMulSpec spec = Spec(kWidth, DType::kF32);
  Plan(spec).Execute(x.view(), out.view(), executor_);
  const double alpha = double{spec.params.alpha};
  const auto gate = [&](int64_t i) { return values[static_cast<size_t>(i)]; };
  std::vector<double> want;
  for (int64_t i = 0; i < kWidth; ++i) {
    want.push_back(ReferenceSwigluOai(gate(i), gate(kWidth + i), alpha, 7));
  }
  EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double y, int64_t i) {
    const double size = std::min(std::abs(alpha * gate(i)), 128.0);
    return std::abs(y) * (12 + 1.3 * size) * 0x1p-24 + 8 * kTiny;
  }));
}

}  // namespace
}  // namespace quern
