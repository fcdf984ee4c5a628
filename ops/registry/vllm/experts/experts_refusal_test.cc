// What vLLM's mixture of experts refuses when it is made.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/vllm/experts/experts_ops.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

TEST(VllmExpertsRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterVllmExpertsOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const NamedArgs good = {{"output", TensorMeta{DType::kF32, {2, 16}}},
                          {"input", TensorMeta{DType::kF32, {2, 16}}},
                          {"w13", TensorMeta{DType::kF32, {3, 32, 16}}},
                          {"w2", TensorMeta{DType::kF32, {3, 16, 16}}},
                          {"topk_weights", TensorMeta{DType::kF32, {2, 2}}},
                          {"topk_id", TensorMeta{DType::kI32, {2, 2}}}};
  ASSERT_TRUE(ops.Make("cpu_fused_moe", good).ok());
  const struct {
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"w13", TensorMeta{DType::kF32, {3, 48, 16}},
       "rows of w13 for an expert=48; need 32, as twice the columns of w2"},
      {"w2", TensorMeta{DType::kF32, {2, 16, 16}}, "w2 is f32[2, 16, 16]"},
      {"w2", TensorMeta{DType::kBF16, {3, 16, 16}}, "w2 is bf16"},
      {"w13_bias", TensorMeta{DType::kF32, {3, 16}}, "w13_bias is f32[3, 16]"},
      {"topk_id", TensorMeta{DType::kI32, {2, 3}}, "topk_id is i32[2, 3]"},
      {"skip_weighted", true, "skip_weighted is set for 2 experts"},
      {"act", "relu", "act=\"relu\"; need \"silu\""},
      {"isa", "neon", "isa=\"neon\"; need \"vec\" or \"amx\""},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("cpu_fused_moe", args).status(), refused.words);
  }
  ExpectRefusal(
      ops.Make("prepack_moe_weight",
               {{"weight", TensorMeta{DType::kF32, {3, 24, 16}}},
                {"packed_weight", TensorMeta{DType::kF32, {3, 24, 16}}}})
          .status(),
      "weight has 24 rows for an expert; need a multiple of 16");
  ExpectRefusal(
      ops.Make("prepack_moe_weight",
               {{"weight", TensorMeta{DType::kBF16, {3, 16, 7}}},
                {"packed_weight", TensorMeta{DType::kBF16, {3, 16, 7}}},
                {"isa", "amx"}})
          .status(),
      "weight has 7 columns; need a multiple of 2");

  const auto op = ops.Make("cpu_fused_moe", good);
  EXPECT_EQ(
      op->WorkspaceBytes(std::vector<AnyTensorView>(op->tensors.size()), 1)
          .status()
          .code(),
      absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace quern
