// The recurrent operators by name, over sequences of any length: simd writes
// the bits of the plans, reference what is within rounding of them, and what is
// wrong is refused. all_ops_test.cc has their decode steps.

#include "quern/ops/registry/families/recurrent/recurrent_ops.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

constexpr int64_t kTokens = 28;
constexpr int64_t kSlots = 5;

// Four sequences: of four tokens, of none, of three in no slot, and one that
// begins and is long enough for chunks of tokens. The first token is padding.
const std::vector<int64_t> kIndices = {3, 0, -1, 1};
const std::vector<int32_t> kStarts = {1, 5, 5, 8, 28};
const std::vector<uint8_t> kInitial = {1, 1, 1, 0};

// A dense f32 tensor.
struct Tensor {
  TensorMeta meta;
  Floats data;

  AnyTensorView view() {
    AnyTensorView::Dims extents{}, strides{};
    int64_t stride = 1;
    for (size_t d = meta.extents.size(); d-- > 0;) {
      extents[d] = meta.extents[d];
      strides[d] = stride;
      stride *= extents[d];
    }
    return AnyTensorView(DType::kF32, static_cast<void*>(data.data()),
                         static_cast<int>(meta.extents.size()), extents,
                         strides);
  }
};

AnyTensorView IndexTensor(const std::vector<int64_t>& v) {
  return DenseVector(v.data(), static_cast<int64_t>(v.size()));
}
AnyTensorView IndexTensor(const std::vector<int32_t>& v) {
  return DenseVector(v.data(), static_cast<int64_t>(v.size()));
}
AnyTensorView InitialTensor() {
  return DenseVector(kInitial.data(), static_cast<int64_t>(kInitial.size()));
}
SequenceBatch Batch() {
  SequenceBatch batch;
  batch.state_indices =
      DenseVector(kIndices.data(), static_cast<int64_t>(kIndices.size()));
  batch.query_start_loc =
      DenseVector(kStarts.data(), static_cast<int64_t>(kStarts.size()));
  batch.has_initial_state = kInitial;
  return batch;
}

const TensorMeta kIndexMeta = {DType::kI64, {4}};
const TensorMeta kStartMeta = {DType::kI32, {5}};
const TensorMeta kInitialMeta = {DType::kU8, {4}};

class RecurrentOpsTest : public OpFixture {
 protected:
  RecurrentOpsTest() {
    EXPECT_EQ(RegisterRecurrentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterDeltaRuleOps(registry_), absl::OkStatus());
  }
  Tensor Reals(std::vector<int64_t> extents, double lo = -1, double hi = 1) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    return {{DType::kF32, std::move(extents)},
            UniformReals<float>(rng_, count, lo, hi)};
  }
  // By name from both providers: the bits of `want`, and what is near them.
  // `state` and `out` begin as before the call.
  void ExpectBoth(const std::string& op, const NamedArgs& args,
                  const std::vector<NamedTensor>& inputs,
                  const std::string& state_name, const Tensor& state,
                  const Tensor& out, const Tensor& want_state,
                  const Tensor& want_out) {
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(provider);
      Tensor s = state, o = out;
      std::vector<NamedTensor> tensors = inputs;
      tensors.push_back({state_name, s.view()});
      tensors.push_back({"out", o.view()});
      Run(Make(provider, op, args), tensors);
      if (std::string(provider) == "simd") {
        EXPECT_TRUE(AllBitsEqual(s.data, want_state.data));
        EXPECT_TRUE(AllBitsEqual(o.data, want_out.data));
      } else {
        EXPECT_TRUE(AllClose(s.data, want_state.data, 1e-5));
        EXPECT_TRUE(AllClose(o.data, want_out.data, 1e-5));
      }
    }
  }
  // On a workspace of as many bytes as the plan asks for.
  template <class Plan, class Args>
  void RunPlan(const Plan& plan, const Args& args) {
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    const auto bytes = plan.WorkspaceBytes(kTokens, 1);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(*bytes > 0, plan.spec().chunk > 1);
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    plan.Execute(args, Workspace(*memory), executor_);
  }
  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(RecurrentOpsTest);

TEST_P(RecurrentOpsTest, DeltaRuleIsThePlan) {
  for (const bool kda : {false, true}) {
    Tensor q = Reals({kTokens, 1, 6}), k = Reals({kTokens, 1, 6});
    Tensor v = Reals({kTokens, 2, 10}), beta = Reals({kTokens, 2}, 0, 1);
    Tensor g = kda ? Reals({kTokens, 2, 6}, -1, 0) : Reals({kTokens, 2}, -1, 0);
    const Tensor state = Reals({kSlots, 2, 6, 10});
    const Tensor out = Reals({kTokens, 2, 10});
    DeltaRuleSpec spec;
    spec.key_heads = 1;
    spec.value_heads = 2;
    spec.dk = 6;
    spec.dv = 10;
    spec.norm = DeltaNorm::kL2;
    if (kda) spec.decay = DeltaDecay::kPerChannel;
    const auto plan = DeltaRulePlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    Tensor want_state = state, want_out = out;
    const DeltaRuleArgs args = {q.view(), k.view(),       v.view(),
                                g.view(), beta.view(),    want_state.view(),
                                Batch(),  want_out.view()};
    RunPlan(*plan, args);
    ExpectBoth("chunk_gated_delta_rule",
               {{"q", q.meta},
                {"k", k.meta},
                {"v", v.meta},
                {"g", g.meta},
                {"beta", beta.meta},
                {"state", state.meta},
                {"state_indices", kIndexMeta},
                {"query_start_loc", kStartMeta},
                {"has_initial_state", kInitialMeta},
                {"use_qk_l2norm", true}},
               {{"q", q.view()},
                {"k", k.view()},
                {"v", v.view()},
                {"g", g.view()},
                {"beta", beta.view()},
                {"state_indices", IndexTensor(kIndices)},
                {"query_start_loc", IndexTensor(kStarts)},
                {"has_initial_state", InitialTensor()}},
               "state", state, out, want_state, want_out);
  }
}

TEST_P(RecurrentOpsTest, CausalConv1dIsThePlan) {
  Tensor x = Reals({kTokens, 21}), weight = Reals({21, 4}), bias = Reals({21});
  const Tensor state = Reals({kSlots, 4, 21}), out = Reals({kTokens, 21});
  CausalConv1dSpec spec;
  spec.channels = 21;
  const auto plan = CausalConv1dPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  Tensor want_state = state, want_out = out;
  const CausalConv1dArgs args = {x.view(),    weight.view(),
                                 bias.view(), want_state.view(),
                                 Batch(),     want_out.view()};
  ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
  plan->Execute(args, executor_);
  ExpectBoth("causal_conv1d_fn",
             {{"x", x.meta},
              {"weight", weight.meta},
              {"bias", bias.meta},
              {"conv_states", state.meta},
              {"cache_indices", kIndexMeta},
              {"query_start_loc", kStartMeta},
              {"has_initial_state", kInitialMeta}},
             {{"x", x.view()},
              {"weight", weight.view()},
              {"bias", bias.view()},
              {"cache_indices", IndexTensor(kIndices)},
              {"query_start_loc", IndexTensor(kStarts)},
              {"has_initial_state", InitialTensor()}},
             "conv_states", state, out, want_state, want_out);
}

TEST_P(RecurrentOpsTest, SelectiveStateUpdateIsThePlan) {
  for (const bool per_row : {false, true}) {
    Tensor x = Reals({kTokens, 2, 5}), z = Reals({kTokens, 2, 5});
    Tensor dt = per_row ? Reals({kTokens, 2, 5}) : Reals({kTokens, 2});
    Tensor a = per_row ? Reals({2, 5, 7}, -2, 0) : Reals({2}, -2, 0);
    Tensor b = Reals({kTokens, 1, 7}), c = Reals({kTokens, 1, 7});
    Tensor d = per_row ? Reals({2, 5}) : Reals({2});
    Tensor bias = per_row ? Reals({2, 5}) : Reals({2});
    const Tensor state = Reals({kSlots, 2, 5, 7});
    const Tensor out = Reals({kTokens, 2, 5});
    StateUpdateSpec spec;
    spec.heads = 2;
    spec.head_dim = 5;
    spec.d_state = 7;
    if (per_row) spec.form = SsmForm::kPerRow;
    const auto plan = StateUpdatePlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    Tensor want_state = state, want_out = out;
    SequenceBatch batch = Batch();
    batch.has_initial_state = {};
    const StateUpdateArgs args = {
        want_state.view(), x.view(), dt.view(),      a.view(),
        b.view(),          c.view(), d.view(),       z.view(),
        bias.view(),       batch,    want_out.view()};
    RunPlan(*plan, args);
    ExpectBoth("selective_state_update",
               {{"state", state.meta},
                {"x", x.meta},
                {"dt", dt.meta},
                {"a", a.meta},
                {"b", b.meta},
                {"c", c.meta},
                {"d", d.meta},
                {"z", z.meta},
                {"dt_bias", bias.meta},
                {"state_batch_indices", kIndexMeta},
                {"query_start_loc", kStartMeta},
                {"dt_softplus", true}},
               {{"x", x.view()},
                {"dt", dt.view()},
                {"a", a.view()},
                {"b", b.view()},
                {"c", c.view()},
                {"d", d.view()},
                {"z", z.view()},
                {"dt_bias", bias.view()},
                {"state_batch_indices", IndexTensor(kIndices)},
                {"query_start_loc", IndexTensor(kStarts)}},
               "state", state, out, want_state, want_out);
  }
}

TEST_P(RecurrentOpsTest, RefusesSlotsByTheNameOfTheSchema) {
  Tensor x = Reals({4, 16}), states = Reals({kSlots, 3, 16});
  Tensor weight = Reals({16, 4}), out = Reals({4, 16});
  Tensor rows = Reals({4, 2, 8}), dt = Reals({4, 2}), a = Reals({2});
  Tensor b = Reals({4, 1, 7}), c = Reals({4, 1, 7});
  Tensor ssm = Reals({kSlots, 2, 8, 7}), of_rows = Reals({4, 2, 8});
  struct Case {
    std::string op, field;
    std::vector<std::pair<std::string, Tensor*>> tensors;
  };
  const Case cases[] = {
      {"causal_conv1d_fn",
       "cache_indices",
       {{"x", &x}, {"weight", &weight}, {"conv_states", &states}}},
      {"causal_conv1d_update",
       "conv_state_indices",
       {{"x", &x}, {"conv_state", &states}, {"weight", &weight}}},
      {"selective_state_update",
       "state_batch_indices",
       {{"state", &ssm},
        {"x", &rows},
        {"dt", &dt},
        {"a", &a},
        {"b", &b},
        {"c", &c}}}};
  const std::vector<int64_t> good = {0, 1, 2, 3}, beyond = {0, 1, 2, 5};
  const std::vector<int64_t> twice = {0, 1, 2, 1};
  for (const Case& test : cases) {
    SCOPED_TRACE(test.op);
    NamedArgs args = {{test.field, kIndexMeta}};
    std::vector<NamedTensor> named = {
        {"out", test.op[0] == 'c' ? out.view() : of_rows.view()}};
    for (const auto& [name, tensor] : test.tensors) {
      args.emplace_back(name, tensor->meta);
      named.push_back({name, tensor->view()});
    }
    const MadeOp made = Make("simd", test.op, args);
    const auto check = [&](const std::vector<int64_t>& indices) {
      std::vector<NamedTensor> all = named;
      all.push_back({test.field, IndexTensor(indices)});
      std::vector<AnyTensorView> tensors;
      const absl::Status bound = made.Bind(all, tensors);
      return bound.ok() ? made.op->CheckArgs(tensors) : bound;
    };
    EXPECT_EQ(check(good), absl::OkStatus());
    ExpectRefusal(check(beyond), ": " + test.field + "[3]=5; need 0 <= ");
    ExpectRefusal(check(twice), ": " + test.field + "[3]=1 is given twice");
  }
}

TEST(RecurrentOpsRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterRecurrentOps(registry), absl::OkStatus());
  ASSERT_EQ(RegisterDeltaRuleOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  struct Case {
    std::string op;
    NamedArgs changed;
    std::string words;
  };
  const TensorMeta flat = {DType::kF32, {4}};
  const Case cases[] = {
      {"gated_delta_rule_update", {{"q", flat}}, "q is f32[4]; need [n, n, n]"},
      {"gated_delta_rule_update", {{"v", flat}}, "v is f32[4]; need [n, n, n]"},
      {"gated_delta_rule_update", {{"g", flat}}, "g has rank 1; need 2"},
      {"gated_delta_rule_update",
       {{"state", flat}},
       "state is f32[4]; need [n, n, n, n]"},
      {"chunk_gated_delta_rule", {{"q", flat}}, "q is f32[4]; need [n, n, n]"},
      {"causal_conv1d_fn", {{"x", flat}}, "x is f32[4]; need [n, n]"},
      {"causal_conv1d_fn",
       {{"conv_states", flat}},
       "causal_conv1d_fn: conv_states is f32[4]; need [n, n, n]"},
      {"causal_conv1d_update",
       {{"conv_state", flat}},
       "causal_conv1d_update: conv_state is f32[4]; need [n, n, n]"},
      {"causal_conv1d_fn",
       {{"activation", "gelu"}},
       "activation=\"gelu\"; need \"none\", \"\", \"silu\" or \"swish\""},
      {"causal_conv1d_update",
       {{"weight", TensorMeta{DType::kF32, {16, 5}}}},
       "width=5; need 2 <= width <= 4"},
      {"selective_state_update",
       {{"a", TensorMeta{DType::kF32, {2, 4}}}},
       "a has rank 2; need 1"},
      {"selective_state_update", {{"b", flat}}, "b has rank 1; need 3"},
  };
  for (const Case& c : cases) {
    NamedArgs args = registry.Find(c.op)->example(DType::kF32);
    for (auto& [name, value] : args) {
      for (const auto& [changed, other] : c.changed) {
        if (name == changed) value = other;
      }
    }
    for (const auto& [changed, other] : c.changed) {
      bool found = false;
      for (const auto& arg : args) found = found || arg.first == changed;
      if (!found) args.emplace_back(changed, other);
    }
    ExpectRefusal(ops.Make(c.op, args).status(), c.words);
    ExpectRefusal(registry.InferShapes(c.op, args).status(), c.words);
  }
  // Indices of another type, by the name that the schema has for them.
  const std::pair<std::string, std::string> indices[] = {
      {"causal_conv1d_fn", "cache_indices"},
      {"causal_conv1d_update", "conv_state_indices"},
      {"selective_state_update", "state_batch_indices"},
      {"chunk_gated_delta_rule", "state_indices"},
      {"gated_delta_rule_update", "state_indices"}};
  for (const auto& [op, field] : indices) {
    NamedArgs args = registry.Find(op)->example(DType::kF32);
    for (auto& [name, value] : args) {
      if (name == field) value = flat;
    }
    ExpectRefusal(ops.Make(op, args).status(), absl::StatusCode::kUnimplemented,
                  op + ": " + field + " is f32; need i32 or i64");
  }
}

}  // namespace
}  // namespace quern
