#include "quern/ops/registry/families/recurrent/recurrent_ops.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "quern/ops/recurrent/causal_conv1d.h"
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

}  // namespace

absl::Status RegisterRecurrentOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterConvFn(registry));
  QUERN_RETURN_IF_ERROR(RegisterConvUpdate(registry));
  return RegisterStateUpdate(registry);
}

}  // namespace quern
