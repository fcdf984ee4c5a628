#include "quern/ops/registry/vllm/recurrent_ops.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/op_shape.h"
#include "quern/ops/registry/reference/recurrent.h"
#include "quern/ops/registry/vllm/recurrent.h"

namespace quern {
namespace {

constexpr char kSlots[] = "state_batch_indices";

absl::Status FillStates(StateUpdateSpec& spec, const OpCall& call) {
  const TensorMeta &state = *call.Tensor("state"), &a = *call.Tensor("a");
  const TensorMeta &x = *call.Tensor("x"), &b = *call.Tensor("b");
  QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "state", state, 4));
  QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "x", x, 3));
  QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "b", b, 3));
  if (a.extents.size() != 3) {
    QUERN_RETURN_IF_ERROR(CheckRank(call.op(), "a", a, 1));
  }
  spec.heads = state.extents[1];
  spec.head_dim = state.extents[2];
  spec.d_state = state.extents[3];
  spec.groups = b.extents[1];
  spec.form = a.extents.size() == 3 ? SsmForm::kPerRow : SsmForm::kPerHead;
  spec.bc_dtype = b.dtype;
  return StateUpdatePlan::Create(spec).status();
}
absl::Status FillDelta(StateUpdateSpec& spec, const OpCall& call) {
  spec.delta =
      call.Bool("dt_softplus") ? SsmDelta::kSoftplus : SsmDelta::kPlain;
  return absl::OkStatus();
}

absl::Status AddUpdate(OpRegistry& registry) {
  using Spec = StateUpdateSpec;
  using Args = SequenceArgs<StateUpdateArgs>;
  OpDeclaration<StateUpdatePlan, Spec, Args> op("selective_state_update_cpu");
  op.InOut("state", &Args::state, nullptr, {}, &Spec::state_dtype)
      .In("x", &Args::x, {}, &Spec::dtype)
      .In("dt", &Args::dt)
      .In("a", &Args::a)
      .In("b", &Args::b)
      .In("c", &Args::c)
      .Then(&FillStates)
      .Maybe("d", &Args::d)
      .Maybe("z", &Args::z)
      .Maybe("dt_bias", &Args::dt_bias)
      .Attr("dt_softplus", false)
      .Then(&FillDelta);
  InTokens(op, kSlots, {})
      .Attr("null_block_id", int64_t{-1}, &Spec::null_slot)
      .InOut("out", &Args::out, nullptr, Like("x"), Like("x"));
  return OrDrafts(op, kSlots, "dst_state_batch_indices")
      .Maybe("cu_seqlens", &Args::starts, {kAny}, IndexDType<Spec>())
      .Word("query_start_loc", "cu_seqlens")
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
                {kSlots, {4}, DType::kI32},
                {"out", {4, 2, 4}}})
      .AddTo(registry);
}

absl::Status AddConv(OpRegistry& registry) {
  using Spec = CausalConv1dSpec;
  using Args = SequenceArgs<CausalConv1dArgs>;
  OpDeclaration<CausalConv1dPlan, Spec, Args> op(
      "causal_conv1d_update_cpu_vec");
  op.In("x", &Args::x, {kRows, &Spec::channels}, &Spec::dtype)
      .InOut("conv_state", &Args::state, nullptr, {kAny, kAny, kAny})
      .Word("state", "conv_state")
      .Word("rows of state", "rows of conv_state")
      .In("weight", &Args::weight, {kAny, &Spec::width}, &Spec::weight_dtype)
      .Maybe("bias", &Args::bias)
      .Choice<ConvActivation>("activation", "",
                              {{"", ConvActivation::kNone},
                               {"silu", ConvActivation::kSilu},
                               {"swish", ConvActivation::kSilu}},
                              &Spec::activation);
  return InTokens(op, "conv_state_indices")
      .Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>())
      .Attr("pad_slot_id", int64_t{-1}, &Spec::null_slot)
      .Then([](Spec& spec, const OpCall& call) {
        spec.state_layout =
            ConvStateLayoutOf(*call.Tensor("conv_state"), spec.channels);
        return CausalConv1dPlan::Create(spec).status();
      })
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeCausalConv1d(spec, args);
      })
      .Example({{"x", {4, 16}},
                {"conv_state", {128, 3, 16}},
                {"weight", {16, 4}},
                {"bias", {16}},
                {"activation", "silu"},
                {"conv_state_indices", {4}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmRecurrentOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddUpdate(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmChunkScan(registry));
  return AddConv(registry);
}

}  // namespace quern
