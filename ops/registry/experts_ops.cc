#include "quern/ops/registry/experts_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/bound_experts.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_activations.h"
#include "quern/ops/registry/native_router.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kModular[] = "modular_fused_moe";
constexpr char kTransformers[] = "transformers_fused_moe";
constexpr char kSglang[] = "fused_experts_cpu";
constexpr char kFused[] = "fused_moe";
constexpr char kUnquantized[] = "unquantized_fused_moe";

struct NamedActivation {
  absl::string_view name;
  LinearActivation activation;
};
constexpr NamedActivation kActivations[] = {
    {"silu", LinearActivation::kSiluAndMul},
    {"gelu", LinearActivation::kGeluAndMul},
    {"gelu_tanh", LinearActivation::kGeluTanhAndMul},
    {"swigluoai", LinearActivation::kSwigluOaiAndMul},
    {"silu_no_mul", LinearActivation::kSilu},
    {"gelu_no_mul", LinearActivation::kGelu},
    {"gelu_tanh_no_mul", LinearActivation::kGeluTanh}};

absl::StatusOr<LinearActivation> ActivationOf(absl::string_view op,
                                              const std::string& name) {
  std::string names;
  for (const NamedActivation& a : kActivations) {
    if (a.name == name) return a.activation;
    absl::StrAppend(&names, names.empty() ? "" : ", ", a.name);
  }
  return InvalidArgument(op, "activation=\"", name, "\"; need one of ", names);
}

// What all have in common: x is [n, hidden] of the weights, and so is the
// result, with what is added to it.
Metas ShapesOf(absl::string_view op, const TensorMeta& x,
               const ExpertWeights* weights, const MaybeMeta& shared,
               const std::string& out_dtype) {
  if (weights->gate_up.empty()) {
    return InvalidArgument(op, "experts has none; need one or more");
  }
  if (x.extents.size() != 2) {
    return InvalidArgument(op, "hidden_states has rank ", x.extents.size(),
                           "; need 2");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "columns of hidden_states", x.extents[1],
                                   weights->gate_up[0].spec().k,
                                   "the experts have"));
  QUERN_ASSIGN_OR_RETURN(const DType out,
                         DTypeOr(op, "out_dtype", out_dtype, x.dtype));
  if (shared.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckMeta(op, "shared_output", *shared,
                                    {out, x.extents}, ", as the result is"));
  }
  return std::vector<TensorMeta>{{out, x.extents}};
}

absl::Status CheckMap(absl::string_view op, const MaybeMeta& map,
                      int64_t experts) {
  if (!map.has_value()) return absl::OkStatus();
  if (map->dtype == DType::kI32 && map->extents.size() == 1 &&
      (experts < 0 || map->extents[0] == experts)) {
    return absl::OkStatus();
  }
  if (experts < 0) {
    return InvalidArgument(op, "expert_map is ", PrintMeta(*map),
                           "; need i32[experts]");
  }
  return CheckMeta(op, "expert_map", *map, {DType::kI32, {experts}},
                   ", as router_logits has columns");
}

absl::StatusOr<ExpertsSpec> SpecOf(absl::string_view op, const TensorMeta& x,
                                   DType out, int64_t top_k,
                                   const std::string& activation,
                                   bool weight_on_input,
                                   const std::string& activations) {
  ExpertsSpec spec;
  spec.top_k = top_k;
  spec.x = x.dtype;
  spec.out = out;
  QUERN_ASSIGN_OR_RETURN(spec.activation, ActivationOf(op, activation));
  spec.weight_on_input = weight_on_input;
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(op, activations));
  return spec;
}

template <const char* kOp>
Metas RoutedShapes(const TensorMeta& x, const ExpertWeights* experts,
                   const TensorMeta& weights, const TensorMeta& ids,
                   const MaybeMeta& map, const MaybeMeta& shared, Communicator*,
                   const std::string&, bool, const std::string& out_dtype,
                   const std::string&) {
  QUERN_RETURN_IF_ERROR(CheckMap(kOp, map, -1));
  if (ids.extents.size() != 2 || ids.dtype != DType::kI32) {
    return InvalidArgument(kOp, "topk_ids is ", PrintMeta(ids),
                           "; need i32[tokens, k]");
  }
  QUERN_RETURN_IF_ERROR(CheckMeta(kOp, "topk_weights", weights,
                                  {DType::kF32, ids.extents},
                                  ", as topk_ids has a row for each token"));
  QUERN_ASSIGN_OR_RETURN(std::vector<TensorMeta> out,
                         ShapesOf(kOp, x, experts, shared, out_dtype));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "rows of topk_ids", ids.extents[0],
                                   x.extents[0], "hidden_states has"));
  return out;
}
template <const char* kOp, bool kNative>
Bound Routed(const TensorMeta& x, const ExpertWeights* experts,
             const TensorMeta& weights, const TensorMeta& ids,
             const MaybeMeta& map, const MaybeMeta& shared, Communicator* ranks,
             const std::string& activation, bool weight_on_input,
             const std::string& out_dtype, const std::string& activations) {
  QUERN_ASSIGN_OR_RETURN(
      const std::vector<TensorMeta> out,
      RoutedShapes<kOp>(x, experts, weights, ids, map, shared, ranks,
                        activation, weight_on_input, out_dtype, activations));
  QUERN_ASSIGN_OR_RETURN(const ExpertsSpec spec,
                         SpecOf(kOp, x, out[0].dtype, ids.extents[1],
                                activation, weight_on_input, activations));
  return BindExperts(kOp, spec, *experts, ranks, kNative);
}

template <const char* kOp>
Metas MixtureShapes(const TensorMeta& x, const TensorMeta& logits,
                    const ExpertWeights* experts, const MaybeMeta&,
                    const MaybeMeta& map, const MaybeMeta& shared,
                    Communicator*, int64_t top_k, bool, int64_t, int64_t,
                    const std::string&, double, const std::string&, bool,
                    const std::string& out_dtype, const std::string&) {
  if (logits.extents.size() != 2) {
    return InvalidArgument(kOp, "router_logits has rank ",
                           logits.extents.size(), "; need 2");
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "top_k", top_k, 1, logits.extents[1]));
  QUERN_RETURN_IF_ERROR(CheckMap(kOp, map, logits.extents[1]));
  QUERN_ASSIGN_OR_RETURN(std::vector<TensorMeta> out,
                         ShapesOf(kOp, x, experts, shared, out_dtype));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "rows of router_logits",
                                   logits.extents[0], x.extents[0],
                                   "hidden_states has"));
  if (!map.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kOp, "columns of router_logits", logits.extents[1],
                   static_cast<int64_t>(experts->gate_up.size()),
                   "experts has, and there is no expert_map;"));
  }
  if (kOp == absl::string_view(kUnquantized)) {
    const WeightFormat format = experts->gate_up[0].spec().format;
    if (format > WeightFormat::kF16) {
      return InvalidArgument(kOp, "experts are ", WeightFormatName(format),
                             "; need f32, bf16 or f16");
    }
  }
  return out;
}
template <const char* kOp, bool kNative>
Bound Mixture(const TensorMeta& x, const TensorMeta& logits,
              const ExpertWeights* experts, const MaybeMeta& bias,
              const MaybeMeta& map, const MaybeMeta& shared,
              Communicator* ranks, int64_t top_k, bool renormalize,
              int64_t groups, int64_t top_groups, const std::string& score,
              double scale, const std::string& activation, bool weight_on_input,
              const std::string& out_dtype, const std::string& activations) {
  QUERN_ASSIGN_OR_RETURN(
      const std::vector<TensorMeta> out,
      MixtureShapes<kOp>(x, logits, experts, bias, map, shared, ranks, top_k,
                         renormalize, groups, top_groups, score, scale,
                         activation, weight_on_input, out_dtype, activations));
  RouterSpec route;
  route.experts = logits.extents[1];
  route.top_k = top_k;
  route.biased = bias.has_value();
  route.renormalize = renormalize;
  route.scale = static_cast<float>(scale);
  route.groups = groups;
  route.top_groups = top_groups;
  route.logits_dtype = logits.dtype;
  if (bias.has_value()) route.bias_dtype = bias->dtype;
  QUERN_ASSIGN_OR_RETURN(route.score, RouterScoreOf(kOp, score));
  QUERN_ASSIGN_OR_RETURN(const ExpertsSpec spec,
                         SpecOf(kOp, x, out[0].dtype, top_k, activation,
                                weight_on_input, activations));
  return BindMixture(kOp, route, spec, *experts, ranks, kNative);
}

// 128 experts of 32 and 16, for listings and tests.
const ExpertWeights* ExampleExperts() {
  static const ExpertWeights* const experts = [] {
    constexpr int64_t kHidden = 32, kInter = 16;
    auto* made = new ExpertWeights;
    InlineExecutor executor;
    const auto pack = [&executor](int64_t n, int64_t k, bool gated, int seed) {
      std::vector<float> codes(static_cast<size_t>(n * k));
      for (size_t i = 0; i < codes.size(); ++i) {
        const int v = static_cast<int>(i) * (7 + 2 * seed) % 17;
        codes[i] = static_cast<float>(v - 8) / 128;
      }
      LinearWeightsSpec spec;
      spec.n = n;
      spec.k = k;
      spec.format = WeightFormat::kF32;
      spec.gated = gated;
      LinearSource source;
      source.codes = DenseMatrix<const float>(codes.data(), n, k);
      auto packed = LinearWeights::Pack(spec, {source}, executor);
      QUERN_CHECK(packed.ok());
      return *packed;
    };
    for (int e = 0; e < 128; ++e) {
      made->gate_up.push_back(pack(2 * kInter, kHidden, true, e));
      made->down.push_back(pack(kHidden, kInter, false, e));
    }
    return made;
  }();
  return experts;
}
NamedArgs RoutedExample(DType dtype) {
  return {{"hidden_states", TensorMeta{dtype, {4, 32}}},
          {"experts", ExampleExperts()},
          {"topk_weights", TensorMeta{DType::kF32, {4, 2}}},
          {"topk_ids", TensorMeta{DType::kI32, {4, 2}}}};
}
NamedArgs MixtureExample(DType dtype) {
  return {{"hidden_states", TensorMeta{dtype, {4, 32}}},
          {"router_logits", TensorMeta{DType::kF32, {4, 128}}},
          {"experts", ExampleExperts()},
          {"top_k", int64_t{2}}};
}

template <const char* kOp>
absl::Status RegisterRouted(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&RoutedShapes<kOp>>(
      absl::StrCat(kOp,
                   "(Tensor hidden_states, ExpertWeights experts, "
                   "Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
                   "Tensor? shared_output, Communicator? ranks, "
                   "str activation=\"silu\", "
                   "bool apply_router_weight_on_input=False, "
                   "str out_dtype=\"\", "
                   "str activations=\"exact\") -> Tensor"),
      &RoutedExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"shared_output", "out"}},
                                        OpRows::kFirst,
                                        "",
                                        {{"x", "hidden_states"},
                                         {"ids", "topk_ids"},
                                         {"weights", "topk_weights"},
                                         {"map", "expert_map"},
                                         {"add", "shared_output"}}}));
  QUERN_RETURN_IF_ERROR((r.Add<&Routed<kOp, false>>(kOp, "simd")));
  return r.Add<&Routed<kOp, true>>(kOp, OpRegistry::kReference);
}
template <const char* kOp>
absl::Status RegisterMixture(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&MixtureShapes<kOp>>(
      absl::StrCat(kOp,
                   "(Tensor hidden_states, Tensor router_logits, "
                   "ExpertWeights experts, Tensor? e_score_correction_bias, "
                   "Tensor? expert_map, Tensor? shared_output, "
                   "Communicator? ranks, int top_k, bool renormalize=True, "
                   "int num_expert_group=1, int topk_group=1, "
                   "str scoring_func=\"softmax\", "
                   "float routed_scaling_factor=1.0, str activation=\"silu\", "
                   "bool apply_router_weight_on_input=False, "
                   "str out_dtype=\"\", "
                   "str activations=\"exact\") -> Tensor"),
      &MixtureExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"shared_output", "out"}},
                                        OpRows::kFirst,
                                        "",
                                        {{"x", "hidden_states"},
                                         {"map", "expert_map"},
                                         {"add", "shared_output"},
                                         {"scale", "routed_scaling_factor"},
                                         {"groups", "num_expert_group"},
                                         {"top_groups", "topk_group"}}}));
  QUERN_RETURN_IF_ERROR((r.Add<&Mixture<kOp, false>>(kOp, "simd")));
  return r.Add<&Mixture<kOp, true>>(kOp, OpRegistry::kReference);
}

}  // namespace

absl::Status RegisterExpertsOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(RegisterRouted<kModular>(r));
  QUERN_RETURN_IF_ERROR(RegisterRouted<kTransformers>(r));
  QUERN_RETURN_IF_ERROR(RegisterRouted<kSglang>(r));
  QUERN_RETURN_IF_ERROR(RegisterMixture<kFused>(r));
  return RegisterMixture<kUnquantized>(r);
}

}  // namespace quern
