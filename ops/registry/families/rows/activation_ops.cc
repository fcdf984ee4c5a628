#include "quern/ops/registry/families/rows/activation_ops.h"

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/activation.h"

namespace quern {
namespace {

struct Args {
  AnyTensorView x, out;
};
using Unary = OpDeclaration<ActivationPlan, ActivationSpec, Args>;
using Gated = OpDeclaration<ActAndMulPlan, ActAndMulSpec, Args>;

template <class Plan>
absl::Status Check(const Plan& plan, const Args& args) {
  return plan.CheckArgs(args.x, args.out);
}
template <class Plan>
void Execute(const Plan& plan, const Args& args, Workspace,
             Executor& executor) {
  plan.Execute(args.x, args.out, executor);
}

NativeActivation NativeOf(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return NativeActivation::kGelu;
    case Activation::kGeluTanh:
      return NativeActivation::kGeluTanh;
    case Activation::kQuickGelu:
      return NativeActivation::kQuickGelu;
    case Activation::kRelu2:
      return NativeActivation::kRelu2;
    case Activation::kFatrelu:
      return NativeActivation::kFatrelu;
    case Activation::kXielu:
      return NativeActivation::kXielu;
    default:
      return NativeActivation::kSilu;
  }
}

template <NativeActivation kNative>
void NativeUnaryOf(const ActivationSpec& spec, const Args& args) {
  const NativeRound rd(spec.x_dtype);
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    for (int64_t i = 0; i < spec.hidden; ++i) {
      out.Set(i, NativeActivate(kNative, spec.params, x[i], rd));
    }
  }
}
void NativeGelu(const ActivationSpec& spec, const Args& args) {
  if (spec.activation == Activation::kGelu) {
    NativeUnaryOf<NativeActivation::kGelu>(spec, args);
  } else {
    NativeUnaryOf<NativeActivation::kGeluTanh>(spec, args);
  }
}

// The cutoff of one row, with mean, deviation and cutoff each rounded by rd.
// The quantile stays f32.
float NativeCutoff(const ScalarRow& gate, int64_t n, float quantile,
                   const NativeRound& rd) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{gate[i]};
  const double mean = sum / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) {
    squares += (double{gate[i]} - mean) * (double{gate[i]} - mean);
  }
  const float deviation =
      rd(static_cast<float>(std::sqrt(squares / static_cast<double>(n))));
  return rd(rd(static_cast<float>(mean)) + rd(deviation * quantile));
}

void NativeGated(const ActAndMulSpec& spec, const Args& args) {
  const int64_t d = spec.d;
  const bool pairs = spec.order == GateOrder::kInterleaved;
  const NativeRound rd(spec.x_dtype);
  const float quantile =
      spec.sparsity == 0.0 ? 0.0f
                           : static_cast<float>(NormalQuantile(spec.sparsity));
  for (int64_t t = 0; t < RowsOf(args.x); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t);
    const float cutoff =
        spec.sparsity == 0.0 ? 0.0f : NativeCutoff(x, d, quantile, rd);
    for (int64_t i = 0; i < d; ++i) {
      float gate = x[pairs ? 2 * i : i], up = x[pairs ? 2 * i + 1 : d + i];
      if (spec.order == GateOrder::kGateSecond) std::swap(gate, up);
      if (spec.sparsity != 0.0) {
        const float above = rd(gate - cutoff);
        gate = above < 0.0f ? 0.0f : above;
      }
      out.Set(i, spec.activation == Activation::kSwigluOai
                     ? NativeSwigluOai(spec.params, gate, up, rd)
                     : NativeActivate(NativeOf(spec.activation), spec.params,
                                      gate, rd) *
                           up);
    }
  }
}

// An operator that maps x[..., n] to [..., n].
Unary UnaryOp(const char* name, Activation activation,
              void (*reference)(const ActivationSpec&, const Args&)) {
  using Spec = ActivationSpec;
  Unary op(name);
  op.In("x", &Args::x, {kLeading, &Spec::hidden},
        {&Spec::x_dtype, &Spec::out_dtype})
      .Given(&Spec::activation, activation)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Calls(&Check<ActivationPlan>, &Execute<ActivationPlan>)
      .Reference(reference)
      .Example({{"x", {4, 64}}});
  return op;
}

// One that maps x[..., 2 d], a gate and what it is multiplied with, to [...,
// d].
Gated GatedOp(const char* name, Activation activation,
              GateOrder order = GateOrder::kGateFirst) {
  using Spec = ActAndMulSpec;
  Gated op(name);
  op.In("x", &Args::x, {kLeading, Times(2, &Spec::d)},
        {&Spec::x_dtype, &Spec::out_dtype})
      .Given(&Spec::activation, activation)
      .Given(&Spec::order, order)
      .Out("out", &Args::out, {Like("x"), &Spec::d}, Like("x"))
      .InPlace("x", "out")
      .Calls(&Check<ActAndMulPlan>, &Execute<ActAndMulPlan>)
      .Reference(&NativeGated)
      .Example({{"x", {4, 64}}});
  return op;
}

// The argument that chooses between two formulas of GELU.
template <class Op, class Spec>
Op& Approximate(Op& op, Activation Spec::*to) {
  const std::vector<std::pair<const char*, Activation>> formulas = {
      {"none", Activation::kGelu}, {"tanh", Activation::kGeluTanh}};
  return op.Choice("approximate", "none", formulas, to);
}

// alpha_p and alpha_n are given as stored, before softplus.
absl::Status FillXielu(ActivationSpec& spec, const OpCall& call) {
  const auto at = [&](const char* name) {
    return static_cast<float>(call.Float(name));
  };
  spec.params =
      XieluParams(at("alpha_p"), at("alpha_n"), at("beta"), at("eps"));
  return absl::OkStatus();
}

absl::Status CheckSparsity(ActAndMulSpec& spec, const OpCall& call) {
  if (spec.sparsity != 0.0) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "activation_sparsity=0; need 0 < "
                         "activation_sparsity <= 1, or gelu_and_mul");
}

absl::Status RegisterUnary(OpRegistry& r) {
  using N = NativeActivation;
  QUERN_RETURN_IF_ERROR(
      UnaryOp("silu", Activation::kSilu, &NativeUnaryOf<N::kSilu>).AddTo(r));
  Unary gelu = UnaryOp("gelu", Activation::kGelu, &NativeGelu);
  QUERN_RETURN_IF_ERROR(
      Approximate(gelu, &ActivationSpec::activation).AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("gelu_new", Activation::kGeluTanh, &NativeUnaryOf<N::kGeluNew>)
          .AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("gelu_fast", Activation::kGeluTanh, &NativeUnaryOf<N::kGeluFast>)
          .AddTo(r));
  QUERN_RETURN_IF_ERROR(UnaryOp("quick_gelu", Activation::kQuickGelu,
                                &NativeUnaryOf<N::kQuickGelu>)
                            .AddTo(r));
  QUERN_RETURN_IF_ERROR(
      UnaryOp("relu2", Activation::kRelu2, &NativeUnaryOf<N::kRelu2>).AddTo(r));
  return UnaryOp("xielu", Activation::kXielu, &NativeUnaryOf<N::kXielu>)
      .Need<double>("alpha_p")
      .Need<double>("alpha_n")
      .Attr("beta", 0.5)
      .Attr("eps", -1e-6)
      .Then(&FillXielu)
      .Example({{"x", {4, 64}}, {"alpha_p", 0.2}, {"alpha_n", -1.0}})
      .AddTo(r);
}

float& Alpha(ActAndMulSpec& s) { return s.params.alpha; }
float& Limit(ActAndMulSpec& s) { return s.params.limit; }
float& Threshold(ActAndMulSpec& s) { return s.params.threshold; }

absl::Status RegisterGated(OpRegistry& r) {
  using Spec = ActAndMulSpec;
  QUERN_RETURN_IF_ERROR(GatedOp("silu_and_mul", Activation::kSilu).AddTo(r));
  QUERN_RETURN_IF_ERROR(
      GatedOp("mul_and_silu", Activation::kSilu, GateOrder::kGateSecond)
          .AddTo(r));
  Gated gelu = GatedOp("gelu_and_mul", Activation::kGelu);
  QUERN_RETURN_IF_ERROR(Approximate(gelu, &Spec::activation).AddTo(r));
  Gated sparse = GatedOp("gelu_and_mul_sparse", Activation::kGelu);
  sparse.Attr("activation_sparsity", 0.95, &Spec::sparsity)
      .Then(&CheckSparsity);
  QUERN_RETURN_IF_ERROR(Approximate(sparse, &Spec::activation).AddTo(r));
  QUERN_RETURN_IF_ERROR(GatedOp("swigluoai_and_mul", Activation::kSwigluOai,
                                GateOrder::kInterleaved)
                            .Attr("alpha", 1.702, &Alpha)
                            .Attr("limit", 7.0, &Limit)
                            .AddTo(r));
  return GatedOp("fatrelu_and_mul", Activation::kFatrelu)
      .Attr("threshold", 0.0, &Threshold)
      .AddTo(r);
}

}  // namespace

absl::Status RegisterActivationOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterGated(registry));
  return RegisterUnary(registry);
}

}  // namespace quern
