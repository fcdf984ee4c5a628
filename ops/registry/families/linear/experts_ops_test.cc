#include "quern/ops/registry/families/linear/experts_ops.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/registry/families/linear/experts_ops_testutil.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

class ExpertsOpsTest : public OpFixture {
 protected:
  ExpertsOpsTest() {
    EXPECT_EQ(RegisterExpertsOps(registry_), absl::OkStatus());
  }

  std::vector<BF> RunOp(const std::string& provider, const std::string& op,
                        const NamedArgs& args,
                        std::vector<NamedTensor> tensors) {
    std::vector<BF> out(static_cast<size_t>(kTokens * kHidden));
    tensors.push_back({"out", DenseMatrix(out.data(), kTokens, kHidden)});
    Run(Make(provider, op, args), tensors);
    return out;
  }

  // The plan's result, with the routes of `in`.
  std::vector<BF> RunPlan(const ExpertWeights& weights, Act act,
                          const Inputs& in, bool add) {
    ExpertsSpec spec;
    spec.top_k = kTopK;
    spec.activation = act;
    auto plan = ExpertsPlan::Create(spec, weights);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    std::vector<BF> out(in.x.size());
    ExpertsArgs args;
    args.x = DenseMatrix<const BF>(in.x.data(), kTokens, kHidden);
    args.ids = DenseMatrix<const int32_t>(in.ids.data(), kTokens, kTopK);
    args.weights = DenseMatrix<const float>(in.weights.data(), kTokens, kTopK);
    args.out = DenseMatrix(out.data(), kTokens, kHidden);
    if (add) {
      args.add = DenseMatrix<const BF>(in.shared.data(), kTokens, kHidden);
    }
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(kTokens, 1));
    plan->Execute(args, Workspace(*memory), executor_);
    return out;
  }

  // in, with the routes that a router gives.
  Inputs Routed(Inputs in) {
    RouterSpec spec;
    spec.experts = kExperts;
    spec.top_k = kTopK;
    spec.renormalize = true;
    const auto plan = RouterPlan::Create(spec);
    plan->Execute(DenseMatrix<const float>(in.logits.data(), kTokens, kExperts),
                  AnyTensorView(),
                  DenseMatrix(in.weights.data(), kTokens, kTopK),
                  DenseMatrix(in.ids.data(), kTokens, kTopK), executor_);
    return in;
  }
};
QUERN_INSTANTIATE_ISA_TEST(ExpertsOpsTest);

TEST_P(ExpertsOpsTest, HaveTheBitsOfThePlan) {
  const Inputs in = MakeInputs();
  struct Case {
    const char* name;
    Act act;
  };
  for (const Case& c :
       {Case{"silu", Act::kSiluAndMul}, Case{"gelu_no_mul", Act::kGelu}}) {
    const ExpertWeights experts = MakeExperts(WeightFormat::kBF16, c.act);
    for (const bool add : {false, true}) {
      NamedArgs routed = RoutedArgs(&experts), mixture = MixtureArgs(&experts);
      std::vector<NamedTensor> routed_in = RoutedTensors(in);
      std::vector<NamedTensor> mixture_in = MixtureTensors(in);
      for (NamedArgs* args : {&routed, &mixture}) {
        args->emplace_back("activation", c.name);
        if (add) args->emplace_back("shared_output", kX);
      }
      for (std::vector<NamedTensor>* tensors : {&routed_in, &mixture_in}) {
        if (!add) continue;
        tensors->push_back(
            {"shared_output",
             DenseMatrix<const BF>(in.shared.data(), kTokens, kHidden)});
      }
      for (const char* op : kRouted) {
        EXPECT_TRUE(AllBitsEqual(RunOp("simd", op, routed, routed_in),
                                 RunPlan(experts, c.act, in, add)))
            << op;
      }
      for (const char* op : kMixtures) {
        EXPECT_TRUE(AllBitsEqual(RunOp("simd", op, mixture, mixture_in),
                                 RunPlan(experts, c.act, Routed(in), add)))
            << op;
      }
    }
  }
}

// Every argument of fused_moe that has a default, with another value.
TEST_P(ExpertsOpsTest, EveryArgumentOfTheRouterReachesIt) {
  const Inputs in = MakeInputs();
  TestRng rng;
  constexpr int64_t kAll = 12;  // of which this rank has six
  const auto logits = UniformReals<float>(rng, kTokens * kAll, -3, 3);
  const auto bias = UniformReals<float>(rng, kAll);
  std::vector<int32_t> map;
  for (int32_t e = 0; e < kAll; ++e) map.push_back(e % 2 == 0 ? e / 2 : -1);
  const ExpertWeights experts =
      MakeExperts(WeightFormat::kBF16, Act::kGeluTanhAndMul);

  RouterSpec route;
  route.experts = kAll;
  route.top_k = 3;
  route.score = RouterScore::kSigmoid;
  route.biased = true;
  route.scale = 2.5f;
  route.groups = 4;
  route.top_groups = 2;
  const auto router = RouterPlan::Create(route);
  ASSERT_EQ(router.status(), absl::OkStatus());
  std::vector<float> weights(static_cast<size_t>(kTokens * 3));
  std::vector<int32_t> ids(weights.size());
  router->Execute(DenseMatrix<const float>(logits.data(), kTokens, kAll),
                  DenseVector<const float>(bias.data(), kAll),
                  DenseMatrix(weights.data(), kTokens, 3),
                  DenseMatrix(ids.data(), kTokens, 3), executor_);
  ExpertsSpec spec;
  spec.top_k = 3;
  spec.out = DType::kF32;
  spec.activation = Act::kGeluTanhAndMul;
  auto plan = ExpertsPlan::Create(spec, experts);
  ASSERT_EQ(plan.status(), absl::OkStatus());
  std::vector<float> want(in.x.size()), got(in.x.size());
  ExpertsArgs args;
  args.x = DenseMatrix<const BF>(in.x.data(), kTokens, kHidden);
  args.ids = DenseMatrix<const int32_t>(ids.data(), kTokens, 3);
  args.map = DenseVector<const int32_t>(map.data(), kAll);
  args.weights = DenseMatrix<const float>(weights.data(), kTokens, 3);
  args.out = DenseMatrix(want.data(), kTokens, kHidden);
  auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(kTokens, 1));
  plan->Execute(args, Workspace(*memory), executor_);

  const NamedArgs named = {
      {"hidden_states", kX},
      {"router_logits", TensorMeta{DType::kF32, {kTokens, kAll}}},
      {"experts", &experts},
      {"e_score_correction_bias", TensorMeta{DType::kF32, {kAll}}},
      {"expert_map", TensorMeta{DType::kI32, {kAll}}},
      {"top_k", int64_t{3}},
      {"renormalize", false},
      {"num_expert_group", int64_t{4}},
      {"topk_group", int64_t{2}},
      {"scoring_func", "sigmoid"},
      {"routed_scaling_factor", 2.5},
      {"activation", "gelu_tanh"},
      {"out_dtype", "f32"}};
  const MadeOp op = Make("simd", "fused_moe", named);
  Run(op,
      {{"hidden_states", args.x},
       {"router_logits",
        DenseMatrix<const float>(logits.data(), kTokens, kAll)},
       {"e_score_correction_bias", DenseVector<const float>(bias.data(), kAll)},
       {"expert_map", args.map},
       {"out", DenseMatrix(got.data(), kTokens, kHidden)}});
  EXPECT_TRUE(AllBitsEqual(got, want));
  // The tensors that it was made with may not be left out.
  std::vector<AnyTensorView> t = {
      args.x, DenseMatrix(logits.data(), kTokens, kAll), {}, args.map,
      {},     DenseMatrix(got.data(), kTokens, kHidden)};
  ExpectRefusal(op.op->CheckArgs(t), "e_score_correction_bias is missing");
  t[2] = DenseVector<const float>(bias.data(), kAll);
  t[3] = {};
  ExpectRefusal(op.op->CheckArgs(t), "expert_map is missing");
}

// One unit of bf16 of h and of the result, of numbers below 8.
TEST_P(ExpertsOpsTest, ReferenceAgrees) {
  const Inputs in = MakeInputs();
  for (const WeightFormat format :
       {WeightFormat::kBF16, WeightFormat::kI4Group}) {
    const ExpertWeights experts = MakeExperts(format, Act::kSiluAndMul);
    const auto both = [&](const char* op, const NamedArgs& args,
                          const std::vector<NamedTensor>& tensors) {
      EXPECT_TRUE(AllClose(RunOp("simd", op, args, tensors),
                           RunOp("reference", op, args, tensors), 0.25))
          << op;
    };
    both(kRouted[0], RoutedArgs(&experts), RoutedTensors(in));
    both(kMixtures[0], MixtureArgs(&experts), MixtureTensors(in));
  }
}

// Two ranks with half of the experts each give what one rank with all gives,
// within three roundings of numbers below 64: of each part, and of their sum.
TEST_P(ExpertsOpsTest, RanksDivideTheExperts) {
  const Inputs in = MakeInputs();
  const ExpertWeights all = MakeExperts(WeightFormat::kBF16, Act::kSiluAndMul);
  const auto want =
      RunOp("simd", "modular_fused_moe", RoutedArgs(&all), RoutedTensors(in));
  std::vector<std::vector<BF>> got(2, std::vector<BF>(in.x.size()));
  RunRanks(2, [&](ThreadCommunicator& ranks) {
    const int64_t half = kExperts / 2, first = ranks.rank() * half;
    const ExpertWeights mine =
        MakeExperts(WeightFormat::kBF16, Act::kSiluAndMul, first, first + half);
    std::vector<int32_t> map(static_cast<size_t>(kExperts), -1);
    for (int64_t e = 0; e < half; ++e) {
      map[static_cast<size_t>(first + e)] = static_cast<int32_t>(e);
    }
    NamedArgs args = RoutedArgs(&mine);
    args.emplace_back("expert_map", TensorMeta{DType::kI32, {kExperts}});
    args.emplace_back("ranks", &ranks);
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.MakeFrom("simd", "modular_fused_moe", args);
    ASSERT_EQ(made.status(), absl::OkStatus());
    auto& out = got[static_cast<size_t>(ranks.rank())];
    std::vector<NamedTensor> tensors = RoutedTensors(in);
    tensors.push_back(
        {"expert_map", DenseVector<const int32_t>(map.data(), kExperts)});
    tensors.push_back({"out", DenseMatrix(out.data(), kTokens, kHidden)});
    std::vector<AnyTensorView> bound;
    ASSERT_EQ(made->Bind(tensors, bound), absl::OkStatus());
    InlineExecutor executor;
    auto memory = AlignedBuffer::Create(*made->op->WorkspaceBytes(kTokens, 1));
    made->op->Execute(bound, Workspace(*memory), executor);
  });
  EXPECT_TRUE(AllBitsEqual(got[0], got[1]));
  EXPECT_TRUE(AllClose(got[0], want, 3 * 64 * 0x1p-9));
}

}  // namespace
}  // namespace quern
