#include "quern/ops/registry/moe_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_router.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kSoftmax[] = "topk_softmax";
constexpr char kSigmoid[] = "topk_sigmoid";
constexpr char kGrouped[] = "grouped_topk";

// hidden_states for grouped_topk; logits, bias, weights, ids.
class BoundRouter final : public BoundOp {
 public:
  // `op` is a literal.
  BoundRouter(absl::string_view op, const RouterPlan& plan, bool native)
      : op_(op), plan_(plan), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  absl::Status CheckArgs(Tensors t) const override {
    const size_t at = Logits();
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, at + 4));
    if (at == 1 && t[0].rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(op_, "hidden_states", t[0], t[0].dtype(),
                                       {t[1].extent(0), kAnyExtent}));
    }
    constexpr int64_t kAny[] = {kAnyExtent, kAnyExtent};
    QUERN_RETURN_IF_ERROR(
        CheckOutput(op_, "weights", t[at + 2], DType::kF32, kAny));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(op_, "ids", t[at + 3], DType::kI32, kAny));
    return plan_.CheckArgs(t[at], t[at + 1], t[at + 2].As<float, 2>(),
                           t[at + 3].As<int32_t, 2>());
  }
  void Execute(Tensors t, Workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const size_t at = Logits();
    const auto weights = t[at + 2].As<float, 2>();
    const auto ids = t[at + 3].As<int32_t, 2>();
    if (native_) {
      NativeRouter(plan_.spec(), t[at], t[at + 1], weights, ids);
    } else {
      plan_.Execute(t[at], t[at + 1], weights, ids, executor);
    }
  }

 private:
  size_t Logits() const { return op_ == kGrouped ? 1 : 0; }

  absl::string_view op_;
  RouterPlan plan_;
  bool native_;
};

Metas ShapesOf(absl::string_view op, const TensorMeta& logits, int64_t top_k) {
  if (logits.extents.size() != 2) {
    return InvalidArgument(op, "gating_output has rank ", logits.extents.size(),
                           "; need 2");
  }
  QUERN_RETURN_IF_ERROR(CheckRange(op, "topk", top_k, 1, logits.extents[1]));
  const std::vector<int64_t> extents = {logits.extents[0], top_k};
  return std::vector<TensorMeta>{{DType::kF32, extents},
                                 {DType::kI32, extents}};
}

absl::StatusOr<RouterSpec> SpecOf(absl::string_view op, RouterScore score,
                                  const TensorMeta& logits,
                                  const MaybeMeta& bias, int64_t top_k,
                                  bool renormalize, double scale) {
  QUERN_RETURN_IF_ERROR(ShapesOf(op, logits, top_k).status());
  RouterSpec spec;
  spec.experts = logits.extents[1];
  spec.top_k = top_k;
  spec.score = score;
  spec.renormalize = renormalize;
  spec.scale = static_cast<float>(scale);
  spec.logits_dtype = logits.dtype;
  spec.biased = bias.has_value();
  if (bias.has_value()) spec.bias_dtype = bias->dtype;
  return spec;
}

Bound Bind(absl::string_view op, const RouterSpec& spec, bool native) {
  QUERN_ASSIGN_OR_RETURN(const RouterPlan plan, RouterPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundRouter(op, plan, native));
}

template <const char* kOp>
Metas TopKShapes(const TensorMeta& logits, const MaybeMeta&, int64_t top_k,
                 bool, double) {
  return ShapesOf(kOp, logits, top_k);
}
template <const char* kOp, RouterScore kScore, bool kNative>
Bound TopK(const TensorMeta& logits, const MaybeMeta& bias, int64_t top_k,
           bool renormalize, double scale) {
  QUERN_ASSIGN_OR_RETURN(
      const RouterSpec spec,
      SpecOf(kOp, kScore, logits, bias, top_k, renormalize, scale));
  return Bind(kOp, spec, kNative);
}
NamedArgs TopKExample(DType dtype) {
  return {{"gating_output", TensorMeta{dtype, {4, 64}}},
          {"topk", int64_t{6}},
          {"renormalize", true}};
}

Metas GroupedShapes(const MaybeMeta& hidden, const TensorMeta& logits,
                    const MaybeMeta&, int64_t top_k, bool, int64_t, int64_t,
                    const std::string&, double) {
  if (hidden.has_value() && !logits.extents.empty()) {
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kGrouped, "rows of hidden_states",
                   hidden->extents.empty() ? 0 : hidden->extents[0],
                   logits.extents[0], "gating_output has"));
  }
  return ShapesOf(kGrouped, logits, top_k);
}
template <bool kNative>
Bound Grouped(const MaybeMeta& hidden, const TensorMeta& logits,
              const MaybeMeta& bias, int64_t top_k, bool renormalize,
              int64_t groups, int64_t top_groups, const std::string& score,
              double scale) {
  QUERN_RETURN_IF_ERROR(GroupedShapes(hidden, logits, bias, top_k, renormalize,
                                      groups, top_groups, score, scale)
                            .status());
  QUERN_ASSIGN_OR_RETURN(RouterSpec spec,
                         SpecOf(kGrouped, RouterScore::kSoftmax, logits, bias,
                                top_k, renormalize, scale));
  QUERN_ASSIGN_OR_RETURN(spec.score, RouterScoreOf(kGrouped, score));
  spec.groups = groups;
  spec.top_groups = top_groups;
  return Bind(kGrouped, spec, kNative);
}
NamedArgs GroupedExample(DType dtype) {
  return {{"hidden_states", TensorMeta{dtype, {4, 32}}},
          {"gating_output", TensorMeta{dtype, {4, 64}}},
          {"e_score_correction_bias", TensorMeta{DType::kF32, {64}}},
          {"topk", int64_t{6}},
          {"renormalize", true},
          {"num_expert_group", int64_t{8}},
          {"topk_group", int64_t{4}},
          {"scoring_func", "sigmoid"},
          {"routed_scaling_factor", 2.5}};
}

}  // namespace

absl::Status RegisterMoeOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  constexpr char kParams[] =
      "(Tensor gating_output, Tensor? bias, int topk, bool renormalize=False, "
      "float routed_scaling_factor=1.0) -> (Tensor, Tensor)";
  OpRules rules;
  rules.words = {{"logits", "gating_output"},
                 {"logits_dtype", "gating_output"},
                 {"top_k", "topk"},
                 {"scale", "routed_scaling_factor"},
                 {"groups", "num_expert_group"},
                 {"top_groups", "topk_group"}};
  QUERN_RETURN_IF_ERROR(r.Define<&TopKShapes<kSoftmax>>(
      absl::StrCat(kSoftmax, kParams), &TopKExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kSoftmax, rules));
  QUERN_RETURN_IF_ERROR(
      (r.Add<&TopK<kSoftmax, RouterScore::kSoftmax, false>>(kSoftmax, kSimd)));
  QUERN_RETURN_IF_ERROR((r.Add<&TopK<kSoftmax, RouterScore::kSoftmax, true>>(
      kSoftmax, kReference)));
  QUERN_RETURN_IF_ERROR(r.Define<&TopKShapes<kSigmoid>>(
      absl::StrCat(kSigmoid, kParams), &TopKExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kSigmoid, rules));
  QUERN_RETURN_IF_ERROR(
      (r.Add<&TopK<kSigmoid, RouterScore::kSigmoid, false>>(kSigmoid, kSimd)));
  QUERN_RETURN_IF_ERROR((r.Add<&TopK<kSigmoid, RouterScore::kSigmoid, true>>(
      kSigmoid, kReference)));
  QUERN_RETURN_IF_ERROR(r.Define<&GroupedShapes>(
      "grouped_topk(Tensor? hidden_states, Tensor gating_output, "
      "Tensor? e_score_correction_bias, int topk, bool renormalize, "
      "int num_expert_group, int topk_group, str scoring_func=\"softmax\", "
      "float routed_scaling_factor=1.0) -> (Tensor, Tensor)",
      &GroupedExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kGrouped, rules));
  QUERN_RETURN_IF_ERROR(r.Add<&Grouped<false>>(kGrouped, kSimd));
  return r.Add<&Grouped<true>>(kGrouped, kReference);
}

}  // namespace quern
