#include "quern/ops/registry/families/rows/norm_ops.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/norm/l2_norm.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/activation.h"

namespace quern {
namespace {

using Spec = RmsNormSpec;
using Args = RmsNormArgs;
using Op = OpDeclaration<RmsNormPlan, Spec, Args>;

// The reference. Sum and norm are not rounded; the normalised row is rounded to
// the weight's dtype, and then the product. With 1 + weight, which is f32, and
// with exact sums, the product alone is rounded. h(i) is element i of the
// unrounded row; write(i, normed) is only called after the last call of h.
template <typename H, typename Write>
void NativeRow(const Spec& spec, const AnyTensorView& weights, const H& h,
               const Write& write) {
  double squares = 0;
  for (int64_t i = 0; i < spec.SpanColumns(); ++i) {
    squares += double{h(i)} * double{h(i)};
  }
  const double mean = squares / static_cast<double>(spec.SpanColumns());
  // simd sums again in double where f32 has overflowed.
  const float inverse =
      mean <= double{std::numeric_limits<float>::max()}
          ? 1.0f / std::sqrt(static_cast<float>(mean) + spec.eps)
          : static_cast<float>(1.0 / std::sqrt(mean + double{spec.eps}));
  const ScalarRow weight(
      spec.weight == NormWeight::kNone ? AnyTensorView() : weights, 0);
  const bool one_plus = spec.weight == NormWeight::kOnePlus;
  const NativeRound rd(spec.weight_dtype);
  for (int64_t i = 0; i < spec.hidden; ++i) {
    const float v = h(i) * inverse;
    float normed = v;
    if (!weight.null()) {
      const float w = one_plus ? 1.0f + weight[i] : weight[i];
      normed = one_plus || spec.sum == NormSum::kExact ? v * w : rd(rd(v) * w);
    }
    write(i, normed);
  }
}

void Native(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    NativeRow(
        spec, args.weight, [&](int64_t i) { return x[i]; },
        [&](int64_t i, float normed) { out.Set(i, normed); });
  }
}

void NativeAdd(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), residual(args.residual, t), out(args.out, t);
    NativeRow(
        spec, args.weight, [&](int64_t i) { return x[i] + residual[i]; },
        [&](int64_t i, float normed) {
          residual.Set(i, x[i] + residual[i]);
          out.Set(i, normed);
        });
  }
}

// The product alone is rounded.
void NativeL2(const L2NormSpec& spec, const L2NormArgs& args) {
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    double squares = 0;
    for (int64_t i = 0; i < spec.hidden; ++i) {
      squares += double{x[i]} * double{x[i]};
    }
    const auto inverse =
        static_cast<float>(1.0 / std::sqrt(squares + double{spec.eps}));
    for (int64_t i = 0; i < spec.hidden; ++i) out.Set(i, x[i] * inverse);
  }
}

absl::Status CheckNorm(const RmsNormPlan& plan, const Args& args) {
  return plan.CheckArgs(args.x, args.weight, args.out);
}
void ExecuteNorm(const RmsNormPlan& plan, const Args& args, Workspace,
                 Executor& executor) {
  plan.Execute(args.x, args.weight, args.out, executor);
}
absl::Status CheckAdd(const RmsNormPlan& plan, const Args& args) {
  return plan.CheckAddArgs(args);
}
void ExecuteAdd(const RmsNormPlan& plan, const Args& args, Workspace,
                Executor& executor) {
  plan.ExecuteAdd(args, executor);
}

// A norm that may be without a weight.
Op& MaybeWeight(Op& op) {
  return op.Maybe("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Then([](Spec& spec, const OpCall& call) {
        if (call.has("weight")) return absl::OkStatus();
        spec.weight = NormWeight::kNone;
        spec.weight_dtype = spec.x_dtype;
        return absl::OkStatus();
      });
}

// One that must have one.
Op& Weight(Op& op) {
  return op.In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype);
}

// All that is read and written has the dtype of x.
OpDType<Spec> OneDType() {
  return {&Spec::x_dtype, &Spec::residual_dtype, &Spec::out_dtype};
}

absl::Status AddRmsNorm(OpRegistry& registry) {
  Op op("rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden},
        {&Spec::x_dtype, &Spec::residual_dtype});
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Attr("var_hidden_size", int64_t{0}, &Spec::span)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Calls(&CheckNorm, &ExecuteNorm)
      .Reference(&Native)
      .Example({{"x", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddAddRmsNorm(OpRegistry& registry) {
  Op op("add_rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::x_dtype)
      .InOut("residual", &Args::residual, &Args::residual_out, Like("x"),
             &Spec::residual_dtype);
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
      .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
      .InPlace("x", "out")
      .InPlace("x", "residual")
      .Calls(&CheckAdd, &ExecuteAdd)
      .Reference(&NativeAdd)
      .Example({{"x", {4, 64}}, {"residual", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddFusedAddRmsNorm(OpRegistry& registry) {
  Op op("fused_add_rms_norm");
  op.InOut("x", &Args::x, &Args::out, {kLeading, &Spec::hidden}, OneDType())
      .InOut("residual", &Args::residual, &Args::residual_out, Like("x"),
             Like("x"));
  return MaybeWeight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Calls(&CheckAdd, &ExecuteAdd)
      .Reference(&NativeAdd)
      .Example({{"x", {4, 64}}, {"residual", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddFusedAddRmsnormCpu(OpRegistry& registry) {
  Op op("fused_add_rmsnorm_cpu");
  op.InOut("input", &Args::x, &Args::out, {kLeading, &Spec::hidden}, OneDType())
      .Word("x", "input")
      .InOut("residual", &Args::residual, &Args::residual_out, Like("input"),
             Like("input"));
  return Weight(op)
      .Need("eps", &Spec::eps)
      .Given(&Spec::sum, NormSum::kExact)
      .Calls(&CheckAdd, &ExecuteAdd)
      .Reference(&NativeAdd)
      .Example({{"input", {4, 64}},
                {"residual", {4, 64}},
                {"weight", {64}},
                {"eps", 1e-6}})
      .AddTo(registry);
}

absl::Status AddGemmaRmsNorm(OpRegistry& registry) {
  Op op("gemma_rms_norm");
  op.In("x", &Args::x, {kLeading, &Spec::hidden}, OneDType());
  return Weight(op)
      .Attr("eps", 1e-6, &Spec::eps)
      .Given(&Spec::weight, NormWeight::kOnePlus)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .OrHeads()
      .Calls(&CheckNorm, &ExecuteNorm)
      .Reference(&Native)
      .Example({{"x", {4, 64}}, {"weight", {64}}})
      .AddTo(registry);
}

absl::Status AddL2Norm(OpRegistry& registry) {
  return OpDeclaration<L2NormPlan, L2NormSpec, L2NormArgs>("l2_norm")
      .In("x", &L2NormArgs::x, {kLeading, &L2NormSpec::hidden},
          &L2NormSpec::x_dtype)
      .Attr("eps", 1e-6, &L2NormSpec::eps)
      .DTypeAttr("out_dtype", Like("x"), &L2NormSpec::out_dtype)
      .Out("out", &L2NormArgs::out, Like("x"), &L2NormSpec::out_dtype)
      .InPlace("x", "out")
      .OrHeads()
      .Reference(&NativeL2)
      .Example({{"x", {4, 64}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterNormOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddAddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddFusedAddRmsNorm(registry));
  QUERN_RETURN_IF_ERROR(AddFusedAddRmsnormCpu(registry));
  QUERN_RETURN_IF_ERROR(AddGemmaRmsNorm(registry));
  return AddL2Norm(registry);
}

}  // namespace quern
