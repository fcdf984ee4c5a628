#include "quern/ops/mla/mla.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/cache/head_rows.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mla/mla_scratch.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";

absl::Status CheckShape(absl::string_view field, const LinearWeights& weights,
                        int64_t n, int64_t k) {
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat("columns of ", field),
                                   weights.spec().n, n, "the layer has"));
  return CheckEqual(kOp, absl::StrCat("k of ", field), weights.spec().k, k,
                    "the layer has");
}

// The matrices of the heads, or kv_b, which have no bias.
absl::Status CheckHeads(absl::string_view field,
                        absl::Span<const LinearWeights> weights, int64_t count,
                        int64_t n, int64_t k) {
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat("number of ", field),
                                   static_cast<int64_t>(weights.size()), count,
                                   "the layer has"));
  for (const LinearWeights& w : weights) {
    QUERN_RETURN_IF_ERROR(CheckShape(field, w, n, k));
    if (w.has_bias()) {
      return InvalidArgument(kOp, field, " has a bias; need none");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckWeights(const MlaSpec& s, const MlaWeights& w) {
  if (w.q_a.has_value() != (s.q_lora > 0)) {
    return InvalidArgument(kOp, "q_a is ", w.q_a.has_value() ? "given" : "none",
                           " and q_lora=", s.q_lora,
                           "; need q_a where q_lora is not 0");
  }
  if (w.q_a.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckShape("q_a", *w.q_a, s.q_lora, s.hidden));
  }
  QUERN_RETURN_IF_ERROR(CheckShape("q", w.q, s.heads * s.head_dim(),
                                   s.q_lora > 0 ? s.q_lora : s.hidden));
  QUERN_RETURN_IF_ERROR(CheckShape("kv_a", w.kv_a, s.latent_row(), s.hidden));
  QUERN_RETURN_IF_ERROR(
      CheckHeads("q_absorb", w.q_absorb, s.heads, s.kv_lora, s.nope));
  QUERN_RETURN_IF_ERROR(
      CheckHeads("v_up", w.v_up, s.heads, s.v_head_dim, s.kv_lora));
  if (w.kv_b.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckHeads(
        "kv_b", {*w.kv_b}, 1, s.heads * (s.nope + s.v_head_dim), s.kv_lora));
  } else if (s.form != MlaForm::kAbsorbed) {
    return InvalidArgument(kOp,
                           "kv_b is missing; need it, or the absorbed form");
  }
  return CheckShape("out", w.out, s.hidden, s.heads * s.v_head_dim);
}

absl::StatusOr<RmsNormPlan> Norm(const MlaSpec& spec, int64_t columns) {
  RmsNormSpec norm;
  norm.hidden = columns;
  norm.eps = spec.eps;
  norm.x_dtype = norm.out_dtype = norm.residual_dtype = spec.dtype;
  norm.weight_dtype = spec.norm_dtype;
  return RmsNormPlan::Create(norm);
}

}  // namespace

MlaPlan::MlaPlan(const MlaSpec& spec, Layers layers, const RmsNormPlan& q_norm,
                 const RmsNormPlan& kv_norm, const WriteKvPlan& write,
                 const PagedAttentionPlan& attend,
                 const VarlenAttentionPlan& direct)
    : spec_(spec),
      layers_(std::move(layers)),
      q_norm_(q_norm),
      kv_norm_(kv_norm),
      write_(write),
      attend_(attend),
      direct_(direct) {}

absl::StatusOr<MlaPlan> MlaPlan::Create(const MlaSpec& spec,
                                        const MlaWeights& weights,
                                        Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckMlaSpec(spec));
  QUERN_RETURN_IF_ERROR(CheckWeights(spec, weights));
  LinearSpec linear;
  linear.a = linear.c = spec.dtype;
  linear.kernels = spec.kernels;
  const auto plan = [&](LinearSpec one, const LinearWeights& of) {
    one.activations = ActivationsFor(of.spec(), spec.activations);
    return LinearPlan::Create(one, of, executor);
  };
  const auto grouped_plan = [&](const std::vector<LinearWeights>& heads) {
    GroupedLinearSpec grouped;
    grouped.a = grouped.c = spec.dtype;
    grouped.activations = ActivationsFor(heads[0].spec(), spec.activations);
    return GroupedLinearPlan::Create(grouped, heads);
  };
  QUERN_ASSIGN_OR_RETURN(LinearPlan q, plan(linear, weights.q));
  QUERN_ASSIGN_OR_RETURN(LinearPlan kv_a, plan(linear, weights.kv_a));
  LinearSpec last = linear;
  last.c = spec.dtype_of_out();
  last.residual = spec.residual;
  QUERN_ASSIGN_OR_RETURN(LinearPlan out, plan(last, weights.out));
  QUERN_ASSIGN_OR_RETURN(GroupedLinearPlan q_absorb,
                         grouped_plan(weights.q_absorb));
  QUERN_ASSIGN_OR_RETURN(GroupedLinearPlan v_up, grouped_plan(weights.v_up));
  Layers layers = {std::nullopt,   std::move(q), std::move(kv_a),
                   std::move(out), std::nullopt, std::move(q_absorb),
                   std::move(v_up)};
  if (weights.q_a.has_value()) {
    QUERN_ASSIGN_OR_RETURN(layers.q_a, plan(linear, *weights.q_a));
  }
  if (weights.kv_b.has_value()) {
    QUERN_ASSIGN_OR_RETURN(layers.kv_b, plan(linear, *weights.kv_b));
  }
  QUERN_ASSIGN_OR_RETURN(const RmsNormPlan kv_norm, Norm(spec, spec.kv_lora));
  // Without q_a its norm is not used.
  QUERN_ASSIGN_OR_RETURN(
      const RmsNormPlan q_norm,
      Norm(spec, spec.q_lora > 0 ? spec.q_lora : spec.kv_lora));
  WriteKvSpec write_spec;
  write_spec.kv = spec.cache;
  write_spec.input = spec.dtype;
  QUERN_ASSIGN_OR_RETURN(const WriteKvPlan write,
                         WriteKvPlan::Create(write_spec));
  QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan attend,
                         PagedAttentionPlan::Create(AbsorbedAttention(spec)));
  QUERN_ASSIGN_OR_RETURN(const VarlenAttentionPlan direct,
                         VarlenAttentionPlan::Create(DirectAttention(spec)));
  return MlaPlan(spec, std::move(layers), q_norm, kv_norm, write, attend,
                 direct);
}

int64_t MlaPlan::packed_bytes() const {
  int64_t bytes = layers_.q.packed_bytes() + layers_.kv_a.packed_bytes() +
                  layers_.out.packed_bytes() + layers_.q_absorb.packed_bytes() +
                  layers_.v_up.packed_bytes();
  if (layers_.q_a.has_value()) bytes += layers_.q_a->packed_bytes();
  if (layers_.kv_b.has_value()) bytes += layers_.kv_b->packed_bytes();
  return bytes;
}

absl::StatusOr<int64_t> MlaPlan::WorkspaceBytes(const MlaSchedule& schedule,
                                                int max_workers) const {
  Load load = {};
  load.tokens = schedule.num_tokens();
  load.direct = static_cast<int64_t>(schedule.direct_tokens().size());
  load.absorbed = static_cast<int64_t>(schedule.absorbed_tokens().size());
  QUERN_ASSIGN_OR_RETURN(
      load.direct_bytes,
      direct_.WorkspaceBytes(schedule.direct(), max_workers));
  QUERN_ASSIGN_OR_RETURN(
      load.absorbed_bytes,
      attend_.WorkspaceBytes(schedule.absorbed(), max_workers));
  return WorkspaceBytes(load, max_workers);
}

absl::StatusOr<int64_t> MlaPlan::WorkspaceBytes(const AttentionLimits& limits,
                                                int max_workers) const {
  AttentionLimits apart = limits;
  apart.prefix_groups = false;
  Load load = {};
  load.tokens = load.absorbed = limits.max_tokens;
  QUERN_ASSIGN_OR_RETURN(load.absorbed_bytes,
                         attend_.WorkspaceBytes(apart, max_workers));
  if (layers_.kv_b.has_value()) {
    load.direct = limits.max_tokens;
    apart.max_kv_len = std::min(limits.max_kv_len, limits.max_tokens);
    QUERN_ASSIGN_OR_RETURN(load.direct_bytes,
                           direct_.WorkspaceBytes(apart, max_workers));
  }
  return WorkspaceBytes(load, max_workers);
}

absl::StatusOr<int64_t> MlaPlan::WorkspaceBytes(const Load& load,
                                                int workers) const {
  int64_t most = 0;
  const auto need = [&most](const WorkspaceLayout& before,
                            absl::StatusOr<int64_t> bytes) -> absl::Status {
    if (!bytes.ok()) return bytes.status();
    WorkspaceLayout layout = before;
    layout.Allocate<char>("step", *bytes);
    most = layout.overflow() ? -1 : std::max(most, layout.bytes());
    return most < 0 ? absl::ResourceExhaustedError(absl::StrCat(
                          kOp, ": the workspace has 2^63 bytes or more"))
                    : absl::OkStatus();
  };
  WorkspaceLayout common;
  LayOutMla(common, spec_, load.tokens);
  for (const LinearPlan* plan : {&layers_.q, &layers_.kv_a, &layers_.out}) {
    QUERN_RETURN_IF_ERROR(
        need(common, plan->WorkspaceBytes(load.tokens, workers)));
  }
  if (layers_.q_a.has_value()) {
    QUERN_RETURN_IF_ERROR(
        need(common, layers_.q_a->WorkspaceBytes(load.tokens, workers)));
  }
  if (load.direct > 0 && layers_.kv_b.has_value()) {
    WorkspaceLayout direct = common;
    LayOutMlaDirect(direct, spec_, load.direct);
    QUERN_RETURN_IF_ERROR(
        need(direct, layers_.kv_b->WorkspaceBytes(load.direct, workers)));
    QUERN_RETURN_IF_ERROR(need(direct, load.direct_bytes));
  }
  if (load.absorbed > 0) {
    WorkspaceLayout absorbed = common;
    LayOutMlaAbsorbed(absorbed, spec_, load.absorbed);
    int64_t rows = 0;
    if (!CheckedMul(load.absorbed, spec_.heads, &rows)) {
      rows = GroupedLinearPlan::kMaxRows + 1;
    }
    QUERN_RETURN_IF_ERROR(
        need(absorbed, layers_.q_absorb.WorkspaceBytes(rows, workers)));
    QUERN_RETURN_IF_ERROR(
        need(absorbed, layers_.v_up.WorkspaceBytes(rows, workers)));
    QUERN_RETURN_IF_ERROR(need(absorbed, load.absorbed_bytes));
  }
  return most;
}

absl::Status MlaPlan::CheckRope(const MlaArgs& args) const {
  if (args.rope == nullptr) return InvalidArgument(kOp, "rope is null");
  const RotaryEmbeddingSpec& rope = args.rope->spec();
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "head_dim of the rotation",
                                   rope.head_dim, spec_.rope, "rope is"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "rot_dim of the rotation", rope.rot_dim,
                                   spec_.rope, "rope is"));
  QUERN_RETURN_IF_ERROR(
      CheckDType(kOp, "the rotation", rope.dtype, spec_.dtype));
  // What is rotated lies in the workspace, so that only positions are checked.
  const AnyTensorView no_heads(spec_.dtype, static_cast<void*>(nullptr), 3,
                               {args.schedule.num_tokens(), 0, spec_.rope},
                               {0, 0, 1});
  return args.rope->CheckArgs(args.positions, no_heads, no_heads);
}

absl::Status MlaPlan::CheckArgs(const MlaArgs& args) const {
  const MlaSpec& s = spec_;
  const int64_t tokens = args.schedule.num_tokens();
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, s.dtype, {tokens, s.hidden}));
  for (const LinearPlan* plan :
       {s.q_lora > 0 ? &*layers_.q_a : &layers_.q, &layers_.kv_a}) {
    QUERN_RETURN_IF_ERROR(plan->CheckRowStride(kOp, "x", args.x));
  }
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", args.out, s.dtype_of_out(), {tokens, s.hidden}));
  QUERN_RETURN_IF_ERROR(layers_.out.CheckRowStride(kOp, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", args.x, "out", args.out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "positions", args.positions.tensor(), "out", args.out));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "kv_norm", args.kv_norm, s.norm_dtype, {s.kv_lora}));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "kv_norm", args.kv_norm, "out", args.out));
  if (s.q_lora > 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "q_norm", args.q_norm, s.norm_dtype, {s.q_lora}));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "q_norm", args.q_norm, "out", args.out));
  } else if (args.q_norm.rank() != 0) {
    return InvalidArgument(kOp, "q_norm is given; need none, as q_lora is 0");
  }
  if (args.residual.rank() != 0 && !s.residual) {
    return InvalidArgument(kOp,
                           "residual is given; need a spec that allows it");
  }
  QUERN_RETURN_IF_ERROR(CheckResidual(kOp, args.residual, args.out));
  QUERN_RETURN_IF_ERROR(CheckRope(args));
  return CheckCaches(args);
}

absl::Status MlaPlan::CheckCaches(const MlaArgs& args) const {
  const MlaSchedule& schedule = args.schedule;
  if (args.cache.layout() != spec_.cache) {
    return InvalidArgument(kOp, "the cache has another layout than the spec");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, args.cache));
  const AnyTensorView positions = args.positions.tensor();
  const struct {
    const char* name;
    const AnyTensorView& view;
  } others[] = {{"x", args.x},           {"positions", positions},
                {"q_norm", args.q_norm}, {"kv_norm", args.kv_norm},
                {"out", args.out},       {"residual", args.residual}};
  for (const auto& other : others) {
    if (IsEmpty(other.view)) continue;
    QUERN_RETURN_IF_ERROR(
        CheckApartFromCache(kOp, other.name, other.view, args.cache));
  }
  if (schedule.num_tokens() == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "heads of the schedule",
                                   schedule.heads(), spec_.heads,
                                   "the layer has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "page_size of the schedule",
                                   schedule.pages().page_size(),
                                   spec_.cache.page_size(), "the cache has"));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "pages of the schedule's table",
                                   schedule.pages().num_pages(), 0,
                                   args.cache.num_pages()));
  if (!schedule.direct_tokens().empty() && !layers_.kv_b.has_value()) {
    return InvalidArgument(kOp,
                           "the schedule has tokens of the direct form, for "
                           "which there is no kv_b; need one of kAbsorbed");
  }
  return absl::OkStatus();
}

}  // namespace quern
