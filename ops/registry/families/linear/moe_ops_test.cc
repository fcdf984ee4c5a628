#include "quern/ops/registry/families/linear/moe_ops.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kTokens = 5, kExperts = 48, kTopK = 6;

// Weights are 2.5 at most. In units of 2^-24, router_spec.h says 6 + 1.1 * 10
// for a softmax of these logits and 20 + 48 / 4 for each of two sums; the
// reference has fewer.
constexpr double kTolerance = 2.5 * 2 * (17 + 2 * 32) * 0x1p-24;

struct Routes {
  std::vector<float> weights;
  std::vector<int32_t> ids;
};

// An operator, its arguments but for the tensors, and the plan that it names.
struct Case {
  std::string op;
  NamedArgs args;
  bool biased;
  RouterSpec spec;
};

RouterSpec Spec(RouterScore score, bool renormalize, float scale,
                int64_t groups = 1, int64_t top_groups = 1) {
  RouterSpec spec;
  spec.experts = kExperts;
  spec.top_k = kTopK;
  spec.score = score;
  spec.renormalize = renormalize;
  spec.scale = scale;
  spec.groups = groups;
  spec.top_groups = top_groups;
  return spec;
}

std::vector<Case> Cases() {
  const auto grouped = [](const char* score, int64_t groups, int64_t best) {
    return NamedArgs{{"topk", kTopK},
                     {"renormalize", true},
                     {"num_expert_group", groups},
                     {"topk_group", best},
                     {"scoring_func", score},
                     {"routed_scaling_factor", 2.5}};
  };
  std::vector<Case> cases;
  for (const bool biased : {false, true}) {
    cases.push_back({"topk_softmax",
                     {{"topk", kTopK}},
                     biased,
                     Spec(RouterScore::kSoftmax, false, 1.0f)});
    cases.push_back({"topk_sigmoid",
                     {{"topk", kTopK},
                      {"renormalize", true},
                      {"routed_scaling_factor", 1.5}},
                     biased,
                     Spec(RouterScore::kSigmoid, true, 1.5f)});
    cases.push_back({"grouped_topk", grouped("softmax", 8, 3), biased,
                     Spec(RouterScore::kSoftmax, true, 2.5f, 8, 3)});
    cases.push_back({"grouped_topk", grouped("sigmoid", 4, 4), biased,
                     Spec(RouterScore::kSigmoid, true, 2.5f, 4, 4)});
    cases.push_back({"grouped_topk", grouped("sqrtsoftplus", 1, 1), biased,
                     Spec(RouterScore::kSqrtSoftplus, true, 2.5f)});
  }
  return cases;
}

const char* BiasName(const std::string& op) {
  return op == "grouped_topk" ? "e_score_correction_bias" : "bias";
}

class MoeOpsTest : public OpFixture {
 protected:
  MoeOpsTest() { EXPECT_EQ(RegisterMoeOps(registry_), absl::OkStatus()); }

  Routes RunOp(const std::string& provider, const Case& c,
               const AnyMatrix& logits, const AnyMatrix& bias) {
    const AnyTensorView l = logits.const_view(), b = bias.vector();
    NamedArgs args = c.args;
    args.emplace_back("gating_output",
                      TensorMeta{l.dtype(), {kTokens, kExperts}});
    StridedMatrix<float> weights(kTokens, kTopK, kTopK + 1);
    StridedMatrix<int32_t> ids(kTokens, kTopK, kTopK + 2);
    std::vector<NamedTensor> tensors = {
        {"gating_output", l}, {"out0", weights.view()}, {"out1", ids.view()}};
    if (c.biased) {
      args.emplace_back(BiasName(c.op), TensorMeta{b.dtype(), {kExperts}});
      tensors.push_back({BiasName(c.op), b});
    }
    Run(Make(provider, c.op, args), tensors);
    return {weights.ToDense(), ids.ToDense()};
  }
};
QUERN_INSTANTIATE_ISA_TEST(MoeOpsTest);

TEST_P(MoeOpsTest, HaveTheBitsOfThePlanAndTheChoiceOfTheReference) {
  TestRng rng;
  for (const DType dtype : kDTypes) {
    const AnyMatrix logits(
        dtype, ToDoubles(UniformReals(rng, kTokens * kExperts, -5, 5)), kTokens,
        kExperts, kExperts + 1);
    const AnyMatrix bias(DType::kF32, ToDoubles(UniformReals(rng, kExperts)), 1,
                         kExperts, kExperts);
    for (Case& c : Cases()) {
      SCOPED_TRACE(c.op + (c.biased ? " biased " : " ") +
                   std::string(DTypeName(dtype)));
      const Routes simd = RunOp("simd", c, logits, bias);
      const Routes reference = RunOp("reference", c, logits, bias);
      c.spec.logits_dtype = dtype;
      c.spec.biased = c.biased;
      const auto plan = RouterPlan::Create(c.spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      StridedMatrix<float> weights(kTokens, kTopK, kTopK);
      StridedMatrix<int32_t> ids(kTokens, kTopK, kTopK);
      plan->Execute(logits.const_view(),
                    c.biased ? bias.vector() : AnyTensorView(), weights.view(),
                    ids.view(), executor_);
      EXPECT_TRUE(AllBitsEqual(simd.weights, weights.ToDense()));
      EXPECT_EQ(simd.ids, ids.ToDense());
      EXPECT_EQ(reference.ids, simd.ids);
      EXPECT_TRUE(AllClose(reference.weights, simd.weights, kTolerance));
    }
  }
}

// NaN, infinity and ties: the reference is the same function.
TEST_P(MoeOpsTest, SpecialsAreThoseOfTheReference) {
  TestRng rng;
  std::vector<double> pool = {0, 0, 1, 1, -1, -1, 1e38, -1e38};
  for (const float x : Specials<float>()) pool.push_back(double{x});
  const AnyMatrix logits(DType::kF32, ChosenFrom(rng, kTokens * kExperts, pool),
                         kTokens, kExperts, kExperts);
  const AnyMatrix bias(DType::kF32, ChosenFrom(rng, kExperts, pool), 1,
                       kExperts, kExperts);
  for (const Case& c : Cases()) {
    if (c.biased) continue;  // equal sums are not equally rounded
    SCOPED_TRACE(c.op);
    const Routes simd = RunOp("simd", c, logits, bias);
    const Routes reference = RunOp("reference", c, logits, bias);
    EXPECT_EQ(simd.ids, reference.ids);
    EXPECT_TRUE(AllClose(simd.weights, reference.weights, kTolerance));
  }
}

// Computed elsewhere, in f32; 7 digits. Both providers.
TEST_P(MoeOpsTest, GroupedTopKReproducesTheGoldenVectors) {
  std::vector<float> logits = {0.3f,  -1.2f, 2.1f, 0.7f,
                               -0.4f, 1.5f,  0.2f, 1.1f};
  std::vector<float> bias = {0.1f, 0.9f, -0.5f, 0.2f, 0.6f, -0.3f, 0.05f, 0.0f};
  const std::vector<uint8_t> hidden(3);
  const NamedArgs args = {
      {"hidden_states", TensorMeta{DType::kU8, {1, 3}}},
      {"gating_output", TensorMeta{DType::kF32, {1, 8}}},
      {"e_score_correction_bias", TensorMeta{DType::kF32, {8}}},
      {"topk", int64_t{3}},
      {"renormalize", true},
      {"num_expert_group", int64_t{4}},
      {"topk_group", int64_t{2}},
      {"scoring_func", "sigmoid"},
      {"routed_scaling_factor", 2.5}};
  for (const char* provider : {"simd", "reference"}) {
    std::vector<float> weights(3);
    std::vector<int32_t> ids(3);
    Run(Make(provider, "grouped_topk", args),
        {{"hidden_states", DenseMatrix(hidden.data(), 1, 3)},
         {"gating_output", DenseMatrix<const float>(logits.data(), 1, 8)},
         {"e_score_correction_bias", DenseVector<const float>(bias.data(), 8)},
         {"out0", DenseMatrix(weights.data(), 1, 3)},
         {"out1", DenseMatrix(ids.data(), 1, 3)}});
    EXPECT_EQ(ids, (std::vector<int32_t>{1, 4, 0}));
    EXPECT_TRUE(AllClose(
        weights, std::vector<double>{.4793519, .8310602, 1.1895878}, 4e-7));
  }
}

TEST(MoeOpsRefusalTest, NamesTheOperatorAndTheValue) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMoeOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  struct Refusal {
    std::string op;
    std::string key;
    OpArg value;
    std::string words;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  };
  const std::vector<Refusal> refusals = {
      {"topk_softmax", "gating_output", TensorMeta{DType::kF32, {16}},
       "gating_output is f32[16]; need [n, n]"},
      {"topk_softmax", "topk", int64_t{17},
       "topk_softmax: topk=17; need 1 <= topk <= 16"},
      {"topk_sigmoid", "topk", int64_t{0}, "topk=0; need 1 <= "},
      {"topk_sigmoid", "routed_scaling_factor", 0.0,
       "routed_scaling_factor=0; need finite routed_scaling_factor > 0"},
      {"topk_sigmoid", "gating_output", TensorMeta{DType::kI8, {4, 16}},
       "gating_output is i8", absl::StatusCode::kUnimplemented},
      {"grouped_topk", "scoring_func", "relu",
       "grouped_topk: scoring_func=\"relu\"; need \"softmax\", \"sigmoid\""},
      {"grouped_topk", "num_expert_group", int64_t{3},
       "num_expert_group=3; need a divisor of experts=16"},
      {"grouped_topk", "topk_group", int64_t{5}, "topk_group=5"},
      {"grouped_topk", "hidden_states", TensorMeta{DType::kF32, {3, 8}},
       "gating_output is f32[4, 16]; need [3, n]"},
  };
  for (const Refusal& r : refusals) {
    NamedArgs args = {{"gating_output", TensorMeta{DType::kF32, {4, 16}}},
                      {"topk", int64_t{2}}};
    if (r.op == "grouped_topk") {
      args.insert(args.end(), {{"renormalize", true},
                               {"num_expert_group", int64_t{4}},
                               {"topk_group", int64_t{2}}});
    }
    ASSERT_TRUE(ops.Make(r.op, args).ok()) << ops.Make(r.op, args).status();
    bool found = false;
    for (auto& [key, value] : args) {
      if (key != r.key) continue;
      value = r.value;
      found = true;
    }
    if (!found) args.emplace_back(r.key, r.value);
    for (const char* provider : {"simd", "reference"}) {
      ExpectRefusal(ops.MakeFrom(provider, r.op, args).status(), r.code,
                    r.words);
    }
  }
}

TEST(MoeOpsRefusalTest, ChecksTensors) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMoeOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const auto made = ops.Make(
      "grouped_topk", {{"gating_output", TensorMeta{DType::kF32, {2, 4}}},
                       {"topk", int64_t{1}},
                       {"renormalize", false},
                       {"num_expert_group", int64_t{1}},
                       {"topk_group", int64_t{1}}});
  ASSERT_TRUE(made.ok()) << made.status();
  std::vector<float> x(8), weights(2);
  std::vector<int32_t> ids(2);
  const AnyTensorView logits = DenseMatrix<const float>(x.data(), 2, 4);
  const AnyTensorView w = DenseMatrix(weights.data(), 2, 1);
  const AnyTensorView i = DenseMatrix(ids.data(), 2, 1);
  const AnyTensorView none;
  const BoundOp& op = *made->op;
  EXPECT_EQ(op.CheckArgs(std::vector<AnyTensorView>{none, logits, none, w, i}),
            absl::OkStatus());
  const struct {
    std::vector<AnyTensorView> tensors;
    const char* words;
  } cases[] = {
      {{none, logits, none, w}, "tensors=4; need 5"},
      {{DenseMatrix<const float>(x.data(), 1, 4), logits, none, w, i},
       "hidden_states is [1, 4]; need [2, any]"},
      {{none, logits, none, i, w}, "weights is i32; need f32"},
      {{none, logits, none, w, w}, "ids is f32; need i32"},
      {{none, logits, DenseVector<const float>(x.data(), 4), w, i},
       "bias is given; need none"},
      {{none, none, none, w, i}, "logits"},
  };
  for (const auto& c : cases) ExpectRefusal(op.CheckArgs(c.tensors), c.words);
}

}  // namespace
}  // namespace quern
