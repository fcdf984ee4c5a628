#include "quern/ops/mixer/mamba_mixer2.h"

#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "mamba_mixer2";
// Numbers up to which no sum or product of two leaves 63 bits.
constexpr int64_t kMost = LinearWeights::kMaxExtent / 4;

absl::Status CheckSpec(const MambaMixer2Spec& s) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "heads", s.heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "groups", s.groups, 1, s.heads));
  if (s.heads % s.groups != 0) {
    return InvalidArgument(kOp, "groups=", s.groups,
                           "; need a divisor of heads=", s.heads);
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "head_dim", s.head_dim, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "d_state", s.d_state, 1, StateUpdatePlan::kMaxState));
  QUERN_RETURN_IF_ERROR(CheckStateSpec(kOp, s.state_dtype, s.eps));
  return CheckRange(kOp, "heads * head_dim", s.channels(), 1, kMost);
}

}  // namespace

MambaMixer2Plan::MambaMixer2Plan(const MambaMixer2Spec& spec, MixerFrame frame,
                                 const StateUpdatePlan& update)
    : spec_(spec), frame_(std::move(frame)), update_(update) {}

absl::StatusOr<MambaMixer2Plan> MambaMixer2Plan::Create(
    const MambaMixer2Spec& spec, const LinearWeights& in_proj,
    const LinearWeights& out_proj, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  MixerFrameSpec frame = MixerFrameSpecOf(kOp, spec);
  frame.projected = spec.projected();
  frame.inner = spec.channels();
  frame.conv_column = spec.channels();
  frame.conv_channels = spec.conv_channels();
  QUERN_ASSIGN_OR_RETURN(
      MixerFrame made, MixerFrame::Create(frame, in_proj, out_proj, executor));
  StateUpdateSpec update_spec;
  update_spec.heads = spec.heads;
  update_spec.groups = spec.groups;
  update_spec.head_dim = spec.head_dim;
  update_spec.d_state = spec.d_state;
  update_spec.dtype = spec.dtype;
  update_spec.state_dtype = spec.state_dtype;
  update_spec.null_slot = spec.null_slot;
  QUERN_ASSIGN_OR_RETURN(const StateUpdatePlan update,
                         StateUpdatePlan::Create(update_spec));
  MambaMixer2Plan plan(spec, std::move(made), update);
  if (spec.norm == Mamba2Norm::kGroups) {
    RmsNormGatedSpec norm;
    norm.hidden = spec.channels();
    norm.group = spec.channels() / spec.groups;
    norm.eps = spec.eps;
    norm.gate = GateWhen::kGateFirst;
    norm.dtype = spec.dtype;
    norm.weight_dtype = spec.weight_dtype;
    QUERN_ASSIGN_OR_RETURN(plan.norm_, RmsNormGatedPlan::Create(norm));
  }
  return plan;
}

absl::StatusOr<int64_t> MambaMixer2Plan::WorkspaceBytes(int64_t max_tokens,
                                                        int max_workers) const {
  WorkspaceLayout layout;
  frame_.LayOutProjected(layout, max_tokens);
  QUERN_ASSIGN_OR_RETURN(const int64_t recurrence,
                         update_.WorkspaceBytes(max_tokens, max_workers));
  return frame_.WorkspaceBytes(layout, {}, recurrence, max_tokens, max_workers);
}

absl::Status MambaMixer2Plan::CheckArgs(const MambaMixer2Args& args) const {
  const MambaMixer2Spec& s = spec_;
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "ssm_state", args.ssm_state, s.state_dtype,
                  {kAnyExtent, s.heads, s.head_dim, s.d_state}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a", args.a, DType::kF32, {s.heads}));
  const NamedView optional[] = {{"d", args.d}, {"dt_bias", args.dt_bias}};
  for (const auto& [name, view] : optional) {
    if (view.rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, name, view, DType::kF32, {s.heads}));
  }
  if (norm_.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "norm", args.norm, s.weight_dtype, {s.channels()}));
  } else if (args.norm.rank() != 0) {
    return InvalidArgument(kOp, "norm has rank ", args.norm.rank(),
                           "; need none, as the layer has no norm");
  }
  return frame_.CheckArgs(args.layer,
                          {{"a", args.a},
                           {"d", args.d},
                           {"dt_bias", args.dt_bias},
                           {"norm", args.norm}},
                          {{"ssm_state", args.ssm_state}});
}

void MambaMixer2Plan::Execute(const MambaMixer2Args& args, Workspace workspace,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const MixerArgs& layer = args.layer;
  const MixerFrame::Tokens tokens(layer.batch);
  if (tokens.count == 0) return;
  const int64_t rows = layer.x.extent(0);
  const int64_t n = spec_.channels(), state = spec_.groups * spec_.d_state;
  const AnyTensorView p =
      frame_.Projected(frame_.LayOutProjected(workspace, rows), rows);
  const AnyTensorView z = ColumnSlice(p, 0, n), y = ColumnSlice(p, n, n);

  frame_.Project(layer, p, workspace, executor);
  frame_.Convolve(layer, p, executor);
  StateUpdateArgs update;
  update.state = args.ssm_state;
  update.x = update.out = AsHeads(p, n, spec_.heads, spec_.head_dim);
  update.dt = ColumnSlice(p, 2 * n + 2 * state, spec_.heads);
  update.a = args.a;
  update.b = AsHeads(p, 2 * n, spec_.groups, spec_.d_state);
  update.c = AsHeads(p, 2 * n + state, spec_.groups, spec_.d_state);
  update.d = args.d;
  if (!norm_.has_value()) {
    update.z = AsHeads(p, 0, spec_.heads, spec_.head_dim);
  }
  update.dt_bias = args.dt_bias;
  update.batch = layer.batch;
  update_.Execute(update, workspace, executor);
  if (norm_.has_value()) {
    const AnyTensorView own = RowSlice(y, tokens.first, tokens.count);
    norm_->Execute(own, RowSlice(z, tokens.first, tokens.count), args.norm, own,
                   executor);
  }
  frame_.Finish(layer, y, workspace, executor);
}

}  // namespace quern
