#include "quern/ops/registry/families/attention/mla_ops.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/communicator.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/families/attention/step_workspace.h"
#include "quern/ops/registry/families/linear/example_weights.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/mla.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";

struct Spec : MlaSpec {
  DType result = DType::kF32;
};

struct Args : MlaArgs {
  AnyTensorView ids, pages;  // positions and cache
};

const MlaWeights& WeightsOf(const OpCall& call) {
  return *call.Object<const MlaWeights>("weights");
}

// The layer, ours or the reference's, on what its step knows, and the sum over
// ranks.
class Mla {
 public:
  template <bool kNative>
  static absl::StatusOr<Mla> Create(const Spec& spec, const OpCall& call) {
    InlineExecutor executor;
    QUERN_ASSIGN_OR_RETURN(MlaPlan plan,
                           MlaPlan::Create(spec, WeightsOf(call), executor));
    Mla mla(spec, std::move(plan), call);
    if (kNative) {
      QUERN_ASSIGN_OR_RETURN(
          mla.native_,
          NativeMla::Create(spec, WeightsOf(call), mla.rope_->spec()));
    }
    return mla;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t) const {
    if (native_.has_value()) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }
  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kOp, "positions", a.ids, {kAnyExtent}));
    const int64_t page_bytes = spec_.cache.page_bytes();
    // An output of u8 rows, which are contiguous as KvCacheView requires.
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "cache", a.pages, DType::kU8,
                                      {kAnyExtent, page_bytes}));
    if (a.pages.extent(0) > 1) {
      QUERN_RETURN_IF_ERROR(CheckEqual(
          kOp, "stride of cache", a.pages.stride(0), page_bytes, "pages have"));
    }
    return plan_.CheckArgs(ArgsOf(a));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (native_.has_value()) return native_->WorkspaceBytes();
    return StepWorkspaceBytes(plan_, step_->schedule, step_->limits, max_rows,
                              max_workers);
  }
  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    if (native_.has_value()) {
      native_->Run(ArgsOf(a), workspace);
    } else {
      plan_.Execute(ArgsOf(a), workspace, executor);
    }
    if (ranks_ != nullptr) ranks_->AllReduceSum(a.out);
  }

 private:
  Mla(const Spec& spec, MlaPlan plan, const OpCall& call)
      : spec_(spec),
        plan_(std::move(plan)),
        rope_(call.Object<const RotaryEmbeddingPlan>("rope")),
        step_(call.Object<const MlaStep>("step")),
        ranks_(call.Object<Communicator>("ranks")) {}

  MlaArgs ArgsOf(const Args& a) const {
    MlaArgs args = a;
    args.positions = IndicesOf(a.ids);
    args.rope = rope_;
    args.cache =
        KvCacheView(spec_.cache, a.pages.extent(0), a.pages.mutable_data());
    args.schedule = step_->schedule;
    return args;
  }

  Spec spec_;
  MlaPlan plan_;
  const RotaryEmbeddingPlan* rope_;
  const MlaStep* step_;
  Communicator* ranks_;
  std::optional<NativeMla> native_;
};

absl::Status FillSizes(Spec& spec, const OpCall& call) {
  static_cast<MlaSpec&>(spec) =
      MlaSpecOf(WeightsOf(call), *call.Object<const KvLayout>("layout"));
  return absl::OkStatus();
}

absl::Status CheckNorms(Spec&, const OpCall& call) {
  const TensorMeta* const q_norm = call.Tensor("q_norm");
  const DType dtype = call.Tensor("kv_norm")->dtype;
  if (q_norm != nullptr && q_norm->dtype != dtype) {
    return InvalidArgument(call.op(), "q_norm is ", DTypeName(q_norm->dtype),
                           "; need ", DTypeName(dtype), ", as kv_norm is");
  }
  if (call.has("q_norm") == WeightsOf(call).q_a.has_value()) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "q_norm is ",
                         call.has("q_norm") ? "given" : "missing",
                         "; need it where the weights have q_a");
}

int64_t Hidden(const Spec& spec) { return spec.hidden; }
int64_t PageBytes(const Spec& spec) { return spec.cache.page_bytes(); }

absl::Status CheckScale(Spec& spec, const OpCall& call) {
  if (call.Float("scale") == 0 || spec.scale != 0) return absl::OkStatus();
  return InvalidArgument(call.op(), "scale=", call.Float("scale"),
                         "; need 0, or a number that f32 can hold");
}

absl::Status FillResult(Spec& spec, const OpCall& call) {
  const TensorMeta* const residual = call.Tensor("residual");
  spec.out_dtype = spec.result;
  spec.residual = residual != nullptr;
  if (residual == nullptr) return absl::OkStatus();
  return CheckMeta(call.op(), "residual", *residual,
                   {spec.result, call.Tensor("hidden_states")->extents},
                   ", as the result is");
}

// What follows lives as long as the program, for listings and tests: a layer of
// two heads on 16 columns.
constexpr int64_t kHidden = 16, kHeads = 2, kLatent = 8, kNope = 4, kRope = 4;
constexpr int64_t kValue = 4;

constexpr float kUnit = 1.0f / 16;

const MlaWeights* ExampleLayer() {
  static const MlaWeights* const weights = [] {
    auto* made = new MlaWeights;
    made->q = ExampleWeights(kHeads * (kNope + kRope), kHidden, kUnit);
    made->kv_a = ExampleWeights(kLatent + kRope, kHidden, kUnit);
    made->out = ExampleWeights(kHidden, kHeads * kValue, kUnit);
    MlaSpec spec;
    spec.heads = kHeads;
    spec.nope = kNope;
    spec.v_head_dim = kValue;
    const std::vector<float> kv_b =
        ExampleValues(kHeads * (kNope + kValue), kLatent, kUnit);
    InlineExecutor executor;
    QUERN_CHECK(PackKvB(spec,
                        DenseMatrix<const float>(
                            kv_b.data(), kHeads * (kNope + kValue), kLatent),
                        executor, *made)
                    .ok());
    return made;
  }();
  return weights;
}
const KvLayout* ExampleLayout() {
  static const KvLayout layout = [] {
    KvLayoutSpec spec;
    spec.dtype = DType::kF32;
    spec.kv_heads = 1;
    spec.head_dim = kLatent + kRope;
    spec.v_head_dim = kLatent;
    spec.page_size = 16;
    spec.form = KvForm::kLatent;
    auto made = KvLayout::Create(spec);
    QUERN_CHECK(made.ok());
    return *made;
  }();
  return &layout;
}
const RotaryEmbeddingPlan* ExampleRope(DType dtype) {
  static const auto& plans = *[] {
    auto* made = new std::map<DType, RotaryEmbeddingPlan>;
    RotaryEmbeddingSpec spec;
    spec.head_dim = spec.rot_dim = kRope;
    spec.max_positions = 64;
    spec.style = RotaryStyle::kPairs;
    for (const DType type : kFloatDTypes) {
      spec.dtype = type;
      made->emplace(type, RotaryEmbeddingPlan::Create(spec).value());
    }
    return made;
  }();
  const auto found = plans.find(dtype);
  return &(found == plans.end() ? plans.begin() : found)->second;
}
NamedArgs Example(DType dtype) {
  static const MlaStep step = {};
  return {{"hidden_states", TensorMeta{dtype, {4, kHidden}}},
          {"positions", TensorMeta{DType::kI64, {4}}},
          {"kv_norm", TensorMeta{dtype, {kLatent}}},
          {"cache", TensorMeta{DType::kU8, {2, ExampleLayout()->page_bytes()}}},
          {"weights", ExampleLayer()},
          {"layout", ExampleLayout()},
          {"rope", ExampleRope(dtype)},
          {"step", &step}};
}

}  // namespace

absl::Status RegisterMlaOps(OpRegistry& registry) {
  return OpDeclaration<Mla, Spec, Args>(kOp)
      .Then(&FillSizes)
      .In("hidden_states", &Args::x, {kRows, &Hidden}, &Spec::dtype)
      .Word("x", "hidden_states")
      .In("positions", &Args::ids, {kRows}, IndexDType<Spec>())
      .Maybe("q_norm", &Args::q_norm)
      .In("kv_norm", &Args::kv_norm, {}, &Spec::norm_dtype)
      .Then(&CheckNorms)
      .InOut("cache", &Args::pages, nullptr, {kAny, &PageBytes}, DType::kU8)
      .Maybe("residual", &Args::residual)
      .Object<const MlaWeights>("weights")
      .Object<const KvLayout>("layout")
      .Object<const RotaryEmbeddingPlan>("rope")
      .Object<const MlaStep>("step")
      .Object<Communicator>("ranks", /*optional=*/true)
      .Attr("scale", 0.0, &Spec::scale)
      .Then(&CheckScale)
      .Attr("eps", 1e-6, &Spec::eps)
      .DTypeAttr("out_dtype", Like("hidden_states"), &Spec::result)
      .Then(&FillResult)
      .Choice<LinearActivations>("activations", "exact",
                                 LinearActivationsByName(), &Spec::activations)
      .Out("out", &Args::out, Like("hidden_states"), &Spec::result)
      .InPlace("residual", "out")
      .Provider("simd", &Mla::Create<false>)
      .Provider(OpRegistry::kReference, &Mla::Create<true>)
      .ExampleOf(&Example)
      .Layer()
      .AddTo(registry);
}

}  // namespace quern
