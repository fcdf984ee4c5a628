#include "quern/ops/registry/families/rows/sampling_ops.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

struct Spec : SamplerSpec {
  const SamplingStep* step = nullptr;
};

struct Args {
  AnyTensorView logits, tokens;
  absl::Span<int32_t> chosen() const {
    return {static_cast<int32_t*>(tokens.mutable_data()),
            static_cast<size_t>(tokens.extent(0))};
  }
};

// A plan, and what it was made from.
struct Sampler : SamplerPlan {
  static absl::StatusOr<Sampler> Create(const Spec& spec) {
    QUERN_ASSIGN_OR_RETURN(const SamplerPlan plan, SamplerPlan::Create(spec));
    return Sampler{plan, spec};
  }
  Spec made_of;
};

absl::Status Check(const Sampler& plan, const Args& a) {
  const Spec& spec = plan.made_of;
  QUERN_RETURN_IF_ERROR(CheckInput("sampler", "logits", a.logits, DType::kF32,
                                   {kAnyExtent, spec.vocab}));
  QUERN_RETURN_IF_ERROR(CheckOutput("sampler", "tokens", a.tokens, DType::kI32,
                                    {a.logits.extent(0)}));
  return plan.CheckArgs(a.logits.As<const float, 2>(), spec.step->params,
                        a.chosen());
}
void Execute(const Sampler& plan, const Args& a, Workspace workspace,
             Executor& executor) {
  plan.Execute(a.logits.As<const float, 2>(), plan.made_of.step->params,
               a.chosen(), workspace, executor);
}

const SamplingStep* ExampleStep() {
  static const std::vector<SamplingParams> greedy(4);
  static const SamplingStep step = {greedy};
  return &step;
}

}  // namespace

absl::Status RegisterSamplingOps(OpRegistry& registry) {
  return OpDeclaration<Sampler, Spec, Args>("sample")
      .In("logits", &Args::logits, {kRows, &Spec::vocab},
          OpDType<Spec>::OneOf({DType::kF32}))
      .Object<const SamplingStep>("step")
      .Then([](Spec& spec, const OpCall& call) {
        spec.step = call.Object<const SamplingStep>("step");
        return absl::OkStatus();
      })
      .Out("out", &Args::tokens, {kRows}, DType::kI32)
      .Layer()
      .Providers({"simd", "reference"})
      .Calls(&Check, &Execute)
      .Example({{"logits", {4, 64}}, {"step", &ExampleStep}})
      .AddTo(registry);
}

}  // namespace quern
