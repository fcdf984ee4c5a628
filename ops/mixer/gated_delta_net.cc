#include "quern/ops/mixer/gated_delta_net.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "gated_delta_net";
// Numbers up to which no sum or product of two leaves 63 bits.
constexpr int64_t kMost = LinearWeights::kMaxExtent / 8;

absl::Status CheckSpec(const GatedDeltaNetSpec& s) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "key_heads", s.key_heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "value_heads", s.value_heads, 1, kMost));
  if (s.value_heads % s.key_heads != 0) {
    return InvalidArgument(kOp, "value_heads=", s.value_heads,
                           "; need a multiple of key_heads=", s.key_heads);
  }
  QUERN_RETURN_IF_ERROR(CheckStateSpec(kOp, s.state_dtype, s.eps));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "dk", s.dk, 1, DeltaRulePlan::kMaxDk));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "dv", s.dv, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "key_heads * dk", s.keys(), 1, kMost));
  return CheckRange(kOp, "value_heads * dv", s.values(), 1, kMost);
}

}  // namespace

GatedDeltaNetPlan::GatedDeltaNetPlan(const GatedDeltaNetSpec& spec,
                                     MixerFrame frame,
                                     const DeltaRulePlan& rule,
                                     const DeltaGatesPlan& gates,
                                     const RmsNormGatedPlan& norm)
    : spec_(spec),
      frame_(std::move(frame)),
      rule_(rule),
      gates_(gates),
      norm_(norm) {}

absl::StatusOr<GatedDeltaNetPlan> GatedDeltaNetPlan::Create(
    const GatedDeltaNetSpec& spec, const LinearWeights& in_proj,
    const LinearWeights& out_proj, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  MixerFrameSpec frame = MixerFrameSpecOf(kOp, spec);
  frame.projected = spec.projected();
  frame.inner = spec.values();
  frame.conv_channels = spec.conv_channels();
  QUERN_ASSIGN_OR_RETURN(
      MixerFrame made, MixerFrame::Create(frame, in_proj, out_proj, executor));
  DeltaRuleSpec rule_spec;
  rule_spec.key_heads = spec.key_heads;
  rule_spec.value_heads = spec.value_heads;
  rule_spec.dk = spec.dk;
  rule_spec.dv = spec.dv;
  rule_spec.dtype = spec.dtype;
  rule_spec.state_dtype = spec.state_dtype;
  rule_spec.norm = DeltaNorm::kL2;
  rule_spec.null_slot = spec.null_slot;
  QUERN_ASSIGN_OR_RETURN(const DeltaRulePlan rule,
                         DeltaRulePlan::Create(rule_spec));
  DeltaGatesSpec gates_spec;
  gates_spec.heads = spec.value_heads;
  gates_spec.dtype = spec.dtype;
  QUERN_ASSIGN_OR_RETURN(const DeltaGatesPlan gates,
                         DeltaGatesPlan::Create(gates_spec));
  RmsNormGatedSpec norm_spec;
  norm_spec.hidden = spec.values();
  norm_spec.group = spec.dv;
  norm_spec.eps = spec.eps;
  norm_spec.gate = GateWhen::kNormFirst;
  norm_spec.dtype = spec.dtype;
  norm_spec.weight_dtype = spec.weight_dtype;
  QUERN_ASSIGN_OR_RETURN(const RmsNormGatedPlan norm,
                         RmsNormGatedPlan::Create(norm_spec));
  return GatedDeltaNetPlan(spec, std::move(made), rule, gates, norm);
}

template <typename Allocator>
GatedDeltaNetPlan::Scratch GatedDeltaNetPlan::LayOut(Allocator& a,
                                                     int64_t tokens) const {
  int64_t gates = 0;
  if (!CheckedMul(tokens, spec_.value_heads, &gates)) gates = -1;
  Scratch s;
  s.projected = frame_.LayOutProjected(a, tokens);
  s.g = a.template Allocate<float>("g", gates);
  s.beta = a.template Allocate<float>("beta", gates);
  s.norm = a.template Allocate<char>(
      "norm weights",
      spec_.values() * static_cast<int64_t>(SizeOf(spec_.weight_dtype)));
  return s;
}

absl::StatusOr<int64_t> GatedDeltaNetPlan::WorkspaceBytes(
    int64_t max_tokens, int max_workers) const {
  WorkspaceLayout layout;
  LayOut(layout, max_tokens);
  QUERN_ASSIGN_OR_RETURN(const int64_t recurrence,
                         rule_.WorkspaceBytes(max_tokens, max_workers));
  return frame_.WorkspaceBytes(layout, {}, recurrence, max_tokens, max_workers);
}

absl::Status GatedDeltaNetPlan::CheckArgs(const GatedDeltaNetArgs& args) const {
  const GatedDeltaNetSpec& s = spec_;
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "state", args.state, s.state_dtype,
                                    {kAnyExtent, s.value_heads, s.dk, s.dv}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a_log", args.a_log, DType::kF32, {s.value_heads}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "dt_bias", args.dt_bias, DType::kF32, {s.value_heads}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "norm", args.norm, s.weight_dtype, {s.dv}));
  return frame_.CheckArgs(
      args.layer,
      {{"a_log", args.a_log}, {"dt_bias", args.dt_bias}, {"norm", args.norm}},
      {{"state", args.state}});
}

void GatedDeltaNetPlan::ComputeGates(const GatedDeltaNetArgs& args,
                                     const AnyTensorView& p,
                                     const Scratch& scratch,
                                     Executor& executor) const {
  const MixerFrame::Tokens tokens(args.layer.batch);
  const int64_t heads = spec_.value_heads;
  const int64_t b_at = spec_.conv_channels() + spec_.values();
  const AnyTensorView own = RowSlice(p, tokens.first, tokens.count);
  DeltaGatesArgs gates;
  gates.a = ColumnSlice(own, b_at + heads, heads);
  gates.b = ColumnSlice(own, b_at, heads);
  gates.a_log = args.a_log;
  gates.dt_bias = args.dt_bias;
  const int64_t first = tokens.first * heads;
  gates.g = DenseMatrix(scratch.g + first, tokens.count, heads);
  gates.beta = DenseMatrix(scratch.beta + first, tokens.count, heads);
  gates_.Execute(gates, executor);
}

void GatedDeltaNetPlan::Execute(const GatedDeltaNetArgs& args,
                                Workspace workspace,
                                Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const MixerArgs& layer = args.layer;
  const MixerFrame::Tokens tokens(layer.batch);
  if (tokens.count == 0) return;
  const int64_t rows = layer.x.extent(0);
  const int64_t keys = spec_.keys(), values = spec_.values();
  const int64_t v_at = 2 * keys, z_at = v_at + values;
  const Scratch scratch = LayOut(workspace, rows);
  const AnyTensorView p = frame_.Projected(scratch.projected, rows);

  frame_.Project(layer, p, workspace, executor);
  frame_.Convolve(layer, p, executor);
  ComputeGates(args, p, scratch, executor);
  DeltaRuleArgs rule;
  rule.q = AsHeads(p, 0, spec_.key_heads, spec_.dk);
  rule.k = AsHeads(p, keys, spec_.key_heads, spec_.dk);
  rule.v = rule.out = AsHeads(p, v_at, spec_.value_heads, spec_.dv);
  rule.g = DenseMatrix(scratch.g, rows, spec_.value_heads);
  rule.beta = DenseMatrix(scratch.beta, rows, spec_.value_heads);
  rule.state = args.state;
  rule.batch = layer.batch;
  rule_.Execute(rule, workspace, executor);

  const int64_t weight_bytes =
      spec_.dv * static_cast<int64_t>(SizeOf(spec_.weight_dtype));
  for (int64_t h = 0; h < spec_.value_heads; ++h) {
    std::memcpy(scratch.norm + h * weight_bytes, args.norm.data(),
                static_cast<size_t>(weight_bytes));
  }
  const AnyTensorView weight(spec_.weight_dtype,
                             static_cast<const void*>(scratch.norm), 1,
                             {values}, {1});
  const AnyTensorView y = ColumnSlice(p, v_at, values);
  const AnyTensorView own = RowSlice(y, tokens.first, tokens.count);
  norm_.Execute(
      own, RowSlice(ColumnSlice(p, z_at, values), tokens.first, tokens.count),
      weight, own, executor);
  frame_.Finish(layer, y, workspace, executor);
}

}  // namespace quern
