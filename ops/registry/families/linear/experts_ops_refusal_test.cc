// What the operators of experts refuse, by the name that was called.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/families/linear/experts_ops.h"
#include "quern/ops/registry/families/linear/experts_ops_testutil.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

TEST(ExpertsOpsRefusalTest, NamesTheOperatorAndTheValue) {
  OpRegistry registry;
  ASSERT_EQ(RegisterExpertsOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const ExpertWeights experts =
      MakeExperts(WeightFormat::kBF16, Act::kSiluAndMul);
  const ExpertWeights int4 =
      MakeExperts(WeightFormat::kI4Group, Act::kSiluAndMul);
  const ExpertWeights none;
  struct Refusal {
    std::string op, key;
    OpArg value;
    std::string words;
  };
  const std::vector<Refusal> refusals = {
      {"fused_moe", "experts", &none, "fused_moe: experts has none"},
      {"fused_moe", "router_logits", TensorMeta{DType::kF32, {kTokens, 5}},
       "columns of router_logits=5; need 6"},
      {"fused_moe", "router_logits", TensorMeta{DType::kF32, {3, kExperts}},
       "router_logits is f32[3, 6]; need [7, n]"},
      {"fused_moe", "router_logits", TensorMeta{DType::kF32, {6}},
       "router_logits is f32[6]; need [7, n]"},
      {"fused_moe", "top_k", int64_t{7}, "fused_moe: top_k=7"},
      {"fused_moe", "scoring_func", "relu", "fused_moe: scoring_func=\"relu\""},
      {"fused_moe", "activation", "relu2",
       "fused_moe: activation=\"relu2\"; need \"silu\", \"gelu\""},
      {"fused_moe", "activation", "silu_no_mul", "activation is silu"},
      {"fused_moe", "expert_map", TensorMeta{DType::kI32, {5}},
       "expert_map is i32[5]; need [6]"},
      {"fused_moe", "shared_output", TensorMeta{DType::kBF16, {kTokens, 3}},
       "shared_output is bf16[7, 3]; need bf16[7, 48]"},
      {"unquantized_fused_moe", "experts", &int4,
       "unquantized_fused_moe: experts are i4_group; need f32, bf16 or f16"},
      {"modular_fused_moe", "topk_ids", TensorMeta{DType::kI32, {kTokens}},
       "modular_fused_moe: topk_ids is i32[7]; need [7, 2]"},
      {"transformers_fused_moe", "topk_weights",
       TensorMeta{DType::kBF16, {kTokens, kTopK}},
       "transformers_fused_moe: topk_weights is bf16[7, 2]; need f32"},
      {"fused_experts_cpu", "hidden_states",
       TensorMeta{DType::kBF16, {kTokens, 47}},
       "fused_experts_cpu: hidden_states is bf16[7, 47]; need [7, 48]"},
      {"fused_experts_cpu", "apply_router_weight_on_input", true,
       "top_k=2; need 1"},
  };
  for (const Refusal& r : refusals) {
    const bool mixture = r.op == kMixtures[0] || r.op == kMixtures[1];
    NamedArgs args = mixture ? MixtureArgs(&experts) : RoutedArgs(&experts);
    ASSERT_TRUE(ops.Make(r.op, args).ok()) << ops.Make(r.op, args).status();
    bool found = false;
    for (auto& [key, value] : args) {
      if (key != r.key) continue;
      value = r.value;
      found = true;
    }
    if (!found) args.emplace_back(r.key, r.value);
    for (const char* provider : {"simd", "reference"}) {
      ExpectRefusal(ops.MakeFrom(provider, r.op, args).status(), r.words);
    }
  }
}

TEST(ExpertsOpsRefusalTest, ChecksTensors) {
  OpRegistry registry;
  ASSERT_EQ(RegisterExpertsOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const ExpertWeights experts =
      MakeExperts(WeightFormat::kBF16, Act::kSiluAndMul);
  Inputs in = MakeInputs();
  std::vector<BF> out(in.x.size());
  const auto routed = ops.Make("fused_experts_cpu", RoutedArgs(&experts));
  ASSERT_EQ(routed.status(), absl::OkStatus());
  std::vector<NamedTensor> tensors = RoutedTensors(in);
  tensors.push_back({"out", DenseMatrix(out.data(), kTokens, kHidden)});
  std::vector<AnyTensorView> bound;
  ASSERT_EQ(routed->Bind(tensors, bound), absl::OkStatus());
  EXPECT_EQ(routed->op->CheckArgs(bound), absl::OkStatus());
  in.ids[5] = kExperts;
  ExpectRefusal(routed->op->CheckArgs(bound), "ids[2][1]=6; need 0 <= id < 6");

  const auto mixture = ops.Make("fused_moe", MixtureArgs(&experts));
  ASSERT_EQ(mixture.status(), absl::OkStatus());
  tensors = MixtureTensors(in);
  tensors.push_back({"out", DenseMatrix(in.x.data(), kTokens, kHidden)});
  bound.clear();
  ExpectRefusal(mixture->Bind(tensors, bound), "out overlaps hidden_states");
}

}  // namespace
}  // namespace quern
