// SGLang's routers by its names: routes that are known, the bits of our own
// routers, and what is refused. Formulas and NaN are in ops/moe/router_test.cc.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/families/linear/moe_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

struct Routes {
  Floats weights;
  std::vector<int32_t> ids;
};

class SglangRouterTest : public testing::Test {
 protected:
  SglangRouterTest() {
    EXPECT_EQ(RegisterSglangRouterOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterMoeOps(registry_), absl::OkStatus());
  }

  // Runs a router of f32 logits; `bias` is the name of its bias, or empty.
  Routes Run(const std::string& provider, const std::string& op, NamedArgs args,
             Floats& logits, int64_t experts, int64_t top_k,
             const std::string& bias, Floats& biases) {
    const auto tokens = static_cast<int64_t>(logits.size()) / experts;
    args.emplace_back("gating_output",
                      TensorMeta{DType::kF32, {tokens, experts}});
    args.emplace_back("topk", top_k);
    Routes routes;
    const auto count = static_cast<size_t>(tokens * top_k);
    routes.weights.assign(count, -1);
    routes.ids.assign(count, -1);
    std::vector<NamedTensor> named = {
        {"gating_output", DenseMatrix(logits.data(), tokens, experts)},
        {"out0", DenseMatrix(routes.weights.data(), tokens, top_k)},
        {"out1", DenseMatrix(routes.ids.data(), tokens, top_k)}};
    Floats hidden(static_cast<size_t>(tokens), 0.0f);
    if (op.find("_cpu") != std::string::npos) {
      args.emplace_back("hidden_states", TensorMeta{DType::kF32, {tokens, 1}});
      named.emplace_back("hidden_states",
                         DenseMatrix(hidden.data(), tokens, 1));
    }
    if (!bias.empty()) {
      args.emplace_back(bias, TensorMeta{DType::kF32, {experts}});
      named.emplace_back(bias, DenseVector(biases.data(), experts));
    }
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.MakeFrom(provider, op, args);
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return routes;
    std::vector<AnyTensorView> views;
    EXPECT_EQ(made->Bind(named, views), absl::OkStatus());
    EXPECT_EQ(made->CheckArgs(views), absl::OkStatus());
    made->op->Execute(views, Workspace(), executor_);
    return routes;
  }

  OpRegistry registry_;
  InlineExecutor executor_;
  TestRng rng_;
};

NamedArgs Groups(int64_t groups, int64_t chosen, bool renormalize) {
  return {{"renormalize", renormalize},
          {"num_expert_group", groups},
          {"topk_group", chosen},
          {"num_fused_shared_experts", int64_t{0}}};
}

// Logits whose scores are known: ln 1, ln 2, ln 4 and ln 1 have the softmax
// 1/8, 2/8, 4/8 and 1/8.
TEST_F(SglangRouterTest, KnownRoutes) {
  Floats none;
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    Floats logits = {0, std::log(2.0f), std::log(4.0f), 0};
    const auto near = [](const Routes& r, std::vector<int32_t> ids,
                         const Floats& weights) {
      EXPECT_EQ(r.ids, ids);
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_NEAR(r.weights[i], weights[i], 1e-6) << i;
      }
    };
    near(Run(provider, "topk_softmax_cpu", {{"renormalize", false}}, logits, 4,
             2, "", none),
         {2, 1}, {0.5f, 0.25f});
    near(Run(provider, "topk_softmax_cpu", {{"renormalize", true}}, logits, 4,
             2, "", none),
         {2, 1}, {2 / 3.0f, 1 / 3.0f});
    near(Run(provider, "topk_sigmoid_cpu", {{"renormalize", false}}, logits, 4,
             1, "", none),
         {2}, {0.8f});
    // The second group has the largest score, and both of its experts go.
    near(Run(provider, "grouped_topk_cpu", Groups(2, 1, false), logits, 4, 2,
             "", none),
         {2, 3}, {0.5f, 0.125f});
    // The bias makes the first group the best, and weighs nothing.
    Floats bias = {1, 1, 0, 0};
    NamedArgs args = Groups(2, 1, false);
    args.emplace_back("routed_scaling_factor", 3.0);
    near(Run(provider, "biased_grouped_topk_cpu", args, logits, 4, 2,
             "correction_bias", bias),
         {1, 0}, {2.0f, 1.5f});
  }
}

TEST_F(SglangRouterTest, HasTheBitsOfOurRouters) {
  for (const int64_t experts : {1, 2, 64, 128, 160, 256, 384}) {
    for (const bool renormalize : {false, true}) {
      SCOPED_TRACE(testing::Message() << experts << renormalize);
      Floats logits = UniformReals<float>(rng_, 5 * experts, -4, 4);
      Floats bias = UniformReals<float>(rng_, experts, -1, 1);
      const auto same = [&](const char* theirs, const NamedArgs& args,
                            const char* their_bias, const char* ours,
                            const NamedArgs& our_args, const char* our_bias) {
        const int64_t top_k = experts < 8 ? 1 : 8;
        const Routes a =
            Run("simd", theirs, args, logits, experts, top_k, their_bias, bias);
        const Routes b =
            Run("simd", ours, our_args, logits, experts, top_k, our_bias, bias);
        EXPECT_EQ(a.ids, b.ids) << theirs;
        EXPECT_EQ(a.weights, b.weights) << theirs;
      };
      const NamedArgs plain = {{"renormalize", renormalize}};
      same("topk_softmax_cpu", plain, "", "topk_softmax", plain, "");
      same("topk_sigmoid_cpu", plain, "", "topk_sigmoid", plain, "");
      if (experts < 64) continue;
      NamedArgs ours = {{"renormalize", renormalize},
                        {"num_expert_group", int64_t{8}},
                        {"topk_group", int64_t{4}}};
      same("grouped_topk_cpu", Groups(8, 4, renormalize), "", "grouped_topk",
           ours, "");
      ours.emplace_back("scoring_func", std::string("sigmoid"));
      ours.emplace_back("routed_scaling_factor", 2.5);
      NamedArgs theirs = Groups(8, 4, renormalize);
      theirs.emplace_back("routed_scaling_factor", 2.5);
      same("biased_grouped_topk_cpu", theirs, "correction_bias", "grouped_topk",
           ours, "e_score_correction_bias");
    }
  }
}

// One argument of the example in f32 is changed, or added.
TEST_F(SglangRouterTest, Refuses) {
  const struct {
    const char* op;
    std::string name;
    OpArg value;
    const char* words;  // behind the operator's name
  } kCases[] = {
      {"topk_softmax_cpu", "hidden_states", TensorMeta{DType::kF32, {3, 32}},
       "gating_output is f32[4, 64]; need [3, "},
      {"topk_softmax_cpu", "topk", int64_t{65},
       "topk=65; need 1 <= topk <= 64"},
      {"topk_sigmoid_cpu", "topk", int64_t{0}, "topk=0"},
      {"grouped_topk_cpu", "num_fused_shared_experts", int64_t{1},
       "num_fused_shared_experts=1; need 0: routes to shared experts"},
      {"grouped_topk_cpu", "num_token_non_padded", TensorMeta{DType::kI32, {1}},
       "num_token_non_padded is given; need none"},
      {"grouped_topk_cpu", "routed_scaling_factor", 2.0,
       "routed_scaling_factor=2; need 1"},
      {"grouped_topk_cpu", "num_expert_group", int64_t{7},
       "num_expert_group=7; need a divisor of experts=64"},
      {"grouped_topk_cpu", "topk_group", int64_t{9}, "topk_group=9"},
      {"biased_grouped_topk_cpu", "correction_bias",
       TensorMeta{DType::kF32, {63}}, "correction_bias is f32[63]; need [64]"},
      {"biased_grouped_topk_cpu", "num_fused_shared_experts", int64_t{-1},
       "num_fused_shared_experts=-1"},
      {"biased_grouped_topk_cpu", "num_token_non_padded",
       TensorMeta{DType::kI32, {1}}, "num_token_non_padded is given"},
      {"biased_grouped_topk_cpu", "routed_scaling_factor", 0.0,
       "routed_scaling_factor=0"},
  };
  const OpDispatcher ops(registry_, OpPolicy());
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.words);
    NamedArgs args = registry_.Find(c.op)->example(DType::kF32);
    bool found = false;
    for (auto& [field, old] : args) {
      if (field != c.name) continue;
      old = c.value;
      found = true;
    }
    if (!found) args.emplace_back(c.name, c.value);
    ExpectRefusal(ops.Make(c.op, args).status(),
                  std::string(c.op) + ": " + c.words);
  }
}

}  // namespace
}  // namespace quern
