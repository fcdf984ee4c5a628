#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/act_and_mul_testutil.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

TEST(ActAndMulRefusalTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto refused = [](const ActAndMulSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefusal(ActAndMulPlan::Create(spec).status(), code, words);
  };
  refused(ActAndMulSpecOf(0), kInvalid, "silu_and_mul: d=0; need 1 <= d");
  refused(ActAndMulSpecOf(int64_t{1} << 59), kInvalid, "d=576460752303423488");
  refused(ActAndMulSpecOf(8, DType::kI8), kUnimplemented,
          "x_dtype is i8; need f32 or bf16 or f16");
  refused(ActAndMulSpecOf(8, DType::kF32, DType::kI8), kUnimplemented,
          "out_dtype is i8; need f32 or bf16 or f16");
  ActAndMulSpec spec = ActAndMulSpecOf(8);
  spec.sparsity = 0.5;
  refused(spec, kUnimplemented, "silu_and_mul: sparsity=0.5; need gelu");
  spec.activation = Activation::kGelu;
  spec.sparsity = 1.5;
  refused(spec, kInvalid,
          "gelu_and_mul_sparse: sparsity=1.5; need 0 <= sparsity <= 1");
  spec = ActAndMulSpecOf(8);
  spec.activation = Activation::kSwigluOai;
  spec.params.limit = 0;
  refused(spec, kInvalid, "swigluoai_and_mul: limit=0; need limit > 0");
  spec.params.limit = 1;
  spec.params.alpha = -1;
  refused(spec, kInvalid, "alpha=-1; need 2^-32 <= alpha <= 2^32");
  spec.activation = Activation::kFatrelu;
  spec.params.threshold = std::numeric_limits<float>::quiet_NaN();
  refused(spec, kInvalid, "fatrelu_and_mul: threshold=nan; need a number");
}

TEST(ActAndMulRefusalTest, RefusesBadArguments) {
  const auto plan = ActAndMulPlan::Create(ActAndMulSpecOf(4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64), out(64);
  const AnyTensorView vx = DenseMatrix<const float>(x.data(), 2, 8);
  const AnyTensorView vout = DenseMatrix(out.data(), 2, 4);
  const AnyTensorView gate = DenseMatrix<const float>(x.data(), 2, 4);
  const AnyTensorView up = DenseMatrix<const float>(x.data() + 8, 2, 4);
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefusal(status, absl::StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(plan->CheckArgs(vx, vout), absl::OkStatus());
  EXPECT_EQ(plan->CheckSplitArgs(gate, up, vout), absl::OkStatus());
  refused(plan->CheckArgs(DenseMatrix<const float>(x.data(), 2, 7), vout),
          "x is [2, 7]; need [any, 8]");
  refused(plan->CheckArgs(vx, DenseMatrix(out.data(), 1, 4)),
          "out is [1, 4]; need [2, 4]");
  // A dense out in the memory of x is refused, because row 1 of out would lie
  // on the up half of row 0.
  refused(plan->CheckArgs(vx, DenseMatrix(x.data(), 2, 4)),
          "out overlaps the first half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 2, {2, 4}, {8, 1})),
          "out overlaps the first half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 5, {1, 4}, {8, 1})),
          "out is [1, 4]");
  refused(plan->CheckSplitArgs(gate, DenseMatrix<const float>(x.data(), 3, 4),
                               vout),
          "up is [3, 4]; need [2, 4]");
  refused(plan->CheckSplitArgs(gate, up, DenseMatrix(x.data() + 12, 2, 4)),
          "out overlaps up");
  // Interleaved pairs cannot be computed in place, because writing overtakes
  // reading.
  ActAndMulSpec pairs = ActAndMulSpecOf(4);
  pairs.order = GateOrder::kInterleaved;
  const auto interleaved = ActAndMulPlan::Create(pairs);
  ASSERT_TRUE(interleaved.ok()) << interleaved.status();
  refused(
      interleaved->CheckArgs(vx, MatrixView<float>(x.data(), {2, 4}, {8, 1})),
      "out overlaps x");
}

}  // namespace
}  // namespace quern
