#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/families/linear/router_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/vllm/rows.h"

namespace quern {
namespace {

absl::Status FillScale(RouterSpec& spec, const OpCall& call) {
  if (!call.Bool("apply_routed_scaling_factor_on_output")) spec.scale = 1;
  const int64_t shared = call.Int("num_fused_shared_experts");
  if (shared == 0) return absl::OkStatus();
  return InvalidArgument(call.op(), "num_fused_shared_experts=", shared,
                         "; need 0: routes to shared experts are not made");
}

absl::Status AddBiasedTopK(OpRegistry& registry) {
  using Spec = RouterSpec;
  using Args = RouterArgs;
  RouterDeclaration op("biased_topk_cpu");
  op.In("hidden_states", &Args::hidden, {kRows, kAny}).Rows("gating_output");
  RouterLogits(op)
      .In("correction_bias", &Args::bias, {&Spec::experts}, &Spec::bias_dtype)
      .Word("bias", "correction_bias")
      .Given(&Spec::biased, true);
  RouterTopK(op)
      .Need("renormalize", &Spec::renormalize)
      .Choice<RouterScore>("scoring_func", "sigmoid",
                           {{"sigmoid", RouterScore::kSigmoid},
                            {"sqrtsoftplus", RouterScore::kSqrtSoftplus}},
                           &Spec::score)
      .Attr("num_fused_shared_experts", int64_t{0})
      .Attr("routed_scaling_factor", 1.0, &Spec::scale)
      .Word("scale", "routed_scaling_factor")
      .Attr("apply_routed_scaling_factor_on_output", false)
      .Then(&FillScale);
  return RouterRoutes(op)
      .Example({{"hidden_states", {4, 32}},
                {"gating_output", {4, 64}},
                {"correction_bias", {64}, DType::kF32},
                {"topk", int64_t{8}},
                {"renormalize", true},
                {"scoring_func", "sqrtsoftplus"},
                {"routed_scaling_factor", 2.5},
                {"apply_routed_scaling_factor_on_output", true}})
      .AddTo(registry);
}

struct ArgmaxSpec {
  int64_t vocab = 0;
};
struct ArgmaxArgs {
  AnyTensorView logits, out;
};

// The first of the largest; NaN counts as less than any number.
int64_t Largest(const float* x, int64_t n) {
  // In steps of 16, without a branch, which compilers make vectors of.
  constexpr int64_t kStep = 16;
  float best = -std::numeric_limits<float>::infinity();
  int64_t at = 0;
  for (int64_t begin = 0; begin < n; begin += kStep) {
    const int64_t count = std::min(kStep, n - begin);
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; ++i) {
      most = x[begin + i] > most ? x[begin + i] : most;
    }
    if (!(most > best)) continue;
    best = most;
    at = begin;
  }
  while (at < n && !(x[at] >= best)) ++at;
  return at < n ? at : 0;
}

class ArgmaxPlan {
 public:
  static absl::StatusOr<ArgmaxPlan> Create(const ArgmaxSpec& spec) {
    ArgmaxPlan plan;
    plan.vocab_ = spec.vocab;
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "columns of logits", spec.vocab, 1, kMaxRowElements));
    return plan;
  }
  const char* target() const { return "scalar"; }
  absl::Status CheckArgs(const ArgmaxArgs& a) const {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "logits", a.logits, DType::kF32, {kAnyExtent, vocab_}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out", a.out, DType::kI64, {a.logits.extent(0)}));
    return CheckApart(kOp, "logits", a.logits, "out", a.out);
  }
  void Execute(const ArgmaxArgs& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const auto* const logits = static_cast<const float*>(a.logits.data());
    auto* const out = static_cast<int64_t*>(a.out.mutable_data());
    ParallelRows(
        executor, a.logits.extent(0), vocab_, [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) {
            out[t] = Largest(logits + t * a.logits.RowStride(), vocab_);
          }
        });
  }

 private:
  static constexpr char kOp[] = "greedy_argmax";
  int64_t vocab_ = 0;
};

absl::Status AddArgmax(OpRegistry& registry) {
  return OpDeclaration<ArgmaxPlan, ArgmaxSpec, ArgmaxArgs>("greedy_argmax")
      .In("logits", &ArgmaxArgs::logits, {kRows, &ArgmaxSpec::vocab},
          OpDType<ArgmaxSpec>::OneOf({DType::kF32}))
      .Out("out", &ArgmaxArgs::out, {kRows}, DType::kI64)
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"logits", {4, 64}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmChoiceOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddBiasedTopK(registry));
  return AddArgmax(registry);
}

}  // namespace quern
