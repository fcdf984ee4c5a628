#include "quern/ops/registry/recurrent_ops.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/registry/native_recurrent.h"
#include "quern/ops/registry/recurrent_binding.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;
using Tensors = absl::Span<const AnyTensorView>;

constexpr char kConv[] = "causal_conv1d_fn";
constexpr char kConvUpdate[] = "causal_conv1d_update";
constexpr char kStateUpdate[] = "selective_state_update";
// What each calls the indices of slots.
constexpr char kConvIndices[] = "cache_indices";
constexpr char kConvUpdateIndices[] = "conv_state_indices";
constexpr char kStateIndices[] = "state_batch_indices";

// x, weight, bias, conv_states, indices, starts, initial, out.
constexpr Binding<CausalConv1dArgs> kConvBinding = {
    kConv, 8,
    [](const char* op, Tensors t) {
      return CheckBatch(op, kConvIndices, t[4], t[5], t[6]);
    },
    [](Tensors t) {
      return CausalConv1dArgs{
          t[0], t[1], t[2], t[3], BatchOf(t[4], t[5], t[6], kConvIndices),
          t[7]};
    }};
// x, conv_state, weight, bias, indices, out.
constexpr Binding<CausalConv1dArgs> kConvUpdateBinding = {
    kConvUpdate, 6,
    [](const char* op, Tensors t) {
      return CheckBatch(op, kConvUpdateIndices, t[4], {}, {});
    },
    [](Tensors t) {
      return CausalConv1dArgs{
          t[0], t[2], t[3], t[1], BatchOf(t[4], {}, {}, kConvUpdateIndices),
          t[5]};
    }};

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
TensorMeta WithOneHead(TensorMeta meta, int at) {
  if (static_cast<int>(meta.extents.size()) >= at) {
    meta.extents.insert(meta.extents.begin() + at, 1);
  }
  return meta;
}

// state, x, dt, a, b, c, d, z, dt_bias, indices, starts, out.
constexpr Binding<StateUpdateArgs> kStateUpdateBinding = {
    kStateUpdate, 12,
    [](const char* op, Tensors t) {
      return CheckBatch(op, kStateIndices, t[9], t[10], {});
    },
    [](Tensors t) {
      StateUpdateArgs args = {
          t[0], t[1], t[2], t[3], t[4],
          t[5], t[6], t[7], t[8], BatchOf(t[9], t[10], {}, kStateIndices),
          t[11]};
      if (args.state.rank() != 3) return args;
      for (AnyTensorView* view : {&args.state, &args.x, &args.dt, &args.b,
                                  &args.c, &args.z, &args.out}) {
        *view = WithOneHead(*view, 1);
      }
      for (AnyTensorView* view : {&args.a, &args.d, &args.dt_bias}) {
        *view = WithOneHead(*view, 0);
      }
      return args;
    }};

NamedArgs ConvExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 16}}},
          {"weight", TensorMeta{dtype, {16, 4}}},
          {"conv_states", TensorMeta{dtype, {128, 3, 16}}},
          {"cache_indices", TensorMeta{DType::kI32, {4}}}};
}
NamedArgs ConvUpdateExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 16}}},
          {"conv_state", TensorMeta{dtype, {128, 2, 16}}},
          {"weight", TensorMeta{dtype, {16, 3}}},
          {"bias", TensorMeta{dtype, {16}}},
          {"conv_state_indices", TensorMeta{DType::kI32, {4}}}};
}

absl::StatusOr<CausalConv1dPlan> ConvPlan(
    const char* op, const TensorMeta& x, const TensorMeta& weight,
    const TensorMeta& state, const TensorMeta& indices, const MaybeMeta& starts,
    const std::string& activation, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(CheckRank(op, "x", x, 2));
  QUERN_RETURN_IF_ERROR(CheckRank(op, "weight", weight, 2));
  const bool update = absl::string_view(op) == kConvUpdate;
  QUERN_RETURN_IF_ERROR(
      CheckRank(op, update ? "conv_state" : "conv_states", state, 3));
  QUERN_RETURN_IF_ERROR(CheckIndexMetas(
      op, update ? kConvUpdateIndices : kConvIndices, indices, starts));
  CausalConv1dSpec spec;
  spec.channels = x.extents[1];
  spec.width = weight.extents[1];
  if (activation == "none" || activation.empty()) {
    spec.activation = ConvActivation::kNone;
  } else if (activation != "silu" && activation != "swish") {
    return InvalidArgument(op, "activation=\"", activation,
                           "\"; need \"none\", \"silu\" or \"swish\"");
  }
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  spec.null_slot = null_slot;
  return CausalConv1dPlan::Create(spec);
}

Metas ConvShapes(const TensorMeta& x, const TensorMeta& weight,
                 const MaybeMeta&, const MutatedMeta& state,
                 const TensorMeta& indices, const MaybeMeta& starts,
                 const MaybeMeta&, const std::string& activation,
                 int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      ConvPlan(kConv, x, weight, state, indices, starts, activation, null_slot)
          .status());
  return std::vector<TensorMeta>{x};
}
template <bool kNative>
Bound Conv(const TensorMeta& x, const TensorMeta& weight, const MaybeMeta&,
           const MutatedMeta& state, const TensorMeta& indices,
           const MaybeMeta& starts, const MaybeMeta&,
           const std::string& activation, int64_t null_slot) {
  QUERN_ASSIGN_OR_RETURN(const CausalConv1dPlan plan,
                         ConvPlan(kConv, x, weight, state, indices, starts,
                                  activation, null_slot));
  return BindPlan(plan, kConvBinding, kNative ? &NativeCausalConv1d : nullptr);
}

Metas ConvUpdateShapes(const TensorMeta& x, const MutatedMeta& state,
                       const TensorMeta& weight, const MaybeMeta&,
                       const TensorMeta& indices, const std::string& activation,
                       int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(ConvPlan(kConvUpdate, x, weight, state, indices, {},
                                 activation, null_slot)
                            .status());
  return std::vector<TensorMeta>{x};
}
template <bool kNative>
Bound ConvUpdate(const TensorMeta& x, const MutatedMeta& state,
                 const TensorMeta& weight, const MaybeMeta&,
                 const TensorMeta& indices, const std::string& activation,
                 int64_t null_slot) {
  QUERN_ASSIGN_OR_RETURN(const CausalConv1dPlan plan,
                         ConvPlan(kConvUpdate, x, weight, state, indices, {},
                                  activation, null_slot));
  return BindPlan(plan, kConvUpdateBinding,
                  kNative ? &NativeCausalConv1d : nullptr);
}

NamedArgs StateUpdateExample(DType dtype) {
  return {{"state", TensorMeta{dtype, {128, 2, 4, 1}}},
          {"x", TensorMeta{dtype, {4, 2, 4}}},
          {"dt", TensorMeta{dtype, {4, 2}}},
          {"a", TensorMeta{DType::kF32, {2}}},
          {"b", TensorMeta{dtype, {4, 1, 1}}},
          {"c", TensorMeta{dtype, {4, 1, 1}}},
          {"state_batch_indices", TensorMeta{DType::kI32, {4}}}};
}

absl::StatusOr<StateUpdatePlan> StateUpdatePlanOf(
    const TensorMeta& state, const TensorMeta& x, const TensorMeta& a,
    const TensorMeta& b, const TensorMeta& indices, const MaybeMeta& starts,
    bool softplus, int64_t null_slot) {
  constexpr const char* kOp = kStateUpdate;
  if (state.extents.size() == 3) {
    QUERN_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
    QUERN_RETURN_IF_ERROR(CheckRank(kOp, "a", a, 2));
    QUERN_RETURN_IF_ERROR(CheckRank(kOp, "b", b, 2));
    return StateUpdatePlanOf(WithOneHead(state, 1), WithOneHead(x, 1),
                             WithOneHead(a, 0), WithOneHead(b, 1), indices,
                             starts, softplus, null_slot);
  }
  QUERN_RETURN_IF_ERROR(CheckRank(kOp, "state", state, 4));
  QUERN_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 3));
  QUERN_RETURN_IF_ERROR(CheckRank(kOp, "b", b, 3));
  if (a.extents.size() != 3) {
    QUERN_RETURN_IF_ERROR(CheckRank(kOp, "a", a, 1));
  }
  QUERN_RETURN_IF_ERROR(CheckIndexMetas(kOp, kStateIndices, indices, starts));
  StateUpdateSpec spec;
  spec.heads = state.extents[1];
  spec.groups = b.extents[1];
  spec.head_dim = state.extents[2];
  spec.d_state = state.extents[3];
  spec.form = a.extents.size() == 3 ? SsmForm::kPerRow : SsmForm::kPerHead;
  spec.delta = softplus ? SsmDelta::kSoftplus : SsmDelta::kPlain;
  spec.dtype = x.dtype;
  spec.state_dtype = state.dtype;
  spec.bc_dtype = b.dtype;
  spec.null_slot = null_slot;
  return StateUpdatePlan::Create(spec);
}

Metas StateUpdateShapes(const MutatedMeta& state, const TensorMeta& x,
                        const TensorMeta&, const TensorMeta& a,
                        const TensorMeta& b, const TensorMeta&,
                        const MaybeMeta&, const MaybeMeta&, const MaybeMeta&,
                        const TensorMeta& indices, const MaybeMeta& starts,
                        bool softplus, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      StateUpdatePlanOf(state, x, a, b, indices, starts, softplus, null_slot)
          .status());
  return std::vector<TensorMeta>{x};
}
template <bool kNative>
Bound StateUpdate(const MutatedMeta& state, const TensorMeta& x,
                  const TensorMeta&, const TensorMeta& a, const TensorMeta& b,
                  const TensorMeta&, const MaybeMeta&, const MaybeMeta&,
                  const MaybeMeta&, const TensorMeta& indices,
                  const MaybeMeta& starts, bool softplus, int64_t null_slot) {
  QUERN_ASSIGN_OR_RETURN(
      const StateUpdatePlan plan,
      StateUpdatePlanOf(state, x, a, b, indices, starts, softplus, null_slot));
  return BindSequences(plan, kStateUpdateBinding,
                       kNative ? &NativeStateUpdate : nullptr);
}

absl::Status RegisterConv(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&ConvShapes>(
      "causal_conv1d_fn(Tensor x, Tensor weight, Tensor? bias, "
      "Tensor(a3!) conv_states, Tensor cache_indices, "
      "Tensor? query_start_loc, Tensor? has_initial_state, "
      "str activation=\"silu\", int null_slot=-1) -> Tensor",
      &ConvExample));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kConv,
      {{{"x", "out"}},
       OpRows::kFirst,
       "",
       {{"state", "conv_states"}, {"rows of state", "rows of conv_states"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Conv<false>>(kConv, "simd"));
  QUERN_RETURN_IF_ERROR(r.Add<&Conv<true>>(kConv, OpRegistry::kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&ConvUpdateShapes>(
      "causal_conv1d_update(Tensor x, Tensor(a1!) conv_state, Tensor weight, "
      "Tensor? bias, Tensor conv_state_indices, str activation=\"none\", "
      "int null_slot=-1) -> Tensor",
      &ConvUpdateExample));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kConvUpdate,
      {{{"x", "out"}},
       OpRows::kFirst,
       "",
       {{"state", "conv_state"}, {"rows of state", "rows of conv_state"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&ConvUpdate<false>>(kConvUpdate, "simd"));
  return r.Add<&ConvUpdate<true>>(kConvUpdate, OpRegistry::kReference);
}

}  // namespace

absl::Status RegisterRecurrentOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(RegisterConv(r));
  QUERN_RETURN_IF_ERROR(r.Define<&StateUpdateShapes>(
      "selective_state_update(Tensor(a0!) state, Tensor x, Tensor dt, "
      "Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, "
      "Tensor state_batch_indices, Tensor? query_start_loc, "
      "bool dt_softplus=False, int null_slot=-1) -> Tensor",
      &StateUpdateExample));
  // The pool of states, which comes first, has slots and no rows.
  QUERN_RETURN_IF_ERROR(r.Declare(
      kStateUpdate, {{{"x", "out"}, {"z", "out"}}, OpRows::kFirst, "x"}));
  QUERN_RETURN_IF_ERROR(r.Add<&StateUpdate<false>>(kStateUpdate, "simd"));
  return r.Add<&StateUpdate<true>>(kStateUpdate, OpRegistry::kReference);
}

}  // namespace quern
