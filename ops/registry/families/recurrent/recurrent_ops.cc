#include "quern/ops/registry/families/recurrent/recurrent_ops.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/recurrent.h"

namespace quern {
namespace {

using ConvArgs = SequenceArgs<CausalConv1dArgs>;
using Conv = OpDeclaration<CausalConv1dPlan, CausalConv1dSpec, ConvArgs>;
using UpdateArgs = SequenceArgs<StateUpdateArgs>;
using Update = OpDeclaration<StateUpdatePlan, StateUpdateSpec, UpdateArgs>;

Conv& X(Conv& op) {
  using Spec = CausalConv1dSpec;
  return op.In("x", &ConvArgs::x, {kRows, &Spec::channels}, &Spec::dtype);
}
Conv& Weight(Conv& op) {
  using Spec = CausalConv1dSpec;
  return op
      .In("weight", &ConvArgs::weight, {kAny, &Spec::width},
          &Spec::weight_dtype)
      .Maybe("bias", &ConvArgs::bias);
}
// The pool of states, which the schema calls `name`.
Conv& States(Conv& op, const char* name) {
  return op.InOut(name, &ConvArgs::state, nullptr, {kAny, kAny, kAny})
      .Word("state", name)
      .Word("rows of state", name == absl::string_view("conv_state")
                                 ? "rows of conv_state"
                                 : "rows of conv_states");
}
// `starts`: the operator has no query_start_loc yet.
absl::Status AddConv(Conv& op, const char* states, const char* activation,
                     const char* indices, bool starts,
                     std::vector<OpExampleArg> example, OpRegistry& registry) {
  using Spec = CausalConv1dSpec;
  op.Choice<ConvActivation>("activation", activation,
                            {{"none", ConvActivation::kNone},
                             {"", ConvActivation::kNone},
                             {"silu", ConvActivation::kSilu},
                             {"swish", ConvActivation::kSilu}},
                            &Spec::activation)
      .Attr("null_slot", int64_t{-1}, &Spec::null_slot);
  if (starts) {
    op.Maybe("query_start_loc", &ConvArgs::starts, {kAny}, IndexDType<Spec>());
  }
  return OrDrafts(op, indices, "destination_indices")
      // Shapes are refused as the plan refuses: a plan costs little.
      .Then([states](Spec& spec, const OpCall& call) {
        spec.state_layout =
            ConvStateLayoutOf(*call.Tensor(states), spec.channels);
        return CausalConv1dPlan::Create(spec).status();
      })
      .Out("out", &ConvArgs::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Reference([](const Spec& spec, const ConvArgs& args) {
        NativeCausalConv1d(spec, args);
      })
      .Example(std::move(example))
      .AddTo(registry);
}

absl::Status RegisterConvFn(OpRegistry& registry) {
  Conv op("causal_conv1d_fn");
  InBatch(States(Weight(X(op)), "conv_states"), "cache_indices", {});
  return AddConv(op, "conv_states", "silu", "cache_indices", /*starts=*/false,
                 {{"x", {4, 16}},
                  {"weight", {16, 4}},
                  {"conv_states", {128, 3, 16}},
                  {"cache_indices", {4}, DType::kI32}},
                 registry);
}

absl::Status RegisterConvUpdate(OpRegistry& registry) {
  Conv op("causal_conv1d_update");
  InTokens(Weight(States(X(op), "conv_state")), "conv_state_indices", {});
  return AddConv(op, "conv_state", "none", "conv_state_indices",
                 /*starts=*/true,
                 {{"x", {4, 16}},
                  {"conv_state", {128, 2, 16}},
                  {"weight", {16, 3}},
                  {"bias", {16}},
                  {"conv_state_indices", {4}, DType::kI32}},
                 registry);
}

// A tensor of Mamba-1 as it is without a dimension of heads, state[slots,
// channels, d_state], with one head in dimension `at`. A view of rank 0 is
// returned unchanged.
AnyTensorView WithOneHead(const AnyTensorView& v, int at) {
  if (v.rank() == 0 || v.rank() >= AnyTensorView::kMaxRank) return v;
  AnyTensorView::Dims extents{}, strides{};
  for (int d = 0; d <= v.rank(); ++d) {
    const auto to = static_cast<size_t>(d);
    extents[to] = d == at ? 1 : v.extent(d < at ? d : d - 1);
    strides[to] = d == at ? 1 : v.stride(d < at ? d : d - 1);
  }
  if (v.writable()) {
    return {v.dtype(), v.mutable_data(), v.rank() + 1, extents, strides};
  }
  return {v.dtype(), v.data(), v.rank() + 1, extents, strides};
}

// The tensors of Mamba-1 with one head.
void AddHead(UpdateArgs& args) {
  if (args.state.rank() != 3) return;
  for (AnyTensorView* view :
       {&args.state, &args.x, &args.dt, &args.b, &args.c, &args.z, &args.out}) {
    *view = WithOneHead(*view, 1);
  }
  for (AnyTensorView* view : {&args.a, &args.d, &args.dt_bias}) {
    *view = WithOneHead(*view, 0);
  }
}

// state[slots, heads, head_dim, d_state] and what goes with it; of Mamba-1
// without heads.
absl::Status FillStates(StateUpdateSpec& spec, const OpCall& call) {
  const TensorMeta &state = *call.Tensor("state"), &a = *call.Tensor("a");
  const TensorMeta &x = *call.Tensor("x"), &b = *call.Tensor("b");
  const bool heads = state.extents.size() != 3;
  if (heads) QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "state", state, 4));
  QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "x", x, heads ? 3 : 2));
  QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "b", b, heads ? 3 : 2));
  if (!heads || a.extents.size() != 3) {
    QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "a", a, heads ? 1 : 2));
  }
  spec.heads = heads ? state.extents[1] : 1;
  spec.groups = heads ? b.extents[1] : 1;
  spec.head_dim = state.extents[heads ? 2 : 1];
  spec.d_state = state.extents.back();
  spec.form =
      !heads || a.extents.size() == 3 ? SsmForm::kPerRow : SsmForm::kPerHead;
  spec.bc_dtype = b.dtype;
  return absl::OkStatus();
}

absl::Status FillDelta(StateUpdateSpec& spec, const OpCall& call) {
  spec.delta =
      call.Bool("dt_softplus") ? SsmDelta::kSoftplus : SsmDelta::kPlain;
  return absl::OkStatus();
}

absl::Status RegisterStateUpdate(OpRegistry& registry) {
  using Spec = StateUpdateSpec;
  using Args = UpdateArgs;
  Update op("selective_state_update");
  op.InOut("state", &Args::state, nullptr, {}, &Spec::state_dtype)
      .In("x", &Args::x, {}, &Spec::dtype)
      .In("dt", &Args::dt)
      .In("a", &Args::a)
      .In("b", &Args::b)
      .In("c", &Args::c)
      .Then(&FillStates)
      .Maybe("d", &Args::d)
      .Maybe("z", &Args::z)
      .Maybe("dt_bias", &Args::dt_bias);
  InTokens(op, "state_batch_indices", {})
      .Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>())
      .Finish(&AddHead);
  op.Attr("dt_softplus", false)
      .Then(&FillDelta)
      .Attr("null_slot", int64_t{-1}, &Spec::null_slot);
  return OrDrafts(op, "state_batch_indices", "dst_state_batch_indices")
      .Out("out", &Args::out, Like("x"), Like("x"))
      .Rows("x")
      .InPlace("x", "out")
      .InPlace("z", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeStateUpdate(spec, args);
      })
      .Example({{"state", {128, 2, 4, 1}},
                {"x", {4, 2, 4}},
                {"dt", {4, 2}},
                {"a", {2}, DType::kF32},
                {"b", {4, 1, 1}},
                {"c", {4, 1, 1}},
                {"state_batch_indices", {4}, DType::kI32}})
      .AddTo(registry);
}

using DeltaArgs = SequenceArgs<DeltaRuleArgs>;
using Delta = OpDeclaration<DeltaRulePlan, DeltaRuleSpec, DeltaArgs>;

// One decay for each head, or one for each channel of it.
absl::Status FillDecay(DeltaRuleSpec& spec, const OpCall& call) {
  const TensorMeta& g = *call.Tensor("g");
  const bool per_channel = g.extents.size() == 3;
  spec.decay = per_channel ? DeltaDecay::kPerChannel : DeltaDecay::kPerHead;
  return per_channel ? absl::OkStatus() : CheckRank(call.op(), "g", g, 2);
}

absl::Status FillNorm(DeltaRuleSpec& spec, const OpCall& call) {
  spec.norm = call.Bool("use_qk_l2norm") ? DeltaNorm::kL2 : DeltaNorm::kNone;
  return absl::OkStatus();
}

// The tensors of both operators, up to the indices of states.
Delta DeltaOp(const char* name) {
  using Spec = DeltaRuleSpec;
  Delta op(name);
  op.In("q", &DeltaArgs::q, {kRows, &Spec::key_heads, &Spec::dk}, &Spec::dtype)
      .In("k", &DeltaArgs::k)
      .In("v", &DeltaArgs::v, {kAny, &Spec::value_heads, &Spec::dv})
      .In("g", &DeltaArgs::g, {}, &Spec::g_dtype)
      .Then(&FillDecay)
      .In("beta", &DeltaArgs::beta, {}, &Spec::beta_dtype)
      .InOut("state", &DeltaArgs::state, nullptr, {kAny, kAny, kAny, kAny},
             &Spec::state_dtype);
  return op;
}

// `starts`: the operator has no query_start_loc yet.
absl::Status AddDelta(Delta& op, bool starts, OpRegistry& registry) {
  using Spec = DeltaRuleSpec;
  op.Attr("use_qk_l2norm", false)
      .Then(&FillNorm)
      .Attr("scale", 0.0, &Spec::scale)
      .Attr("null_slot", int64_t{-1}, &Spec::null_slot);
  if (starts) {
    op.Maybe("query_start_loc", &DeltaArgs::starts, {kAny},
             IndexDType<DeltaRuleSpec>());
  }
  return OrDrafts(op, "state_indices", "destination_indices")
      .Out("out", &DeltaArgs::out, Like("v"), Like("v"))
      .InPlace("v", "out")
      .Reference([](const DeltaRuleSpec& spec, const DeltaArgs& args) {
        NativeDeltaRule(spec, args);
      })
      .Example({{"q", {4, 1, 4}},
                {"k", {4, 1, 4}},
                {"v", {4, 2, 8}},
                {"g", {4, 2}, DType::kF32},
                {"beta", {4, 2}, DType::kF32},
                {"state", {128, 2, 4, 8}},
                {"state_indices", {4}, DType::kI32},
                {"use_qk_l2norm", true}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterRecurrentOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterConvFn(registry));
  QUERN_RETURN_IF_ERROR(RegisterConvUpdate(registry));
  return RegisterStateUpdate(registry);
}

absl::Status RegisterDeltaRuleOps(OpRegistry& registry) {
  Delta chunks = DeltaOp("chunk_gated_delta_rule");
  InBatch(chunks, "state_indices", {});
  QUERN_RETURN_IF_ERROR(AddDelta(chunks, /*starts=*/false, registry));
  Delta update = DeltaOp("gated_delta_rule_update");
  InTokens(update, "state_indices", {})
      .Given(&DeltaRuleSpec::chunk, int64_t{1});
  return AddDelta(update, /*starts=*/true, registry);
}

}  // namespace quern
