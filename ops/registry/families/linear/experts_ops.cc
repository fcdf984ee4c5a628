#include "quern/ops/registry/families/linear/experts_ops.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "quern/core/communicator.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/families/linear/example_weights.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/experts.h"
#include "quern/ops/registry/reference/router.h"

namespace quern {
namespace {

// A mixture has a router. Other operators leave the RouterSpec with no experts.
struct Spec : ExpertsSpec, RouterSpec {
  int64_t hidden = 0;
  bool Routes() const { return experts > 0; }
};

// A mixture has logits and a bias in place of weights and ids.
struct Args {
  AnyTensorView x, logits, bias, weights, ids, map, shared, out;
};

constexpr char kWhat[] = "experts";

const ExpertWeights& WeightsOf(const OpCall& call) {
  return *call.Object<const ExpertWeights>("experts");
}

// The experts, ours or the reference's, the router in front of them, and the
// sum over ranks.
class Experts {
 public:
  template <bool kNative>
  static absl::StatusOr<Experts> Create(const Spec& spec, const OpCall& call) {
    std::optional<RouterPlan> router;
    if (spec.Routes()) {
      QUERN_ASSIGN_OR_RETURN(router, RouterPlan::Create(spec));
    }
    // The reference accepts exactly what our kernels accept.
    QUERN_ASSIGN_OR_RETURN(ExpertsPlan plan,
                           ExpertsPlan::Create(spec, WeightsOf(call)));
    Experts experts(spec, router, std::move(plan),
                    call.Object<Communicator>("ranks"));
    if (kNative) {
      QUERN_ASSIGN_OR_RETURN(experts.native_,
                             NativeExperts::Create(spec, WeightsOf(call)));
    }
    return experts;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t rows) const {
    return native_.has_value() ? target() : plan_.Explain(rows);
  }

  absl::Status CheckArgs(const Args& a) const {
    if (a.map.rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kWhat, "expert_map", a.map, DType::kI32,
                     {router_.has_value() ? spec_.experts : kAnyExtent}));
    }
    if (router_.has_value()) {
      QUERN_RETURN_IF_ERROR(CheckRouterArgs(a));
      // Routes are not looked at, for there are none yet; the router's are in
      // range.
      return plan_.CheckRows(Unrouted(a));
    }
    constexpr int64_t kAnyMatrix[] = {kAnyExtent, kAnyExtent};
    QUERN_RETURN_IF_ERROR(
        CheckInput(kWhat, "topk_weights", a.weights, DType::kF32, kAnyMatrix));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kWhat, "topk_ids", a.ids, DType::kI32, kAnyMatrix));
    return plan_.CheckArgs(RoutedArgs(a));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    absl::StatusOr<int64_t> bytes =
        native_.has_value() ? native_->WorkspaceBytes()
                            : plan_.WorkspaceBytes(max_rows, max_workers);
    if (!bytes.ok() || !router_.has_value()) return bytes;
    int64_t routes = 0;
    WorkspaceLayout layout;
    if (CheckedMul(max_rows, router_->spec().top_k, &routes)) {
      LayOut(layout, max_rows);
      layout.Allocate<uint8_t>("experts", *bytes);
      if (!layout.overflow()) return layout.bytes();
    }
    return absl::ResourceExhaustedError(
        absl::StrCat(kWhat, ": max_rows=", max_rows,
                     "; their routes have 2^63 bytes or more"));
  }

  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const ExpertsArgs args =
        router_.has_value() ? Route(a, workspace, executor) : RoutedArgs(a);
    if (native_.has_value()) {
      native_->Run(args, workspace);
    } else {
      plan_.Execute(args, workspace, executor);
    }
    if (ranks_ != nullptr) ranks_->AllReduceSum(args.out);
  }

 private:
  struct Routes {
    float* weights;
    int32_t* ids;
  };

  Experts(const Spec& spec, const std::optional<RouterPlan>& router,
          ExpertsPlan plan, Communicator* ranks)
      : spec_(spec), router_(router), plan_(std::move(plan)), ranks_(ranks) {}

  // What there is without routes.
  static ExpertsArgs Unrouted(const Args& a) {
    ExpertsArgs args = {a.x, {}, {}, {}, a.out, a.shared};
    if (a.map.rank() != 0) args.map = a.map.As<const int32_t, 1>();
    return args;
  }
  static ExpertsArgs RoutedArgs(const Args& a) {
    ExpertsArgs args = Unrouted(a);
    args.ids = a.ids.As<const int32_t, 2>();
    args.weights = a.weights.As<const float, 2>();
    return args;
  }

  absl::Status CheckRouterArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kWhat, "router_logits", a.logits,
                                     spec_.logits_dtype,
                                     {a.x.extent(0), spec_.experts}));
    if ((a.bias.rank() != 0) != spec_.biased) {
      return InvalidArgument(kWhat, "e_score_correction_bias is ",
                             spec_.biased ? "missing" : "given",
                             "; need it as the operator was made");
    }
    if (a.map.rank() == 0 && spec_.experts != plan_.experts()) {
      return InvalidArgument(kWhat, "expert_map is missing; need one from ",
                             spec_.experts, " experts to ", plan_.experts());
    }
    if (!spec_.biased) return absl::OkStatus();
    return CheckInput(kWhat, "e_score_correction_bias", a.bias,
                      spec_.bias_dtype, {spec_.experts});
  }

  // Writes the routes to the beginning of the workspace.
  ExpertsArgs Route(const Args& a, Workspace& workspace,
                    Executor& executor) const {
    const int64_t tokens = a.x.extent(0), top_k = router_->spec().top_k;
    const Routes routes = LayOut(workspace, tokens);
    const auto weights = DenseMatrix(routes.weights, tokens, top_k);
    const auto ids = DenseMatrix(routes.ids, tokens, top_k);
    if (native_.has_value()) {
      NativeRouter(spec_, a.logits, a.bias, weights, ids);
    } else {
      router_->Execute(a.logits, a.bias, weights, ids, executor);
    }
    ExpertsArgs args = Unrouted(a);
    args.ids = DenseMatrix<const int32_t>(routes.ids, tokens, top_k);
    args.weights = DenseMatrix<const float>(routes.weights, tokens, top_k);
    return args;
  }
  template <typename Allocator>
  Routes LayOut(Allocator& allocator, int64_t tokens) const {
    const int64_t routes = tokens * router_->spec().top_k;
    return {allocator.template Allocate<float>("weights", routes),
            allocator.template Allocate<int32_t>("ids", routes)};
  }

  Spec spec_;
  std::optional<RouterPlan> router_;
  ExpertsPlan plan_;
  Communicator* ranks_;
  std::optional<NativeExperts> native_;
};

using Op = OpDeclaration<Experts, Spec, Args>;

absl::Status FillHidden(Spec& spec, const OpCall& call) {
  if (WeightsOf(call).gate_up.empty()) {
    return InvalidArgument(call.op(), "experts has none; need one or more");
  }
  spec.hidden = WeightsOf(call).gate_up[0].spec().k;
  return absl::OkStatus();
}

absl::Status CheckMixture(Spec& spec, const OpCall& call) {
  RouterSpec& route = spec;
  route.top_k = spec.ExpertsSpec::top_k;
  QUERN_RETURN_IF_ERROR(
      CheckRange(call.op(), "top_k", route.top_k, 1, route.experts));
  if (call.has("expert_map")) return absl::OkStatus();
  return CheckEqual(call.op(), "columns of router_logits", route.experts,
                    static_cast<int64_t>(WeightsOf(call).gate_up.size()),
                    "experts has, and there is no expert_map;");
}

absl::Status CheckUnquantized(Spec&, const OpCall& call) {
  const WeightFormat format = WeightsOf(call).gate_up[0].spec().format;
  if (format <= WeightFormat::kF16) return absl::OkStatus();
  return InvalidArgument(call.op(), "experts are ", WeightFormatName(format),
                         "; need f32, bf16 or f16");
}

absl::Status CheckShared(Spec& spec, const OpCall& call) {
  const TensorMeta* const shared = call.Tensor("shared_output");
  if (shared == nullptr) return absl::OkStatus();
  return CheckMeta(call.op(), "shared_output", *shared,
                   {spec.out, call.Tensor("hidden_states")->extents},
                   ", as the result is");
}

int64_t HiddenOf(const Spec& spec) { return spec.hidden; }
Op& Hidden(Op& op) {
  return op.Then(&FillHidden)
      .In("hidden_states", &Args::x, {kRows, &HiddenOf}, &Spec::x)
      .Word("x", "hidden_states");
}

// `experts`: how many of them expert_map maps.
Op& MapAndShared(Op& op, OpDim<Spec> experts) {
  return op.Maybe("expert_map", &Args::map, {experts}, DType::kI32)
      .Word("map", "expert_map")
      .Maybe("shared_output", &Args::shared)
      .Word("add", "shared_output")
      .Object<Communicator>("ranks", /*optional=*/true);
}

absl::Status AddExperts(Op& op, OpExample example, OpRegistry& registry) {
  return op
      .Choice<LinearActivation>(
          "activation", "silu",
          {{"silu", LinearActivation::kSiluAndMul},
           {"gelu", LinearActivation::kGeluAndMul},
           {"gelu_tanh", LinearActivation::kGeluTanhAndMul},
           {"swigluoai", LinearActivation::kSwigluOaiAndMul},
           {"silu_no_mul", LinearActivation::kSilu},
           {"gelu_no_mul", LinearActivation::kGelu},
           {"gelu_tanh_no_mul", LinearActivation::kGeluTanh}},
          &Spec::activation)
      .Attr("apply_router_weight_on_input", false, &Spec::weight_on_input)
      .DTypeAttr("out_dtype", Like("hidden_states"), &Spec::out)
      .Then(&CheckShared)
      .Choice<LinearActivations>("activations", "exact",
                                 LinearActivationsByName(), &Spec::activations)
      .Out("out", &Args::out, Like("hidden_states"), &Spec::out)
      .InPlace("shared_output", "out")
      .Provider("simd", &Experts::Create<false>)
      .Provider(OpRegistry::kReference, &Experts::Create<true>)
      .ExampleOf(std::move(example))
      .Layer()
      .AddTo(registry);
}

// 128 experts of 32 and 16, for listings and tests.
const ExpertWeights* ExampleExperts() {
  static const ExpertWeights* const experts = [] {
    constexpr int64_t kHidden = 32, kInter = 16;
    auto* made = new ExpertWeights;
    for (int64_t e = 0; e < 128; ++e) {
      const float unit = 1.0f / 128;
      made->gate_up.push_back(
          ExampleWeights(2 * kInter, kHidden, unit, 7 + 2 * e, true));
      made->down.push_back(ExampleWeights(kHidden, kInter, unit, 7 + 2 * e));
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

absl::Status AddRouted(OpRegistry& registry, const char* name) {
  Op op(name);
  Hidden(op)
      .Object<const ExpertWeights>("experts")
      .In("topk_weights", &Args::weights, {kRows, &ExpertsSpec::top_k},
          DType::kF32)
      .Word("weights", "topk_weights")
      .In("topk_ids", &Args::ids, {kRows, &ExpertsSpec::top_k}, DType::kI32)
      .Word("ids", "topk_ids");
  return AddExperts(MapAndShared(op, kAny), &RoutedExample, registry);
}

absl::Status AddMixture(OpRegistry& registry, const char* name,
                        bool quantized) {
  Op op(name);
  Hidden(op)
      .In("router_logits", &Args::logits, {kRows, &Spec::experts},
          &Spec::logits_dtype)
      .Word("logits_dtype", "router_logits")
      .Object<const ExpertWeights>("experts");
  MapAndShared(RouterBias(op, "e_score_correction_bias"), &Spec::experts)
      .Need("top_k", &ExpertsSpec::top_k)
      .Then(&CheckMixture)
      .Attr("renormalize", true, &Spec::renormalize)
      .Attr("num_expert_group", int64_t{1}, &Spec::groups)
      .Attr("topk_group", int64_t{1}, &Spec::top_groups);
  if (!quantized) op.Then(&CheckUnquantized);
  return AddExperts(RouterScoreAndScale(op), &MixtureExample, registry);
}

}  // namespace

absl::Status RegisterExpertsOps(OpRegistry& registry) {
  for (const char* name :
       {"modular_fused_moe", "transformers_fused_moe", "fused_experts_cpu"}) {
    QUERN_RETURN_IF_ERROR(AddRouted(registry, name));
  }
  QUERN_RETURN_IF_ERROR(AddMixture(registry, "fused_moe", true));
  return AddMixture(registry, "unquantized_fused_moe", false);
}

}  // namespace quern
