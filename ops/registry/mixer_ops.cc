#include "quern/ops/registry/mixer_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/gated_delta_net.h"
#include "quern/ops/mixer/mamba_mixer.h"
#include "quern/ops/mixer/mamba_mixer2.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/short_conv.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_activations.h"
#include "quern/ops/registry/mixer_examples.h"
#include "quern/ops/registry/recurrent_binding.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;
using Weights = const LinearWeights*;
constexpr char kShortConv[] = "short_conv";
constexpr char kMamba[] = "mamba_mixer";
constexpr char kPlamo2[] = "plamo2_mamba_mixer";
constexpr char kMamba2[] = "mamba_mixer2";
constexpr char kDeltaNet[] = "gated_delta_net";
// The schema's tensors that all layers have, in this order: x, conv_weight,
// conv_bias, conv_state first; indices, starts, initial, out last.
constexpr size_t kFirst = 4;
constexpr size_t kLast = 4;

MixerArgs CommonArgs(Tensors t) {
  const Tensors last = t.subspan(t.size() - kLast);
  return {t[0], t[1], t[2], t[3], BatchOf(last[0], last[1], last[2]), last[3]};
}

// A layer whose plan takes Args.
template <class Plan, class Args>
class BoundMixer final : public BoundOp {
 public:
  // `op` is a literal; `own`: tensors of the layer's own.
  BoundMixer(const char* op, Plan plan, size_t own, Args (*args)(Tensors))
      : op_(op), plan_(std::move(plan)), own_(own), args_(args) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, kFirst + own_ + kLast));
    const Tensors last = t.subspan(t.size() - kLast);
    QUERN_RETURN_IF_ERROR(
        CheckBatch(op_, "state_indices", last[0], last[1], last[2]));
    return plan_.CheckArgs(args_(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    plan_.Execute(args_(t), workspace, executor);
  }

 private:
  const char* op_;
  Plan plan_;
  size_t own_;
  Args (*args_)(Tensors);
};

template <class Plan, class Args>
Bound Bind(const char* op, absl::StatusOr<Plan> plan, size_t own,
           Args (*args)(Tensors)) {
  if (!plan.ok()) return plan.status();
  return std::unique_ptr<BoundOp>(
      new BoundMixer<Plan, Args>(op, *std::move(plan), own, args));
}

// A layer's state and its name in the schema.
using NamedMeta = std::pair<absl::string_view, const TensorMeta*>;
constexpr NamedMeta kNoState = {"", nullptr};

// What the shapes of all layers have in common.
Metas CheckMetas(const char* op, const TensorMeta& x, const TensorMeta& weight,
                 const TensorMeta& window, const NamedMeta& state,
                 const TensorMeta& indices, const MaybeMeta& starts) {
  QUERN_RETURN_IF_ERROR(CheckRank(op, "x", x, 2));
  QUERN_RETURN_IF_ERROR(CheckRank(op, "conv_weight", weight, 2));
  QUERN_RETURN_IF_ERROR(CheckRank(op, "conv_state", window, 3));
  if (state.second != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckRank(op, state.first, *state.second, 4));
  }
  QUERN_RETURN_IF_ERROR(CheckIndexMetas(op, "state_indices", indices, starts));
  return std::vector<TensorMeta>{x};
}

Metas ShortConvShapes(const TensorMeta& x, Weights, Weights,
                      const TensorMeta& weight, const MaybeMeta&,
                      const MutatedMeta& window, const TensorMeta& indices,
                      const MaybeMeta& starts, const MaybeMeta&, int64_t,
                      const std::string&) {
  return CheckMetas(kShortConv, x, weight, window, kNoState, indices, starts);
}
Bound ShortConv(const TensorMeta& x, Weights in_proj, Weights out_proj,
                const TensorMeta& weight, const MaybeMeta&,
                const MutatedMeta& window, const TensorMeta& indices,
                const MaybeMeta& starts, const MaybeMeta&, int64_t null_slot,
                const std::string& activations) {
  QUERN_RETURN_IF_ERROR(
      CheckMetas(kShortConv, x, weight, window, kNoState, indices, starts)
          .status());
  ShortConvSpec spec;
  spec.hidden = x.extents[1];
  spec.channels = weight.extents[0];
  spec.width = weight.extents[1];
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  spec.null_slot = null_slot;
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kShortConv, activations));
  InlineExecutor executor;
  return Bind(kShortConv,
              ShortConvPlan::Create(spec, *in_proj, *out_proj, executor), 0,
              &CommonArgs);
}

// Own tensors: state, a, d, dt_bias, dt_norm, b_norm, c_norm.
MambaMixerArgs MambaArgs(Tensors t) {
  return {CommonArgs(t), t[4], t[5], t[6], t[7], t[8], t[9], t[10]};
}
template <const char* kOp>
Metas MambaShapes(const TensorMeta& x, Weights, Weights, Weights, Weights,
                  const TensorMeta& weight, const MaybeMeta&,
                  const MutatedMeta& window, const MutatedMeta& state,
                  const TensorMeta&, const MaybeMeta&, const MaybeMeta&,
                  const MaybeMeta&, const MaybeMeta&, const MaybeMeta&,
                  const TensorMeta& indices, const MaybeMeta& starts,
                  const MaybeMeta&, double, int64_t, const std::string&) {
  return CheckMetas(kOp, x, weight, window, {"ssm_state", &state}, indices,
                    starts);
}
template <const char* kOp, MambaForm kForm>
Bound Mamba(const TensorMeta& x, Weights in_proj, Weights x_proj,
            Weights dt_proj, Weights out_proj, const TensorMeta& weight,
            const MaybeMeta&, const MutatedMeta& window,
            const MutatedMeta& state, const TensorMeta&, const MaybeMeta&,
            const MaybeMeta&, const MaybeMeta& dt_norm, const MaybeMeta& b_norm,
            const MaybeMeta& c_norm, const TensorMeta& indices,
            const MaybeMeta& starts, const MaybeMeta&, double eps,
            int64_t null_slot, const std::string& activations) {
  QUERN_RETURN_IF_ERROR(
      CheckMetas(kOp, x, weight, window, {"ssm_state", &state}, indices, starts)
          .status());
  if (dt_norm.has_value() != b_norm.has_value() ||
      dt_norm.has_value() != c_norm.has_value()) {
    return InvalidArgument(
        kOp,
        "dt_norm, b_norm and c_norm are not given together; need all or "
        "none");
  }
  MambaMixerSpec spec;
  spec.form = kForm;
  spec.hidden = x.extents[1];
  spec.heads = state.extents[1];
  spec.head_dim = state.extents[2];
  spec.d_state = state.extents[3];
  spec.dt_rank = dt_proj->spec().k;
  spec.width = weight.extents[1];
  spec.norm = dt_norm.has_value() ? MambaNorm::kRms : MambaNorm::kNone;
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  spec.state_dtype = state.dtype;
  spec.null_slot = null_slot;
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kOp, activations));
  InlineExecutor executor;
  return Bind(kOp,
              MambaMixerPlan::Create(
                  spec, {*in_proj, *x_proj, *dt_proj, *out_proj}, executor),
              7, &MambaArgs);
}

// Own tensors: state, a, d, dt_bias, norm.
MambaMixer2Args Mamba2Args(Tensors t) {
  return {CommonArgs(t), t[4], t[5], t[6], t[7], t[8]};
}
Metas Mamba2Shapes(const TensorMeta& x, Weights, Weights,
                   const TensorMeta& weight, const MaybeMeta&,
                   const MutatedMeta& window, const MutatedMeta& state,
                   const TensorMeta&, const MaybeMeta&, const MaybeMeta&,
                   const MaybeMeta&, const TensorMeta& indices,
                   const MaybeMeta& starts, const MaybeMeta&, int64_t, double,
                   int64_t, const std::string&) {
  return CheckMetas(kMamba2, x, weight, window, {"ssm_state", &state}, indices,
                    starts);
}
Bound Mamba2(const TensorMeta& x, Weights in_proj, Weights out_proj,
             const TensorMeta& weight, const MaybeMeta&,
             const MutatedMeta& window, const MutatedMeta& state,
             const TensorMeta&, const MaybeMeta&, const MaybeMeta&,
             const MaybeMeta& norm, const TensorMeta& indices,
             const MaybeMeta& starts, const MaybeMeta&, int64_t groups,
             double eps, int64_t null_slot, const std::string& activations) {
  QUERN_RETURN_IF_ERROR(CheckMetas(kMamba2, x, weight, window,
                                   {"ssm_state", &state}, indices, starts)
                            .status());
  if (groups < 1 || state.extents[1] % groups != 0) {
    return InvalidArgument(kMamba2, "n_groups=", groups, "; need a divisor of ",
                           state.extents[1], ", the heads of ssm_state");
  }
  MambaMixer2Spec spec;
  spec.hidden = x.extents[1];
  spec.heads = state.extents[1];
  spec.groups = groups;
  spec.head_dim = state.extents[2];
  spec.d_state = state.extents[3];
  spec.width = weight.extents[1];
  spec.norm = norm.has_value() ? Mamba2Norm::kGroups : Mamba2Norm::kNone;
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  spec.state_dtype = state.dtype;
  spec.null_slot = null_slot;
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kMamba2, activations));
  InlineExecutor executor;
  return Bind(kMamba2,
              MambaMixer2Plan::Create(spec, *in_proj, *out_proj, executor), 5,
              &Mamba2Args);
}

// Own tensors: state, a_log, dt_bias, norm.
GatedDeltaNetArgs DeltaNetArgs(Tensors t) {
  return {CommonArgs(t), t[4], t[5], t[6], t[7]};
}
Metas DeltaNetShapes(const TensorMeta& x, Weights, Weights,
                     const TensorMeta& weight, const MaybeMeta&,
                     const MutatedMeta& window, const MutatedMeta& state,
                     const TensorMeta&, const TensorMeta&, const TensorMeta&,
                     const TensorMeta& indices, const MaybeMeta& starts,
                     const MaybeMeta&, int64_t, double, int64_t,
                     const std::string&) {
  return CheckMetas(kDeltaNet, x, weight, window, {"state", &state}, indices,
                    starts);
}
Bound DeltaNet(const TensorMeta& x, Weights in_proj, Weights out_proj,
               const TensorMeta& weight, const MaybeMeta&,
               const MutatedMeta& window, const MutatedMeta& state,
               const TensorMeta&, const TensorMeta&, const TensorMeta&,
               const TensorMeta& indices, const MaybeMeta& starts,
               const MaybeMeta&, int64_t key_heads, double eps,
               int64_t null_slot, const std::string& activations) {
  QUERN_RETURN_IF_ERROR(CheckMetas(kDeltaNet, x, weight, window,
                                   {"state", &state}, indices, starts)
                            .status());
  if (key_heads < 1 || state.extents[1] % key_heads != 0) {
    return InvalidArgument(kDeltaNet, "num_k_heads=", key_heads,
                           "; need a divisor of ", state.extents[1],
                           ", the heads of state");
  }
  GatedDeltaNetSpec spec;
  spec.hidden = x.extents[1];
  spec.key_heads = key_heads;
  spec.value_heads = state.extents[1];
  spec.dk = state.extents[2];
  spec.dv = state.extents[3];
  spec.width = weight.extents[1];
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  spec.state_dtype = state.dtype;
  spec.null_slot = null_slot;
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kDeltaNet, activations));
  InlineExecutor executor;
  return Bind(kDeltaNet,
              GatedDeltaNetPlan::Create(spec, *in_proj, *out_proj, executor), 4,
              &DeltaNetArgs);
}

template <auto kShapes, auto kMake>
absl::Status Register(OpRegistry& r, absl::string_view op,
                      absl::string_view params, OpExample example) {
  QUERN_RETURN_IF_ERROR(r.Define<kShapes>(
      absl::StrCat(op, "(", params,
                   "int null_slot=-1, str activations=\"exact\") -> Tensor"),
      example, OpKind::kLayer));
  return r.Add<kMake>(op, "simd");
}

constexpr char kBatch[] =
    "Tensor state_indices, Tensor? query_start_loc, "
    "Tensor? has_initial_state, ";
constexpr char kMambaParams[] =
    "Tensor x, LinearWeights in_proj, LinearWeights x_proj, "
    "LinearWeights dt_proj, LinearWeights out_proj, Tensor conv_weight, "
    "Tensor? conv_bias, Tensor(a7!) conv_state, Tensor(a8!) ssm_state, "
    "Tensor a, Tensor? d, Tensor? dt_bias, Tensor? dt_norm, Tensor? b_norm, "
    "Tensor? c_norm, ";

}  // namespace

absl::Status RegisterMixerOps(OpRegistry& r) {
  constexpr char kCommon[] =
      "Tensor x, LinearWeights in_proj, LinearWeights out_proj, "
      "Tensor conv_weight, Tensor? conv_bias, Tensor(a5!) conv_state, ";
  QUERN_RETURN_IF_ERROR((Register<&ShortConvShapes, &ShortConv>(
      r, kShortConv, absl::StrCat(kCommon, kBatch), &ShortConvExample)));
  const std::string mamba =
      absl::StrCat(kMambaParams, kBatch, "float eps=1e-05, ");
  QUERN_RETURN_IF_ERROR(
      (Register<&MambaShapes<kMamba>, &Mamba<kMamba, MambaForm::kMamba>>(
          r, kMamba, mamba, &MambaExample)));
  QUERN_RETURN_IF_ERROR(
      (Register<&MambaShapes<kPlamo2>, &Mamba<kPlamo2, MambaForm::kPlamo2>>(
          r, kPlamo2, mamba, &Plamo2Example)));
  QUERN_RETURN_IF_ERROR((Register<&Mamba2Shapes, &Mamba2>(
      r, kMamba2,
      absl::StrCat(kCommon,
                   "Tensor(a6!) ssm_state, Tensor a, Tensor? d, "
                   "Tensor? dt_bias, Tensor? norm, ",
                   kBatch, "int n_groups=1, float eps=1e-05, "),
      &Mamba2Example)));
  return Register<&DeltaNetShapes, &DeltaNet>(
      r, kDeltaNet,
      absl::StrCat(kCommon,
                   "Tensor(a6!) state, Tensor a_log, Tensor dt_bias, "
                   "Tensor norm, ",
                   kBatch, "int num_k_heads, float eps=1e-06, "),
      &DeltaNetExample);
}

}  // namespace quern
