#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/registry/native_recurrent.h"
#include "quern/ops/registry/recurrent_binding.h"
#include "quern/ops/registry/recurrent_ops.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;
using Tensors = absl::Span<const AnyTensorView>;

constexpr char kDeltaRule[] = "chunk_gated_delta_rule";
constexpr char kDeltaUpdate[] = "gated_delta_rule_update";

// q, k, v, g, beta, state, indices, and of kDeltaRule starts and initial, out.
constexpr Binding<DeltaRuleArgs> kDeltaRuleBinding = {
    kDeltaRule, 10,
    [](const char* op, Tensors t) {
      return CheckBatch(op, "state_indices", t[6], t[7], t[8]);
    },
    [](Tensors t) {
      return DeltaRuleArgs{
          t[0], t[1], t[2], t[3], t[4], t[5], BatchOf(t[6], t[7], t[8]), t[9]};
    }};
constexpr Binding<DeltaRuleArgs> kDeltaUpdateBinding = {
    kDeltaUpdate, 8,
    [](const char* op, Tensors t) {
      return CheckBatch(op, "state_indices", t[6], {}, {});
    },
    [](Tensors t) {
      return DeltaRuleArgs{
          t[0], t[1], t[2], t[3], t[4], t[5], BatchOf(t[6], {}, {}), t[7]};
    }};

NamedArgs DeltaExample(DType dtype) {
  return {{"q", TensorMeta{dtype, {4, 1, 4}}},
          {"k", TensorMeta{dtype, {4, 1, 4}}},
          {"v", TensorMeta{dtype, {4, 2, 8}}},
          {"g", TensorMeta{DType::kF32, {4, 2}}},
          {"beta", TensorMeta{DType::kF32, {4, 2}}},
          {"state", TensorMeta{dtype, {128, 2, 4, 8}}},
          {"state_indices", TensorMeta{DType::kI32, {4}}},
          {"use_qk_l2norm", true}};
}

absl::StatusOr<DeltaRuleSpec> DeltaSpec(const char* op, const TensorMeta& q,
                                        const TensorMeta& v,
                                        const TensorMeta& g,
                                        const TensorMeta& beta,
                                        const TensorMeta& state, bool l2,
                                        double scale, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(CheckRank(op, "q", q, 3));
  QUERN_RETURN_IF_ERROR(CheckRank(op, "v", v, 3));
  QUERN_RETURN_IF_ERROR(CheckRank(op, "state", state, 4));
  if (g.extents.size() != 3) QUERN_RETURN_IF_ERROR(CheckRank(op, "g", g, 2));
  DeltaRuleSpec spec;
  spec.key_heads = q.extents[1];
  spec.dk = q.extents[2];
  spec.value_heads = v.extents[1];
  spec.dv = v.extents[2];
  spec.dtype = q.dtype;
  spec.state_dtype = state.dtype;
  spec.beta_dtype = beta.dtype;
  spec.decay =
      g.extents.size() == 3 ? DeltaDecay::kPerChannel : DeltaDecay::kPerHead;
  spec.norm = l2 ? DeltaNorm::kL2 : DeltaNorm::kNone;
  spec.scale = static_cast<float>(scale);
  spec.null_slot = null_slot;
  return spec;
}

Metas DeltaShapes(const TensorMeta& q, const TensorMeta&, const TensorMeta& v,
                  const TensorMeta& g, const TensorMeta& beta,
                  const MutatedMeta& state, const TensorMeta& indices,
                  const MaybeMeta& starts, const MaybeMeta&, bool l2,
                  double scale, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      CheckIndexMetas(kDeltaRule, "state_indices", indices, starts));
  QUERN_RETURN_IF_ERROR(
      DeltaSpec(kDeltaRule, q, v, g, beta, state, l2, scale, null_slot)
          .status());
  return std::vector<TensorMeta>{v};
}
template <bool kNative>
Bound Delta(const TensorMeta& q, const TensorMeta& k, const TensorMeta& v,
            const TensorMeta& g, const TensorMeta& beta,
            const MutatedMeta& state, const TensorMeta& indices,
            const MaybeMeta& starts, const MaybeMeta& initial, bool l2,
            double scale, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(DeltaShapes(q, k, v, g, beta, state, indices, starts,
                                    initial, l2, scale, null_slot)
                            .status());
  QUERN_ASSIGN_OR_RETURN(
      const DeltaRuleSpec spec,
      DeltaSpec(kDeltaRule, q, v, g, beta, state, l2, scale, null_slot));
  QUERN_ASSIGN_OR_RETURN(const DeltaRulePlan plan, DeltaRulePlan::Create(spec));
  return BindSequences(plan, kDeltaRuleBinding,
                       kNative ? &NativeDeltaRule : nullptr);
}

Metas DeltaUpdateShapes(const TensorMeta& q, const TensorMeta&,
                        const TensorMeta& v, const TensorMeta& g,
                        const TensorMeta& beta, const MutatedMeta& state,
                        const TensorMeta& indices, bool l2, double scale,
                        int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      CheckIndexMetas(kDeltaUpdate, "state_indices", indices, {}));
  QUERN_RETURN_IF_ERROR(
      DeltaSpec(kDeltaUpdate, q, v, g, beta, state, l2, scale, null_slot)
          .status());
  return std::vector<TensorMeta>{v};
}
template <bool kNative>
Bound DeltaUpdate(const TensorMeta& q, const TensorMeta& k, const TensorMeta& v,
                  const TensorMeta& g, const TensorMeta& beta,
                  const MutatedMeta& state, const TensorMeta& indices, bool l2,
                  double scale, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      DeltaUpdateShapes(q, k, v, g, beta, state, indices, l2, scale, null_slot)
          .status());
  QUERN_ASSIGN_OR_RETURN(
      DeltaRuleSpec spec,
      DeltaSpec(kDeltaUpdate, q, v, g, beta, state, l2, scale, null_slot));
  spec.chunk = 1;  // every token is a sequence
  QUERN_ASSIGN_OR_RETURN(const DeltaRulePlan plan, DeltaRulePlan::Create(spec));
  return BindSequences(plan, kDeltaUpdateBinding,
                       kNative ? &NativeDeltaRule : nullptr);
}

}  // namespace

absl::Status RegisterDeltaRuleOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&DeltaShapes>(
      "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor(a5!) state, Tensor state_indices, "
      "Tensor? query_start_loc, Tensor? has_initial_state, "
      "bool use_qk_l2norm=False, float scale=0.0, int null_slot=-1) -> Tensor",
      &DeltaExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kDeltaRule, {{{"v", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Delta<false>>(kDeltaRule, "simd"));
  QUERN_RETURN_IF_ERROR(
      r.Add<&Delta<true>>(kDeltaRule, OpRegistry::kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&DeltaUpdateShapes>(
      "gated_delta_rule_update(Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor(a5!) state, Tensor state_indices, "
      "bool use_qk_l2norm=False, float scale=0.0, int null_slot=-1) -> Tensor",
      &DeltaExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kDeltaUpdate, {{{"v", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&DeltaUpdate<false>>(kDeltaUpdate, "simd"));
  return r.Add<&DeltaUpdate<true>>(kDeltaUpdate, OpRegistry::kReference);
}

}  // namespace quern
