#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/activation/sigmoid_mul.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/rows/gated_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/rows_ops.h"

namespace quern {
namespace {

// A row of the plan is a head of the gate.
struct Spec : SigmoidMulSpec {
  bool inplace = false;
};

struct Args {
  AnyTensorView input, gate, out;
};

class Plan {
 public:
  static absl::StatusOr<Plan> Create(const Spec& spec) {
    QUERN_ASSIGN_OR_RETURN(SigmoidMulPlan plan, SigmoidMulPlan::Create(spec));
    return Plan(plan, spec.inplace);
  }
  const char* target() const { return plan_.target(); }

  absl::Status CheckArgs(const Args& args) const {
    QUERN_RETURN_IF_ERROR(plan_.CheckArgs(args.input, args.gate, args.out));
    if (!inplace_ || SameView(args.input, args.out)) return absl::OkStatus();
    return InvalidArgument("sigmoid_mul",
                           "out is not input; need the same elements with "
                           "inplace");
  }
  void Execute(const Args& args, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    plan_.Execute(args.input, args.gate, args.out, executor);
  }

 private:
  Plan(const SigmoidMulPlan& plan, bool inplace)
      : plan_(plan), inplace_(inplace) {}

  SigmoidMulPlan plan_;
  bool inplace_;
};

// gate is like input, or the last extent of input in heads.
absl::Status CheckGate(Spec& spec, const OpCall& call) {
  const TensorMeta &input = *call.Tensor("input"), &gate = *call.Tensor("gate");
  const std::vector<int64_t>&x = input.extents, &g = gate.extents;
  const bool heads = g.size() == 3 && g[0] == x[0] && g[2] > 0 &&
                     x[1] % g[2] == 0 && x[1] / g[2] == g[1];
  if (!heads && g != x) {
    return InvalidArgument(call.op(), "gate is ", PrintMeta(gate),
                           " and input is ", PrintMeta(input),
                           "; need the shape of input, or [", x[0],
                           ", heads, head_dim] of as many elements");
  }
  spec.d = spec.gate_cols = g.back();
  return absl::OkStatus();
}

// A dense or a strided matrix as heads of gate's size, where it divides so; the
// plan refuses what does not.
AnyTensorView InHeads(const AnyTensorView& rows, const AnyTensorView& gate) {
  if (gate.rank() != 3 || rows.rank() != 2) return rows;
  const int64_t heads = gate.extent(1), n = gate.extent(2);
  if (n < 1 || rows.extent(1) % n != 0 || rows.extent(1) / n != heads ||
      rows.stride(1) != 1) {
    return rows;
  }
  const AnyTensorView::Dims extents{rows.extent(0), heads, n};
  const AnyTensorView::Dims strides{rows.stride(0), n, 1};
  if (rows.writable()) {
    return AnyTensorView(rows.dtype(), rows.mutable_data(), 3, extents,
                         strides);
  }
  return AnyTensorView(rows.dtype(), rows.data(), 3, extents, strides);
}

void Native(const Spec& spec, const Args& args) {
  for (int64_t t = 0; t < RowsOf(args.gate); ++t) {
    const ScalarRow x(args.input, t), gate(args.gate, t), out(args.out, t);
    for (int64_t i = 0; i < spec.d; ++i) {
      const double g = double{gate[i]};
      out.Set(i, static_cast<float>(double{x[i]} / (1.0 + std::exp(-g))));
    }
  }
}

absl::Status AddSigmoidMul(OpRegistry& registry) {
  return OpDeclaration<Plan, Spec, Args>("fused_sigmoid_mul_cpu")
      .In("input", &Args::input, {kRows, kAny},
          {&Spec::x_dtype, &Spec::gate_dtype, &Spec::out_dtype})
      .In("gate", &Args::gate, {}, Like("input"))
      .Then(&CheckGate)
      .Need("inplace", &Spec::inplace)
      .Out("out", &Args::out, Like("input"), Like("input"))
      .InPlace("input", "out")
      .Word("x", "input")
      .Finish([](Args& args) {
        args.input = InHeads(args.input, args.gate);
        args.out = InHeads(args.out, args.gate);
      })
      .Reference(&Native)
      .Example({{"input", {4, 64}}, {"gate", {4, 64}}, {"inplace", false}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangActivationOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      GatedOp("silu_and_mul_cpu", "input", Activation::kSilu).AddTo(registry));
  QUERN_RETURN_IF_ERROR(
      GatedOp("gelu_and_mul_cpu", "input", Activation::kGelu).AddTo(registry));
  QUERN_RETURN_IF_ERROR(
      GatedOp("gelu_tanh_and_mul_cpu", "input", Activation::kGeluTanh)
          .AddTo(registry));
  return AddSigmoidMul(registry);
}

}  // namespace quern
