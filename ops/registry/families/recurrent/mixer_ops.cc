#include "quern/ops/registry/families/recurrent/mixer_ops.h"

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/gated_delta_net.h"
#include "quern/ops/mixer/mamba_mixer.h"
#include "quern/ops/mixer/mamba_mixer2.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/short_conv.h"
#include "quern/ops/registry/families/linear/example_weights.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

using Weights = const LinearWeights;
using Example = std::vector<OpExampleArg>;

// The tensors of all layers: what each has, and what some have besides.
struct Args : SequenceArgs<MixerArgs> {
  AnyTensorView state, a, d, dt_bias, dt_norm, b_norm, c_norm, norm;
};
template <class Plan, class Spec>
using Op = OpDeclaration<Plan, Spec, Args>;

// The arguments as each plan takes them.
const MixerArgs& ArgsOf(const ShortConvPlan&, const Args& t) { return t; }
MambaMixerArgs ArgsOf(const MambaMixerPlan&, const Args& t) {
  return {t, t.state, t.a, t.d, t.dt_bias, t.dt_norm, t.b_norm, t.c_norm};
}
MambaMixer2Args ArgsOf(const MambaMixer2Plan&, const Args& t) {
  return {t, t.state, t.a, t.d, t.dt_bias, t.norm};
}
GatedDeltaNetArgs ArgsOf(const GatedDeltaNetPlan&, const Args& t) {
  return {t, t.state, t.a, t.dt_bias, t.norm};
}

// A layer with what comes first in every schema.
template <class Plan, class Spec>
Op<Plan, Spec> LayerOp(const char* name,
                       std::initializer_list<const char*> products,
                       OpDim<Spec> channels = kAny) {
  Op<Plan, Spec> op(name);
  op.In("x", &Args::x, {kRows, &Spec::hidden}, &Spec::dtype);
  for (const char* product : products) op.template Object<Weights>(product);
  op.In("conv_weight", &Args::conv_weight, {channels, &Spec::width},
        &Spec::weight_dtype)
      .Maybe("conv_bias", &Args::conv_bias)
      .InOut("conv_state", &Args::conv_state, nullptr, {kAny, kAny, kAny});
  return op;
}

// Adds a layer with what comes last in every schema.
template <class Plan, class Spec>
absl::Status AddLayer(Op<Plan, Spec>& op, Example example,
                      OpRegistry& registry) {
  return op.Attr("null_slot", int64_t{-1}, &Spec::null_slot)
      .Choice("activations", "exact", LinearActivationsByName(),
              &Spec::activations)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .Layer()
      .Calls([](const Plan& plan,
                const Args& t) { return plan.CheckArgs(ArgsOf(plan, t)); },
             [](const Plan& plan, const Args& t, Workspace workspace,
                Executor& executor) {
               plan.Execute(ArgsOf(plan, t), workspace, executor);
             })
      .Example(std::move(example))
      .AddTo(registry);
}

// Makes the plan of a layer with two products.
template <class Plan, class Spec>
absl::StatusOr<Plan> Create(const Spec& spec, const OpCall& call) {
  InlineExecutor executor;
  return Plan::Create(spec, *call.Object<Weights>("in_proj"),
                      *call.Object<Weights>("out_proj"), executor);
}

absl::Status CheckDivisor(const OpCall& call, const char* field, int64_t value,
                          const char* state, int64_t heads) {
  if (value >= 1 && heads % value == 0) return absl::OkStatus();
  return InvalidArgument(call.op(), field, "=", value, "; need a divisor of ",
                         heads, ", the heads of ", state);
}

// Weights for listings and tests, which live as long as the program.
template <int64_t kN, int64_t kK>
Weights* Some() {
  static Weights* const weights =
      new LinearWeights(ExampleWeights(kN, kK, 1.0f / 16));
  return weights;
}

// The example of a layer on 16 columns, which convolves `channels`.
Example ExampleOf(Weights* (*in_proj)(), Weights* (*out_proj)(),
                  int64_t channels, int64_t width, const Example& own) {
  Example args = {{"x", {4, 16}},
                  {"in_proj", in_proj},
                  {"out_proj", out_proj},
                  {"conv_weight", {channels, width}},
                  {"conv_state", {128, width - 1, channels}},
                  {"state_indices", {4}, DType::kI32}};
  args.insert(args.end(), own.begin(), own.end());
  return args;
}

absl::Status AddShortConv(OpRegistry& registry) {
  using Plan = ShortConvPlan;
  using Spec = ShortConvSpec;
  auto op = LayerOp<Plan, Spec>("short_conv", {"in_proj", "out_proj"},
                                &Spec::channels);
  InBatch(op, "state_indices").Creates(&Create<Plan, Spec>);
  return AddLayer(op, ExampleOf(&Some<36, 16>, &Some<16, 12>, 12, 3, {}),
                  registry);
}

absl::StatusOr<MambaMixerPlan> CreateMamba(const MambaMixerSpec& spec,
                                           const OpCall& call) {
  const auto of = [&](const char* name) { return *call.Object<Weights>(name); };
  InlineExecutor executor;
  return MambaMixerPlan::Create(
      spec, {of("in_proj"), of("x_proj"), of("dt_proj"), of("out_proj")},
      executor);
}

absl::Status AddMamba(const char* name, MambaForm form, const Example& example,
                      OpRegistry& registry) {
  using Spec = MambaMixerSpec;
  auto op = LayerOp<MambaMixerPlan, Spec>(
      name, {"in_proj", "x_proj", "dt_proj", "out_proj"});
  op.InOut("ssm_state", &Args::state, nullptr,
           {kAny, &Spec::heads, &Spec::head_dim, &Spec::d_state},
           &Spec::state_dtype)
      .In("a", &Args::a)
      .Maybe("d", &Args::d)
      .Maybe("dt_bias", &Args::dt_bias)
      .Maybe("dt_norm", &Args::dt_norm)
      .Maybe("b_norm", &Args::b_norm)
      .Maybe("c_norm", &Args::c_norm)
      .Given(&Spec::form, form)
      .Then([](Spec& spec, const OpCall& call) {
        const bool norm = call.has("dt_norm");
        if (norm != call.has("b_norm") || norm != call.has("c_norm")) {
          return InvalidArgument(call.op(),
                                 "dt_norm, b_norm and c_norm are not given "
                                 "together; need all or none");
        }
        spec.norm = norm ? MambaNorm::kRms : MambaNorm::kNone;
        spec.dt_rank = call.Object<Weights>("dt_proj")->spec().k;
        return absl::OkStatus();
      });
  InBatch(op, "state_indices")
      .Attr("eps", 1e-5, &Spec::eps)
      .Creates(&CreateMamba);
  return AddLayer(op, example, registry);
}

absl::Status AddMamba2(OpRegistry& registry) {
  using Plan = MambaMixer2Plan;
  using Spec = MambaMixer2Spec;
  auto op = LayerOp<Plan, Spec>("mamba_mixer2", {"in_proj", "out_proj"});
  op.InOut("ssm_state", &Args::state, nullptr,
           {kAny, &Spec::heads, &Spec::head_dim, &Spec::d_state},
           &Spec::state_dtype)
      .In("a", &Args::a)
      .Maybe("d", &Args::d)
      .Maybe("dt_bias", &Args::dt_bias)
      .Maybe("norm", &Args::norm);
  InBatch(op, "state_indices")
      .Attr("n_groups", int64_t{1}, &Spec::groups)
      .Then([](Spec& spec, const OpCall& call) {
        spec.norm = call.has("norm") ? Mamba2Norm::kGroups : Mamba2Norm::kNone;
        return CheckDivisor(call, "n_groups", spec.groups, "ssm_state",
                            spec.heads);
      })
      .Attr("eps", 1e-5, &Spec::eps)
      .Creates(&Create<Plan, Spec>);
  return AddLayer(op,
                  ExampleOf(&Some<31, 16>, &Some<16, 12>, 16, 4,
                            {{"conv_bias", {16}},
                             {"ssm_state", {128, 3, 4, 2}},
                             {"a", {3}, DType::kF32},
                             {"d", {3}, DType::kF32},
                             {"dt_bias", {3}, DType::kF32},
                             {"norm", {12}}}),
                  registry);
}

absl::Status AddDeltaNet(OpRegistry& registry) {
  using Plan = GatedDeltaNetPlan;
  using Spec = GatedDeltaNetSpec;
  auto op = LayerOp<Plan, Spec>("gated_delta_net", {"in_proj", "out_proj"});
  op.InOut("state", &Args::state, nullptr,
           {kAny, &Spec::value_heads, &Spec::dk, &Spec::dv}, &Spec::state_dtype)
      .In("a_log", &Args::a)
      .In("dt_bias", &Args::dt_bias)
      .In("norm", &Args::norm);
  InBatch(op, "state_indices")
      .Need("num_k_heads", &Spec::key_heads)
      .Then([](Spec& spec, const OpCall& call) {
        return CheckDivisor(call, "num_k_heads", spec.key_heads, "state",
                            spec.value_heads);
      })
      .Attr("eps", 1e-6, &Spec::eps)
      .Creates(&Create<Plan, Spec>);
  return AddLayer(op,
                  ExampleOf(&Some<28, 16>, &Some<16, 8>, 16, 4,
                            {{"state", {128, 2, 4, 4}},
                             {"a_log", {2}, DType::kF32},
                             {"dt_bias", {2}, DType::kF32},
                             {"norm", {4}},
                             {"num_k_heads", int64_t{1}}}),
                  registry);
}

}  // namespace

absl::Status RegisterMixerOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddShortConv(registry));
  QUERN_RETURN_IF_ERROR(AddMamba("mamba_mixer", MambaForm::kMamba,
                                 ExampleOf(&Some<24, 16>, &Some<16, 12>, 12, 4,
                                           {{"x_proj", &Some<7, 12>},
                                            {"dt_proj", &Some<12, 3>},
                                            {"conv_bias", {12}},
                                            {"ssm_state", {128, 1, 12, 2}},
                                            {"a", {1, 12, 2}, DType::kF32},
                                            {"d", {1, 12}, DType::kF32},
                                            {"dt_bias", {1, 12}, DType::kF32}}),
                                 registry));
  QUERN_RETURN_IF_ERROR(AddMamba("plamo2_mamba_mixer", MambaForm::kPlamo2,
                                 ExampleOf(&Some<24, 16>, &Some<16, 12>, 12, 4,
                                           {{"x_proj", &Some<7, 12>},
                                            {"dt_proj", &Some<3, 3>},
                                            {"ssm_state", {128, 3, 4, 2}},
                                            {"a", {3}, DType::kF32},
                                            {"d", {3}, DType::kF32},
                                            {"dt_bias", {3}, DType::kF32},
                                            {"dt_norm", {3}},
                                            {"b_norm", {2}},
                                            {"c_norm", {2}}}),
                                 registry));
  QUERN_RETURN_IF_ERROR(AddMamba2(registry));
  return AddDeltaNet(registry);
}

}  // namespace quern
