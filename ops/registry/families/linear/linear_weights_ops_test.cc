// linear by name, on weights of every format: simd must have the bits of
// LinearPlan, and the reference must agree with it.

#include "quern/ops/registry/families/linear/linear_weights_ops.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

template <typename T>
AnyTensorView Matrix(std::vector<T>& data, int64_t cols) {
  return DenseMatrix(data.data(), static_cast<int64_t>(data.size()) / cols,
                     cols);
}

class LinearWeightsOpsTest : public OpFixture {
 protected:
  LinearWeightsOpsTest() {
    EXPECT_EQ(RegisterLinearWeightsOps(registry_), absl::OkStatus());
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(LinearWeightsOpsTest);

// Every weight is an integer times a power of two, so that the reference and
// the kernels compute the same sums.
TEST_P(LinearWeightsOpsTest, HasTheBitsOfThePlanInEveryFormat) {
  Shape shape;
  shape.m = 3;
  shape.n = 48;
  shape.k = 96;
  for (const WeightCase& format : kEveryFormat) {
    for (const bool with_bias : {false, true}) {
      shape.bias = with_bias;
      SCOPED_TRACE(testing::Message() << format << " bias " << with_bias);
      const LinearWeights weights =
          ExactWeights(rng_, format, shape).Pack(executor_);
      Floats x = SmallIntegers<float>(rng_, shape.m * shape.k, -4, 4);
      // For W8A8: a row whose largest element is 127 has a scale of 1.
      for (int64_t t = 0; t < shape.m; ++t) {
        x[static_cast<size_t>(t * shape.k)] = 127;
      }
      Floats want(static_cast<size_t>(shape.m * shape.n));
      LinearSpec spec;
      spec.a = spec.c = DType::kF32;
      spec.kernels = "packed";
      const auto plan = LinearPlan::Create(spec, weights, executor_);
      ASSERT_TRUE(plan.ok()) << plan.status();
      auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(shape.m, 1));
      plan->Execute({Matrix(x, shape.k), Matrix(want, shape.n)},
                    Workspace(*memory), executor_);
      for (const char* provider : {"simd", "reference"}) {
        Floats got(want.size(), -1);
        const MadeOp op =
            Make(provider, "linear",
                 {{"x", TensorMeta{DType::kF32, {shape.m, shape.k}}},
                  {"weights", &weights}});
        Run(op, {{"x", Matrix(x, shape.k)}, {"out", Matrix(got, shape.n)}});
        EXPECT_EQ(got, want) << provider;
      }
    }
  }
}

TEST_P(LinearWeightsOpsTest, RoundsRowsOfInt4AsThePlanDoes) {
  Shape shape;
  shape.m = 3;
  shape.n = 48;
  shape.k = 96;
  const LinearWeights weights =
      RealWeights(rng_, {WeightFormat::kI4Group, WeightLayout::kNK, true},
                  shape)
          .Pack(executor_);
  Floats x = UniformReals<float>(rng_, shape.m * shape.k);
  LinearSpec spec;
  spec.a = spec.c = DType::kF32;
  std::vector<Floats> products;
  for (const auto activations :
       {LinearActivations::kExact, LinearActivations::kInt8Blocks}) {
    spec.activations = activations;
    const auto plan = LinearPlan::Create(spec, weights, executor_);
    ASSERT_EQ(plan.status(), absl::OkStatus());
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(shape.m, 1));
    Floats want(static_cast<size_t>(shape.m * shape.n));
    plan->Execute({Matrix(x, shape.k), Matrix(want, shape.n)},
                  Workspace(*memory), executor_);
    Floats got(want.size(), -1);
    const bool exact = activations == LinearActivations::kExact;
    Run(Make("simd", "linear",
             {{"x", TensorMeta{DType::kF32, {shape.m, shape.k}}},
              {"weights", &weights},
              {"activations", exact ? "exact" : "int8_blocks"}}),
        {{"x", Matrix(x, shape.k)}, {"out", Matrix(got, shape.n)}});
    EXPECT_EQ(got, want);
    products.push_back(got);
  }
  EXPECT_NE(products[0], products[1]);
}

TEST_P(LinearWeightsOpsTest, AddsToTheResidualAndActivates) {
  Shape shape;
  shape.m = 3;
  shape.n = 64;
  shape.k = 32;
  struct Case {
    LinearActivation activation;
    bool residual;
  };
  for (const Case& c : {Case{LinearActivation::kNone, true},
                        Case{LinearActivation::kGelu, false},
                        Case{LinearActivation::kSiluAndMul, false},
                        Case{LinearActivation::kGeluTanhAndMul, true}}) {
    SCOPED_TRACE(LinearActivationName(c.activation));
    shape.act = c.activation;
    const LinearWeights weights =
        RealWeights(rng_, {WeightFormat::kBF16}, shape).Pack(executor_);
    std::vector<BFloat16> x =
        UniformReals<BFloat16>(rng_, shape.m * shape.k, -1, 1);
    const int64_t cols = shape.cols();
    const Floats stream = UniformReals<float>(rng_, shape.m * cols, -3, 3);
    Floats want = stream;
    LinearSpec spec;
    spec.c = DType::kF32;
    spec.activation = c.activation;
    spec.residual = c.residual;
    const auto plan = LinearPlan::Create(spec, weights, executor_);
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(shape.m, 1));
    const AnyTensorView residual =
        c.residual ? Matrix(want, cols) : AnyTensorView();
    plan->Execute({Matrix(x, shape.k), Matrix(want, cols), residual},
                  Workspace(*memory), executor_);
    for (const char* provider : {"simd", "reference"}) {
      Floats got = stream;
      NamedArgs args = {{"x", TensorMeta{DType::kBF16, {shape.m, shape.k}}},
                        {"weights", &weights},
                        {"activation", LinearActivationName(c.activation)},
                        {"out_dtype", c.residual ? "" : "f32"}};
      std::vector<NamedTensor> named = {{"x", Matrix(x, shape.k)},
                                        {"out", Matrix(got, cols)}};
      if (c.residual) {
        args.emplace_back("residual", TensorMeta{DType::kF32, {shape.m, cols}});
        named.emplace_back("residual", Matrix(got, cols));
      }
      Run(Make(provider, "linear", args), named);
      for (size_t i = 0; i < got.size(); ++i) {
        // Error of sums of 32 products below 1, plus what gemm/epilogue.h
        // allows.
        EXPECT_NEAR(got[i], want[i], provider[0] == 's' ? 0 : 1e-3) << i;
      }
    }
  }
}

TEST_P(LinearWeightsOpsTest, RefusesByName) {
  Shape shape;
  shape.n = shape.k = 32;
  const LinearWeights weights =
      ExactWeights(rng_, {WeightFormat::kBF16}, shape).Pack(executor_);
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta x = {DType::kF32, {2, 32}};
  const auto refusal = [&](const NamedArgs& args) {
    return ops.Make("linear", args).status();
  };
  const KvLayout layout;
  ExpectRefusal(refusal({{"x", x}}),
                "linear: weights is missing; need LinearWeights");
  ExpectRefusal(refusal({{"x", x}, {"weights", &layout}}),
                "linear: weights is KvLayout; need LinearWeights");
  const LinearWeights* const none = nullptr;
  ExpectRefusal(refusal({{"x", x}, {"weights", none}}),
                "linear: weights is null; need LinearWeights");
  ExpectRefusal(
      refusal({{"x", TensorMeta{DType::kF32, {2, 31}}}, {"weights", &weights}}),
      "linear: x is f32[2, 31]; need [.., 32]");
  ExpectRefusal(
      refusal({{"x", x}, {"weights", &weights}, {"activation", "relu"}}),
      "activation=\"relu\"; need \"none\", \"silu\", \"gelu\"");
  ExpectRefusal(
      refusal({{"x", TensorMeta{DType::kI8, {2, 32}}}, {"weights", &weights}}),
      absl::StatusCode::kUnimplemented, "linear: x is i8");
  ExpectRefusal(refusal({{"x", x},
                         {"weights", &weights},
                         {"residual", TensorMeta{DType::kF32, {2, 16}}}}),
                "residual is f32[2, 16]; need f32[2, 32], as the result is");
  ExpectRefusal(
      refusal({{"x", x}, {"weights", &weights}, {"activations", "int8"}}),
      "linear: activations=\"int8\"; need \"exact\" or \"int8_blocks\"");
  ExpectRefusal(
      refusal(
          {{"x", x}, {"weights", &weights}, {"activations", "int8_blocks"}}),
      absl::StatusCode::kUnimplemented,
      "activations=int8_blocks with weights of bf16");
  // The residual and the result share one view.
  const MadeOp op = Make("simd", "linear",
                         {{"x", x}, {"weights", &weights}, {"residual", x}});
  Floats a(64), b(64), c(64);
  ExpectRefusal(op.CheckArgs({Matrix(a, 32), Matrix(b, 32), Matrix(c, 32)}),
                "the result is not where the residual is");
  EXPECT_EQ(op.CheckArgs({Matrix(a, 32), Matrix(b, 32), Matrix(b, 32)}),
            absl::OkStatus());
}

TEST_P(LinearWeightsOpsTest, StaysEnabledUnlessItIsNamed) {
  Shape shape;
  shape.n = shape.k = 32;
  const LinearWeights weights =
      ExactWeights(rng_, {WeightFormat::kBF16}, shape).Pack(executor_);
  const NamedArgs args = {{"x", TensorMeta{DType::kF32, {2, 32}}},
                          {"weights", &weights}};
  const OpDispatcher none(registry_, *OpPolicy::Parse("none"));
  const auto kept = none.Make("linear", args);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->provider, "simd");
  EXPECT_RAN_ON(*kept->op);
  const OpDispatcher without(registry_, *OpPolicy::Parse("-linear"));
  EXPECT_EQ(without.Make("linear", args)->provider, "reference");
}

}  // namespace
}  // namespace quern
