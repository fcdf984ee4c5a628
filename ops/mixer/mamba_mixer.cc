#include "quern/ops/mixer/mamba_mixer.h"

#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

// Numbers up to which no sum or product of two leaves 63 bits.
constexpr int64_t kMost = LinearWeights::kMaxExtent / 4;

const char* NameOf(MambaForm form) {
  return form == MambaForm::kMamba ? "mamba_mixer" : "plamo2_mamba_mixer";
}

absl::Status CheckSpec(const MambaMixerSpec& s) {
  const char* const op = NameOf(s.form);
  QUERN_RETURN_IF_ERROR(CheckRange(op, "heads", s.heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(op, "head_dim", s.head_dim, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "heads * head_dim", s.channels(), 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(op, "dt_rank", s.dt_rank, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "d_state", s.d_state, 1, StateUpdatePlan::kMaxState));
  QUERN_RETURN_IF_ERROR(CheckStateSpec(op, s.state_dtype, s.eps));
  if (s.form == MambaForm::kMamba) {
    return CheckEqual(op, "heads", s.heads, 1, "the form has");
  }
  return absl::OkStatus();
}

absl::StatusOr<RmsNormPlan> NormOf(const MambaMixerSpec& s, int64_t columns) {
  RmsNormSpec norm;
  norm.hidden = columns;
  norm.eps = s.eps;
  norm.x_dtype = norm.out_dtype = s.dtype;
  norm.residual_dtype = s.dtype;
  norm.weight_dtype = s.weight_dtype;
  return RmsNormPlan::Create(norm);
}

}  // namespace

MambaMixerPlan::MambaMixerPlan(const MambaMixerSpec& spec, MixerFrame frame,
                               LinearPlan x_proj, LinearPlan dt_proj,
                               const StateUpdatePlan& update)
    : spec_(spec),
      frame_(std::move(frame)),
      x_proj_(std::move(x_proj)),
      dt_proj_(std::move(dt_proj)),
      update_(update) {}

absl::StatusOr<MambaMixerPlan> MambaMixerPlan::Create(
    const MambaMixerSpec& spec, const MambaMixerWeights& weights,
    Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  const bool mamba = spec.form == MambaForm::kMamba;
  const int64_t channels = spec.channels();
  MixerFrameSpec frame = MixerFrameSpecOf(NameOf(spec.form), spec);
  frame.projected = 2 * channels;
  frame.inner = channels;
  frame.conv_column = mamba ? 0 : channels;
  frame.conv_channels = channels;
  QUERN_ASSIGN_OR_RETURN(
      MixerFrame made,
      MixerFrame::Create(frame, weights.in_proj, weights.out_proj, executor));
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan x_proj,
      MixerFrame::Product(frame, "x_proj", weights.x_proj,
                          spec.dt_rank + 2 * spec.d_state, channels, executor));
  QUERN_ASSIGN_OR_RETURN(LinearPlan dt_proj,
                         MixerFrame::Product(frame, "dt_proj", weights.dt_proj,
                                             mamba ? channels : spec.heads,
                                             spec.dt_rank, executor));
  StateUpdateSpec update_spec;
  update_spec.heads = spec.heads;
  update_spec.head_dim = spec.head_dim;
  update_spec.d_state = spec.d_state;
  update_spec.form = mamba ? SsmForm::kPerRow : SsmForm::kPerHead;
  update_spec.dtype = spec.dtype;
  update_spec.state_dtype = spec.state_dtype;
  update_spec.null_slot = spec.null_slot;
  QUERN_ASSIGN_OR_RETURN(const StateUpdatePlan update,
                         StateUpdatePlan::Create(update_spec));
  MambaMixerPlan plan(spec, std::move(made), std::move(x_proj),
                      std::move(dt_proj), update);
  if (spec.norm == MambaNorm::kRms) {
    QUERN_ASSIGN_OR_RETURN(plan.dt_norm_, NormOf(spec, spec.dt_rank));
    QUERN_ASSIGN_OR_RETURN(plan.state_norm_, NormOf(spec, spec.d_state));
  }
  return plan;
}

template <typename Allocator>
MambaMixerPlan::Scratch MambaMixerPlan::LayOut(Allocator& a,
                                               int64_t tokens) const {
  Scratch s;
  s.projected = frame_.LayOutProjected(a, tokens);
  s.second = a.template Allocate<char>("second projection",
                                       frame_.Bytes(tokens, second_columns()));
  s.dt = a.template Allocate<char>("dt", frame_.Bytes(tokens, dt_columns()));
  return s;
}

absl::StatusOr<int64_t> MambaMixerPlan::WorkspaceBytes(int64_t max_tokens,
                                                       int max_workers) const {
  WorkspaceLayout layout;
  LayOut(layout, max_tokens);
  QUERN_ASSIGN_OR_RETURN(const int64_t recurrence,
                         update_.WorkspaceBytes(max_tokens, max_workers));
  return frame_.WorkspaceBytes(layout, {&x_proj_, &dt_proj_}, recurrence,
                               max_tokens, max_workers);
}

absl::Status MambaMixerPlan::CheckArgs(const MambaMixerArgs& args) const {
  const MambaMixerSpec& s = spec_;
  const char* const op = frame_.spec().op;
  QUERN_RETURN_IF_ERROR(
      CheckOutput(op, "ssm_state", args.ssm_state, s.state_dtype,
                  {kAnyExtent, s.heads, s.head_dim, s.d_state}));
  const bool mamba = s.form == MambaForm::kMamba;
  // kPlamo2 has the first extent alone.
  const int64_t extents[] = {s.heads, s.head_dim, s.d_state};
  const auto per_state = absl::MakeConstSpan(extents, mamba ? 3 : 1);
  const auto per_row = absl::MakeConstSpan(extents, mamba ? 2 : 1);
  QUERN_RETURN_IF_ERROR(CheckInput(op, "a", args.a, DType::kF32, per_state));
  const NamedView optional[] = {{"d", args.d}, {"dt_bias", args.dt_bias}};
  for (const auto& [name, view] : optional) {
    if (view.rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckInput(op, name, view, DType::kF32, per_row));
  }
  const std::pair<NamedView, int64_t> norms[] = {
      {{"dt_norm", args.dt_norm}, s.dt_rank},
      {{"b_norm", args.b_norm}, s.d_state},
      {{"c_norm", args.c_norm}, s.d_state}};
  for (const auto& [norm, columns] : norms) {
    if (s.norm == MambaNorm::kRms) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(op, norm.first, norm.second, s.weight_dtype, {columns}));
    } else if (norm.second.rank() != 0) {
      return InvalidArgument(op, norm.first, " has rank ", norm.second.rank(),
                             "; need none, as the layer has no norms");
    }
  }
  return frame_.CheckArgs(args.layer,
                          {{"a", args.a},
                           {"d", args.d},
                           {"dt_bias", args.dt_bias},
                           {"dt_norm", args.dt_norm},
                           {"b_norm", args.b_norm},
                           {"c_norm", args.c_norm}},
                          {{"ssm_state", args.ssm_state}});
}

void MambaMixerPlan::Normalise(const MambaMixerArgs& args,
                               const AnyTensorView& dt, const AnyTensorView& b,
                               const AnyTensorView& c,
                               Executor& executor) const {
  if (!dt_norm_.has_value()) return;
  const MixerFrame::Tokens tokens(args.layer.batch);
  const auto own = [&](const AnyTensorView& v) {
    return RowSlice(v, tokens.first, tokens.count);
  };
  dt_norm_->Execute(own(dt), args.dt_norm, own(dt), executor);
  state_norm_->Execute(own(b), args.b_norm, own(b), executor);
  state_norm_->Execute(own(c), args.c_norm, own(c), executor);
}

void MambaMixerPlan::Execute(const MambaMixerArgs& args, Workspace workspace,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const MixerArgs& layer = args.layer;
  if (MixerFrame::Tokens(layer.batch).count == 0) return;
  const int64_t tokens = layer.x.extent(0);
  const int64_t n = spec_.channels(), state = spec_.d_state;
  const Scratch scratch = LayOut(workspace, tokens);
  const bool mamba = spec_.form == MambaForm::kMamba;
  const AnyTensorView p = frame_.Projected(scratch.projected, tokens);
  const int64_t u = mamba ? 0 : n, z = mamba ? n : 0;
  const AnyTensorView second(spec_.dtype, scratch.second, 2,
                             {tokens, second_columns()}, {second_columns(), 1});
  const AnyTensorView dt(spec_.dtype, scratch.dt, 2, {tokens, dt_columns()},
                         {dt_columns(), 1});
  // Where the second projection has each part.
  const int64_t dt_at = mamba ? 0 : 2 * state;
  const int64_t b_at = mamba ? spec_.dt_rank : 0;
  const int64_t c_at = b_at + state;

  frame_.Project(layer, p, workspace, executor);
  frame_.Convolve(layer, p, executor);
  MixerFrame::Multiply(x_proj_, layer.batch, ColumnSlice(p, u, n), second,
                       workspace, executor);
  const AnyTensorView low_rank = ColumnSlice(second, dt_at, spec_.dt_rank);
  Normalise(args, low_rank, ColumnSlice(second, b_at, state),
            ColumnSlice(second, c_at, state), executor);
  MixerFrame::Multiply(dt_proj_, layer.batch, low_rank, dt, workspace,
                       executor);

  StateUpdateArgs update;
  update.state = args.ssm_state;
  update.x = update.out = AsHeads(p, u, spec_.heads, spec_.head_dim);
  update.dt = mamba ? AsHeads(dt, 0, spec_.heads, spec_.head_dim) : dt;
  update.a = args.a;
  update.b = AsHeads(second, b_at, 1, state);
  update.c = AsHeads(second, c_at, 1, state);
  update.d = args.d;
  update.z = AsHeads(p, z, spec_.heads, spec_.head_dim);
  update.dt_bias = args.dt_bias;
  update.batch = layer.batch;
  update_.Execute(update, workspace, executor);
  frame_.Finish(layer, ColumnSlice(p, u, n), workspace, executor);
}

}  // namespace quern
