#include "quern/ops/registry/vllm/rows_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/rows/gated_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/vllm/rows.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

struct ActArgs {
  AnyTensorView x, out;
};
using Act = OpDeclaration<ActivationPlan, ActivationSpec, ActArgs>;

absl::Status CheckAct(const ActivationPlan& plan, const ActArgs& a) {
  return plan.CheckArgs(a.x, a.out);
}
void ExecuteAct(const ActivationPlan& plan, const ActArgs& a, Workspace,
                Executor& executor) {
  plan.Execute(a.x, a.out, executor);
}

// Computes in double and rounds once.
void NativeAct(const ActivationSpec& spec, const ActArgs& a) {
  for (int64_t t = 0; t < RowsOf(a.x); ++t) {
    const ScalarRow x(a.x, t), out(a.out, t);
    for (int64_t i = 0; i < spec.hidden; ++i) {
      const double v = double{x[i]};
      const double w = 2 * std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v);
      out.Set(i, static_cast<float>(spec.activation == Activation::kQuickGelu
                                        ? v / (1 + std::exp(-1.702 * v))
                                    : spec.activation == Activation::kGeluTanh
                                        ? v / (1 + std::exp(-w))
                                        : v * std::erfc(-v * M_SQRT1_2) / 2));
    }
  }
}

absl::Status AddActivations(OpRegistry& registry) {
  using Spec = ActivationSpec;
  QUERN_RETURN_IF_ERROR(
      GatedOp("gelu_tanh_and_mul", "x", Activation::kGeluTanh).AddTo(registry));
  for (const auto& [name, activation] :
       {std::pair("gelu_quick", Activation::kQuickGelu),
        {"gelu_tanh", Activation::kGeluTanh}}) {
    QUERN_RETURN_IF_ERROR(Act(name)
                              .In("x", &ActArgs::x, {kLeading, &Spec::hidden},
                                  {&Spec::x_dtype, &Spec::out_dtype})
                              .Given(&Spec::activation, activation)
                              .Out("out", &ActArgs::out, Like("x"), Like("x"))
                              .InPlace("x", "out")
                              .Calls(&CheckAct, &ExecuteAct)
                              .Reference(&NativeAct)
                              .Example({{"x", {4, 64}}})
                              .AddTo(registry));
  }
  return Act("activation_lut_bf16")
      .In("input", &ActArgs::x, {kLeading, &Spec::hidden},
          OpDType<Spec>::OneOf({DType::kBF16},
                               {&Spec::x_dtype, &Spec::out_dtype}))
      .Word("x", "input")
      .Choice<Activation>("activation", "gelu", {{"gelu", Activation::kGelu}},
                          &Spec::activation)
      .Out("out", &ActArgs::out, Like("input"), Like("input"))
      .InPlace("input", "out")
      .Calls(&CheckAct, &ExecuteAct)
      .Reference(&NativeAct)
      .Example({{"input", {4, 64}, DType::kBF16}, {"activation", "gelu"}})
      .AddTo(registry);
}

using QuantSpec = Int8QuantizeSpec;
struct QuantArgs {
  AnyTensorView out, x, scale, azp;
};
using Quant = OpDeclaration<Int8QuantizePlan, QuantSpec, QuantArgs>;
constexpr char kOp[] = "quantize";

OpDType<QuantSpec> Floats() {
  return OpDType<QuantSpec>::OneOf({DType::kF32, DType::kBF16, DType::kF16},
                                   {&QuantSpec::dtype});
}

// out and input, and what is read is not written.
absl::Status CheckRows(const Int8QuantizePlan& plan, const QuantArgs& a) {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "input", a.x, plan.spec().dtype,
                                   {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", a.out, DType::kI8,
                                    {a.x.extent(0), a.x.extent(1)}));
  return CheckApart(kOp, "input", a.x, "out", a.out);
}

int32_t ZeroPointOf(const QuantArgs& a) {
  return a.azp.rank() == 0 ? 0 : *static_cast<const int32_t*>(a.azp.data());
}
float ScaleOf(const QuantArgs& a) {
  return *static_cast<const float*>(a.scale.data());
}

absl::Status CheckStatic(const Int8QuantizePlan& plan, const QuantArgs& a) {
  QUERN_RETURN_IF_ERROR(CheckRows(plan, a));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "scale", a.scale, DType::kF32, {1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "scale", a.scale, "out", a.out));
  const float scale = ScaleOf(a);
  if (!(scale >= Int8QuantizePlan::kMinScale &&
        scale <= Int8QuantizePlan::kMaxScale)) {
    return InvalidArgument(kOp, "scale[0]=", scale,
                           "; need 2^-125 <= scale <= 2^118");
  }
  if (a.azp.rank() == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "azp", a.azp, DType::kI32, {1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "azp", a.azp, "out", a.out));
  return CheckRange(kOp, "azp[0]", ZeroPointOf(a), -128, 127);
}

// The plan of rows with a scale of their own, whose scale is given here.
void ExecuteStatic(const Int8QuantizePlan& plan, const QuantArgs& a, Workspace,
                   Executor& executor) {
  const float scale = ScaleOf(a);
  const Int8QuantizePlan::Terms terms = {scale, 1.0f / scale, ZeroPointOf(a)};
  const auto size = static_cast<int64_t>(SizeOf(a.x.dtype()));
  ParallelRows(
      executor, a.x.extent(0), 2 * a.x.extent(1),
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          plan.QuantizePart(
              static_cast<const char*>(a.x.data()) + t * a.x.RowStride() * size,
              a.x.extent(1), terms,
              static_cast<int8_t*>(a.out.mutable_data()) +
                  t * a.out.RowStride());
        }
      });
}

int8_t Code(double v, double inverse, int32_t zero_point) {
  // The reciprocal is a float, so the product is exact.
  const double code = std::nearbyint(v * inverse) + zero_point;
  return static_cast<int8_t>(std::min(127.0, std::max(-128.0, code)));
}

void NativeStatic(const QuantSpec&, const QuantArgs& a) {
  const double inverse = double{1.0f / ScaleOf(a)};
  for (int64_t t = 0; t < a.x.extent(0); ++t) {
    const ScalarRow x(a.x, t), out(a.out, t);
    for (int64_t i = 0; i < a.x.extent(1); ++i) {
      const double v = double{x[i]};
      out.Set(i, static_cast<float>(
                     Code(std::isnan(v) ? 0.0 : v, inverse, ZeroPointOf(a))));
    }
  }
}

absl::Status CheckDynamic(const Int8QuantizePlan& plan, const QuantArgs& a) {
  QUERN_RETURN_IF_ERROR(CheckRows(plan, a));
  const int64_t rows = a.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "scale", a.scale, DType::kF32, {rows, 1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "input", a.x, "scale", a.scale));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "out", a.out, "scale", a.scale));
  if (plan.spec().zero_points == Int8ZeroPoint::kNone) {
    if (a.azp.rank() == 0) return absl::OkStatus();
    return InvalidArgument(kOp,
                           "azp is given; need none, as the operator was "
                           "made without it");
  }
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "azp", a.azp, DType::kI32, {rows, 1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "input", a.x, "azp", a.azp));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "out", a.out, "azp", a.azp));
  return CheckApart(kOp, "scale", a.scale, "azp", a.azp);
}

// Calls fn(row of x, its codes, its scale, its zero point or null) of row t.
template <class Fn>
void OnRow(const QuantArgs& a, int64_t t, const Fn& fn) {
  const auto size = static_cast<int64_t>(SizeOf(a.x.dtype()));
  fn(static_cast<const char*>(a.x.data()) + t * a.x.RowStride() * size,
     static_cast<int8_t*>(a.out.mutable_data()) + t * a.out.RowStride(),
     static_cast<float*>(a.scale.mutable_data()) + t * a.scale.RowStride(),
     a.azp.rank() == 0
         ? nullptr
         : static_cast<int32_t*>(a.azp.mutable_data()) + t * a.azp.RowStride());
}
void ExecuteDynamic(const Int8QuantizePlan& plan, const QuantArgs& a, Workspace,
                    Executor& executor) {
  ParallelRows(
      executor, a.x.extent(0), 3 * a.x.extent(1),
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          OnRow(a, t, [&](const char* x, int8_t* q, float* scale, int32_t* z) {
            plan.QuantizeRow(x, a.x.extent(1), q, scale, z);
          });
        }
      });
}

// The formulas of quant/int8_quantize.h in double.
void NativeDynamic(const QuantSpec& spec, const QuantArgs& a) {
  const bool used = spec.zero_points == Int8ZeroPoint::kUsed;
  for (int64_t t = 0; t < a.x.extent(0); ++t) {
    OnRow(a, t, [&](const char*, int8_t* q, float* scale, int32_t* z) {
      const ScalarRow x(a.x, t);
      const int64_t k = a.x.extent(1);
      double low = 0, high = 0;
      bool finite = true;
      for (int64_t i = 0; i < k; ++i) {
        const double v = double{x[i]};
        finite = finite && std::isfinite(v);
        low = std::min(low, v);
        high = std::max(high, v);
      }
      const double range =
          used ? (high - low) / 255 : std::max(-low, high) / 127;
      *scale = !finite      ? std::nanf("")
               : range == 0 ? 1.0f
                            : std::max(static_cast<float>(range),
                                       Int8QuantizePlan::kMinScale);
      const double inverse = finite ? double{1.0f / *scale} : 0.0;
      const int32_t zero =
          used && finite && range != 0
              ? -128 - static_cast<int32_t>(std::nearbyint(low * inverse))
              : 0;
      if (z != nullptr) *z = zero;
      for (int64_t i = 0; i < k; ++i) {
        q[i] = finite ? Code(double{x[i]}, inverse, zero) : int8_t{0};
      }
    });
  }
}

absl::Status AddQuantisers(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      Quant("static_scaled_int8_quant")
          .InOut("out", &QuantArgs::out, nullptr, {kRows, kAny}, DType::kI8)
          .In("input", &QuantArgs::x, Like("out"), Floats())
          .In("scale", &QuantArgs::scale, {1}, DType::kF32)
          .Maybe("azp", &QuantArgs::azp, {1}, DType::kI32)
          .Calls(&CheckStatic, &ExecuteStatic)
          .Reference(&NativeStatic)
          .Example({{"out", {4, 64}, DType::kI8},
                    {"input", {4, 64}},
                    {"scale", {1}, DType::kF32}})
          .AddTo(registry));
  return Quant("dynamic_scaled_int8_quant")
      .InOut("out", &QuantArgs::out, nullptr, {kRows, kAny}, DType::kI8)
      .In("input", &QuantArgs::x, Like("out"), Floats())
      .InOut("scale", &QuantArgs::scale, nullptr, {kRows, 1}, DType::kF32)
      .MaybeInOut("azp", &QuantArgs::azp, {kRows, 1}, DType::kI32)
      .Then([](QuantSpec& spec, const OpCall& call) {
        if (call.has("azp")) spec.zero_points = Int8ZeroPoint::kUsed;
        return absl::OkStatus();
      })
      .Calls(&CheckDynamic, &ExecuteDynamic)
      .Reference(&NativeDynamic)
      .Example({{"out", {4, 64}, DType::kI8},
                {"input", {4, 64}},
                {"scale", {4, 1}, DType::kF32},
                {"azp", {4, 1}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmRowsOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddActivations(registry));
  QUERN_RETURN_IF_ERROR(AddQuantisers(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmFp8Ops(registry));
  return RegisterVllmChoiceOps(registry);
}

}  // namespace quern
