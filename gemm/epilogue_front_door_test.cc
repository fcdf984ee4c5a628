// gemm/epilogue.h, through the front doors: what they refuse, and that they
// hand activation and residual on.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "gtest/gtest.h"
#include "quant/int8_quantize.h"
#include "testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

TEST(EpilogueRefusalTest, RefusesABadActivation) {
  InlineExecutor executor;
  std::vector<BF> w(15);
  std::vector<int8_t> w8(15);
  const float one = 1;
  const auto create = [&](Act act, LinearImpl impl) {
    LinearSpec spec;
    spec.n = 5;
    spec.k = 3;
    spec.activation = act;
    spec.impl = impl;
    return LinearPlan::Create(spec, DenseMatrix(w.data(), 5, 3),
                              AnyTensorView(), executor)
        .status();
  };
  const auto create_scaled = [&](Act act, LinearImpl impl) {
    ScaledLinearSpec spec;
    spec.n = 5;
    spec.k = 3;
    spec.activation = act;
    spec.impl = impl;
    return ScaledLinearPlan::Create(spec, DenseMatrix(w8.data(), 5, 3),
                                    DenseVector(&one, 1), AnyTensorView(),
                                    executor)
        .status();
  };
  ExpectRefusal(create(Act::kSiluAndMul, LinearImpl::kAuto), kInvalid,
                "packed_linear: n=5 is odd; activation silu_and_mul needs");
  ExpectRefusal(create_scaled(Act::kGeluAndMul, LinearImpl::kAuto), kInvalid,
                "packed_scaled_linear: n=5 is odd; activation gelu_and_mul");
  ExpectRefusal(create(static_cast<Act>(7), LinearImpl::kAuto), kInvalid,
                "packed_linear: activation=7; need 0 <= activation <= 6");
  ExpectRefusal(create(Act::kGelu, LinearImpl::kOneDnn), kUnimplemented,
                "linear: activation is gelu; oneDNN");
  ExpectRefusal(create_scaled(Act::kSilu, LinearImpl::kOneDnn), kUnimplemented,
                "scaled_linear: activation is silu; oneDNN");
}

TEST(EpilogueRefusalTest, RefusesABadResidual) {
  InlineExecutor executor;
  std::vector<BF> w(12), a(6), c(16), apart(8);
  std::vector<float> f32(8);
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  LinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  const auto create = [&] {
    auto plan = LinearPlan::Create(spec, DenseMatrix(w.data(), 4, 3),
                                   AnyTensorView(), executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  };
  const LinearPlan plan = create();
  EXPECT_EQ(plan.CheckArgs(in, out, out), absl::OkStatus());
  EXPECT_EQ(plan.CheckArgs(in, out, DenseMatrix(apart.data(), 2, 4)),
            absl::OkStatus());
  const auto refuse = [&](const AnyTensorView& residual,
                          const std::string& words) {
    ExpectRefusal(plan.CheckArgs(in, out, residual), kInvalid, words);
  };
  refuse(DenseMatrix(f32.data(), 2, 4), "residual is f32; need bf16");
  refuse(DenseMatrix(apart.data(), 4, 2), "residual is [4, 2]; need [2, 4]");
  refuse(DenseVector(apart.data(), 8), "residual is [8]; need [2, 4]");
  refuse(MatrixView<const BF>(nullptr, {2, 4}, {4, 1}), "residual is null");
  refuse(DenseMatrix(c.data() + 1, 2, 4), "c overlaps residual");
  refuse(MatrixView<BF>(c.data(), {2, 4}, {5, 1}), "c overlaps residual");

  spec.activation = Act::kSiluAndMul;
  ExpectRefusal(create().CheckArgs(in, out), kInvalid,
                "c is [2, 4]; need [2, 2]");
  EXPECT_EQ(create().CheckArgs(in, DenseMatrix(c.data(), 2, 2)),
            absl::OkStatus());
  spec.activation = Act::kNone;
  spec.impl = LinearImpl::kOneDnn;
  const LinearPlan onednn = create();
  EXPECT_EQ(onednn.CheckArgs(in, out), absl::OkStatus());
  ExpectRefusal(onednn.CheckArgs(in, out, out), kUnimplemented,
                "linear: residual is given; oneDNN");
}

TEST(EpilogueRefusalTest, ScaledLinearRefusesABadResidual) {
  InlineExecutor executor;
  std::vector<int8_t> w(12);
  std::vector<BF> a(6), c(9);
  const float one = 1;
  ScaledLinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  ScaledLinearArgs args;
  args.a = DenseMatrix(a.data(), 2, 3);
  args.c = DenseMatrix(c.data(), 2, 4);
  for (const auto impl : {LinearImpl::kPacked, LinearImpl::kOneDnn}) {
    spec.impl = impl;
    const auto plan = ScaledLinearPlan::Create(
        spec, DenseMatrix(w.data(), 4, 3), DenseVector(&one, 1),
        AnyTensorView(), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    args.residual = AnyTensorView();
    EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
    args.residual = args.c;
    if (impl == LinearImpl::kOneDnn) {
      ExpectRefusal(plan->CheckArgs(args), kUnimplemented,
                    "scaled_linear: residual is given; oneDNN");
      continue;
    }
    EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
    args.residual = DenseMatrix(c.data() + 1, 2, 4);
    ExpectRefusal(plan->CheckArgs(args), kInvalid, "c overlaps residual");
  }
}

// The front doors hand activation and residual on.
TEST(EpilogueFrontDoorTest, AddsToCAfterTheActivation) {
  InlineExecutor executor;
  const std::vector<float> w = {50, -200, 3, 4};  // gate: 50, -200; up: 3, 4
  const std::vector<float> a = {1};
  std::vector<float> c = {7, 9};
  const auto out = DenseMatrix(c.data(), 1, 2);
  LinearSpec spec;
  spec.n = 4;
  spec.k = 1;
  spec.a = spec.b = spec.c = DType::kF32;
  spec.activation = Act::kSiluAndMul;
  auto plan = LinearPlan::Create(spec, DenseMatrix(w.data(), 4, 1),
                                 AnyTensorView(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  LinearScratch scratch;
  ASSERT_TRUE(scratch.Reserve(*plan, 1, executor).ok());
  plan->Execute(DenseMatrix(a.data(), 1, 1), out, out, scratch, executor);
  EXPECT_EQ(c, (std::vector<float>{157, 9}));

  const std::vector<int8_t> w8 = {50, -128, 3, 4}, q = {2};
  const float half = 0.5f;
  ScaledLinearSpec scaled;
  scaled.n = 4;
  scaled.k = 1;
  scaled.a = DType::kI8;
  scaled.c = DType::kF32;
  scaled.granularity = Int8Granularity::kPerTensor;
  scaled.activation = Act::kSiluAndMul;
  auto scaled_plan = ScaledLinearPlan::Create(
      scaled, DenseMatrix(w8.data(), 4, 1), DenseVector(&half, 1),
      AnyTensorView(), executor);
  ASSERT_TRUE(scaled_plan.ok()) << scaled_plan.status();
  ASSERT_TRUE(scratch.Reserve(*scaled_plan, 1, executor).ok());
  ScaledLinearArgs args;
  args.a = DenseMatrix(q.data(), 1, 1);
  args.c = args.residual = out;
  scaled_plan->Execute(args, scratch, executor);
  EXPECT_EQ(c, (std::vector<float>{307, 9}));
}

}  // namespace
}  // namespace quern
