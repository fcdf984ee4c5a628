#include "quern/ops/registry/families/rows/gate_ops.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

class GateOpsTest : public ::testing::Test {
 protected:
  GateOpsTest() { EXPECT_EQ(RegisterGateOps(registry_), absl::OkStatus()); }

  OpRegistry registry_;
  InlineExecutor executor_;
};

// A gate of 0 halves, which every dtype represents.
TEST_F(GateOpsTest, TakesHeadsAndOneGateForEach) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta x = {DType::kF32, {2, 3, 4}};
  for (const char* provider : {"simd", "reference"}) {
    for (const int64_t gate_cols : {1, 4}) {
      SCOPED_TRACE(std::string(provider) + " " + std::to_string(gate_cols));
      const auto made = ops.MakeFrom(
          provider, "sigmoid_mul",
          {{"x", x}, {"gate", TensorMeta{DType::kF32, {2, 3, gate_cols}}}});
      ASSERT_TRUE(made.ok()) << made.status();
      std::vector<float> values, want;
      // The gates of odd heads pass everything.
      std::vector<float> gates;
      for (int i = 0; i < 24; ++i) {
        values.push_back(static_cast<float>(i - 11));
        const bool passes = i / 4 % 2 == 1;
        want.push_back(passes ? values.back() : values.back() / 2);
        if (i % 4 < gate_cols) gates.push_back(passes ? 200.0f : 0.0f);
      }
      std::vector<float> out(24, -1);
      const std::vector<AnyTensorView> tensors = {
          TensorView<const float, 3>(values.data(), {2, 3, 4}, {12, 4, 1}),
          TensorView<const float, 3>(gates.data(), {2, 3, gate_cols},
                                     {3 * gate_cols, gate_cols, 1}),
          TensorView<float, 3>(out.data(), {2, 3, 4}, {12, 4, 1})};
      ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
      made->op->Execute(tensors, Workspace(), executor_);
      EXPECT_EQ(out, want);
    }
  }
}

TEST_F(GateOpsTest, RoundsToOutDtype) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta x = {DType::kF32, {1, 2}};
  const auto made =
      ops.Make("sigmoid_mul", {{"x", x}, {"gate", x}, {"out_dtype", "bf16"}});
  ASSERT_TRUE(made.ok()) << made.status();
  std::vector<float> values = {2, -6}, gates = {0, 0};
  std::vector<BFloat16> out(2);
  made->op->Execute({DenseMatrix<const float>(values.data(), 1, 2),
                     DenseMatrix<const float>(gates.data(), 1, 2),
                     DenseMatrix(out.data(), 1, 2)},
                    Workspace(), executor_);
  EXPECT_EQ(out[0].bits, 0x3f80);
  EXPECT_EQ(out[1].bits, 0xc040);
}

TEST_F(GateOpsTest, Refuses) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta x = {DType::kF32, {2, 4}};
  const struct {
    TensorMeta x, gate;
    const char* out_dtype;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {{DType::kF32, {}},
       x,
       "",
       absl::StatusCode::kInvalidArgument,
       "sigmoid_mul: x has rank 0"},
      {x,
       {DType::kF32, {2, 2}},
       "",
       absl::StatusCode::kInvalidArgument,
       "sigmoid_mul: gate is f32[2, 2] and x is "},
      {x,
       {DType::kF32, {4}},
       "",
       absl::StatusCode::kInvalidArgument,
       "need the shape of x, or 1 in place of its last extent, 4"},
      {x, x, "f33", absl::StatusCode::kInvalidArgument, "out_dtype"},
      {x, x, "i8", absl::StatusCode::kUnimplemented, "out_dtype is i8"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        ops.Make("sigmoid_mul", {{"x", c.x},
                                 {"gate", c.gate},
                                 {"out_dtype", std::string(c.out_dtype)}})
            .status();
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.words));
  }
}

}  // namespace
}  // namespace quern
