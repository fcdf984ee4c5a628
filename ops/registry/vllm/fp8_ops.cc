#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/vllm/rows.h"
#include "quern/quant/fp8_quantize.h"

namespace quern {
namespace {

constexpr char kOp[] = "quantize";
using Plan = Fp8QuantizePlan;
using Spec = Fp8QuantizeSpec;

struct Args {
  AnyTensorView out, x, scale, bound;
};
using Quant = OpDeclaration<Plan, Spec, Args>;

// A scale [1] as [1, 1], and scales [rows] as [rows, 1].
AnyTensorView AsColumn(const AnyTensorView& v) {
  if (v.rank() != 1) return v;
  const AnyTensorView::Dims extents{v.extent(0), 1}, strides{v.stride(0), 1};
  if (v.writable()) return {v.dtype(), v.mutable_data(), 2, extents, strides};
  return {v.dtype(), v.data(), 2, extents, strides};
}
MatrixView<Float8E4M3> CodesOf(const Args& a) {
  return a.out.As<Float8E4M3, 2>();
}

absl::Status CheckCodes(const Args& a) {
  return CheckOutput(kOp, "out", a.out, DType::kF8E4M3,
                     {kAnyExtent, kAnyExtent});
}

absl::Status CheckStatic(const Plan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(CheckCodes(a));
  const AnyTensorView scales = AsColumn(a.scale);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "scale", scales, DType::kF32, {kAnyExtent, kAnyExtent}));
  return plan.CheckStaticArgs(a.x, scales.As<const float, 2>(), CodesOf(a));
}
void ExecuteStatic(const Plan& plan, const Args& a, Workspace,
                   Executor& executor) {
  plan.ExecuteStatic(a.x, AsColumn(a.scale).As<const float, 2>(), CodesOf(a),
                     executor);
}

float BoundOf(const Args& a) {
  return *static_cast<const float*>(a.bound.data());
}

absl::Status CheckDynamic(const Plan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(CheckCodes(a));
  const AnyTensorView scales = AsColumn(a.scale);
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "scale", scales, DType::kF32, {kAnyExtent, kAnyExtent}));
  if (a.bound.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "scale_ub", a.bound, DType::kF32, {1}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "scale_ub", a.bound, "out", a.out));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "scale_ub", a.bound, "scale", a.scale));
    QUERN_RETURN_IF_ERROR(CheckPositive(kOp, "scale_ub[0]", BoundOf(a)));
  }
  return plan.CheckArgs(a.x, CodesOf(a), scales.As<float, 2>());
}

// The scale of a row whose largest element counts as `bound` at most. S of
// quant/fp8_quantize.h grows with its argument, so that the bound may be put to
// the scale.
float Bounded(float scale, float bound) {
  const float limit = std::max(bound / Plan::kMax, Plan::kMinScale);
  return scale > limit ? limit : scale;  // NaN stays NaN
}

void ExecuteDynamic(const Plan& plan, const Args& a, Workspace,
                    Executor& executor) {
  const MatrixView<float> scales = AsColumn(a.scale).As<float, 2>();
  if (a.bound.rank() == 0) {
    return plan.Execute(a.x, CodesOf(a), scales, executor);
  }
  const float bound = BoundOf(a);
  const MatrixView<Float8E4M3> codes = CodesOf(a);
  const int64_t k = a.x.extent(1);
  const auto size = static_cast<int64_t>(SizeOf(a.x.dtype()));
  ParallelRows(executor, a.x.extent(0), 3 * k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const char* const x =
          static_cast<const char*>(a.x.data()) + t * a.x.RowStride() * size;
      const float scale = Bounded(plan.ScaleOf(plan.MaxCode(x, k)), bound);
      *scales.Row(t) = scale;
      plan.QuantizePart(x, k, scale, codes.Row(t));
    }
  });
}

// The formulas of quant/fp8_quantize.h, one element after the other.
void NativeCodes(const Args& a, int64_t t, float scale) {
  const ScalarRow x(a.x, t), out(a.out, t);
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < a.x.extent(1); ++i) {
    const float v = x[i] * inverse;
    out.Set(i, std::isnan(v) ? v : std::min(std::max(v, -448.0f), 448.0f));
  }
}
void NativeStatic(const Spec& spec, const Args& a) {
  const AnyTensorView scales = AsColumn(a.scale);
  for (int64_t t = 0; t < a.x.extent(0); ++t) {
    const ScalarRow x(a.x, t), out(a.out, t);
    const ScalarRow of(scales, spec.block_rows == 0 ? 0 : t / spec.block_rows);
    for (int64_t i = 0; i < a.x.extent(1); ++i) {
      const float v =
          x[i] * (1.0f / of[spec.block_cols == 0 ? 0 : i / spec.block_cols]);
      out.Set(i, std::isnan(v) ? v : std::min(std::max(v, -448.0f), 448.0f));
    }
  }
}
float LargestOf(const Args& a, int64_t t, float largest) {
  const ScalarRow x(a.x, t);
  for (int64_t i = 0; i < a.x.extent(1); ++i) {
    const float v = std::abs(x[i]);
    if (!(v <= largest)) largest = std::isnan(largest) ? largest : v;
  }
  return largest;
}
float NativeScale(float largest) {
  if (!std::isfinite(largest)) return std::nanf("");
  return std::max(largest / Plan::kMax, Plan::kMinScale);
}
void NativeDynamic(const Spec& spec, const Args& a) {
  const AnyTensorView scales = AsColumn(a.scale);
  const bool tensor = spec.granularity == Fp8Granularity::kTensor;
  float all = 0;
  for (int64_t t = 0; t < a.x.extent(0); ++t) all = LargestOf(a, t, all);
  if (tensor) ScalarRow(scales, 0).Set(0, NativeScale(all));
  for (int64_t t = 0; t < a.x.extent(0); ++t) {
    float scale = NativeScale(tensor ? all : LargestOf(a, t, 0));
    if (a.bound.rank() != 0) scale = Bounded(scale, BoundOf(a));
    if (!tensor) ScalarRow(scales, t).Set(0, scale);
    NativeCodes(a, t, scale);
  }
}

// out and input, which every one of vLLM's quantisers begins with.
Quant Rows(const char* name) {
  Quant op(name);
  op.InOut("out", &Args::out, nullptr, {kRows, kAny}, DType::kF8E4M3)
      .Word("q", "out")
      .In("input", &Args::x, Like("out"), &Spec::dtype)
      .Word("x", "input")
      .Word("dtype", "input")
      .Word("scales", "scale");
  return op;
}
Quant& Dynamic(Quant& op) {
  return op.Calls(&CheckDynamic, &ExecuteDynamic).Reference(&NativeDynamic);
}

// vLLM's _vec: what is returned are the codes, and scales of rows or the one
// that is given.
absl::Status CheckVec(const Plan& plan, const Args& a) {
  if (plan.spec().granularity != Fp8Granularity::kStatic) {
    return CheckDynamic(plan, a);
  }
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "scale", a.scale, DType::kF32, {1}));
  for (const auto& [field, v] :
       {std::pair("out", &a.out), {"input", &a.x}, {"scale_opt", &a.bound}}) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, field, *v, "scale", a.scale));
  }
  Args given = a;
  given.scale = a.bound;
  return CheckStatic(plan, given);
}
void ExecuteVec(const Plan& plan, const Args& a, Workspace workspace,
                Executor& executor) {
  if (plan.spec().granularity != Fp8Granularity::kStatic) {
    return ExecuteDynamic(plan, a, workspace, executor);
  }
  *static_cast<float*>(a.scale.mutable_data()) = BoundOf(a);
  // The scale that is returned, which is the one that was given.
  ExecuteStatic(plan, a, workspace, executor);
}
void NativeVec(const Spec& spec, const Args& a) {
  if (spec.granularity != Fp8Granularity::kStatic) {
    return NativeDynamic(spec, a);
  }
  *static_cast<float*>(a.scale.mutable_data()) = BoundOf(a);
  NativeStatic(spec, a);
}
absl::Status FillVec(Spec& spec, const OpCall& call) {
  const bool rows = call.Bool("channelwise");
  spec.granularity = rows ? Fp8Granularity::kToken : Fp8Granularity::kStatic;
  if (rows != call.has("scale_opt")) return absl::OkStatus();
  return InvalidArgument(call.op(), "scale_opt is ", rows ? "given" : "missing",
                         "; need it where channelwise is false");
}
std::vector<int64_t> VecScales(const Spec& spec, const OpCall&, int64_t rows) {
  return {spec.granularity == Fp8Granularity::kStatic ? 1 : rows};
}

}  // namespace

absl::Status RegisterVllmFp8Ops(OpRegistry& registry) {
  Quant fixed = Rows("static_scaled_fp8_quant");
  QUERN_RETURN_IF_ERROR(fixed.In("scale", &Args::scale)
                            .Given(&Spec::granularity, Fp8Granularity::kStatic)
                            .Attr("group_m", int64_t{0}, &Spec::block_rows)
                            .Word("block_rows", "group_m")
                            .Attr("group_n", int64_t{0}, &Spec::block_cols)
                            .Word("block_cols", "group_n")
                            .Calls(&CheckStatic, &ExecuteStatic)
                            .Reference(&NativeStatic)
                            .Example({{"out", {4, 64}, DType::kF8E4M3},
                                      {"input", {4, 64}},
                                      {"scale", {1}, DType::kF32}})
                            .AddTo(registry));
  Quant tensor = Rows("dynamic_scaled_fp8_quant");
  tensor.Given(&Spec::granularity, Fp8Granularity::kTensor)
      .InOut("scale", &Args::scale, nullptr, {1}, DType::kF32);
  QUERN_RETURN_IF_ERROR(Dynamic(tensor)
                            .Example({{"out", {4, 64}, DType::kF8E4M3},
                                      {"input", {4, 64}},
                                      {"scale", {1}, DType::kF32}})
                            .AddTo(registry));
  Quant token = Rows("dynamic_per_token_scaled_fp8_quant");
  token.InOut("scale", &Args::scale, nullptr, {kRows, 1}, DType::kF32)
      .Maybe("scale_ub", &Args::bound, {1}, DType::kF32)
      .Then([](Spec& spec, const OpCall& call) {
        // A bound on elements, with which the plan clamps the others.
        if (call.has("scale_ub")) {
          spec.max_abs = std::numeric_limits<float>::max();
        }
        return absl::OkStatus();
      });
  QUERN_RETURN_IF_ERROR(Dynamic(token)
                            .Example({{"out", {4, 64}, DType::kF8E4M3},
                                      {"input", {4, 64}},
                                      {"scale", {4, 1}, DType::kF32}})
                            .AddTo(registry));
  return Quant("quantize_fp8e4m3_vec")
      .In("input", &Args::x, {kRows, kAny}, &Spec::dtype)
      .Word("x", "input")
      .Word("dtype", "input")
      .Need<bool>("channelwise")
      .Maybe("scale_opt", &Args::bound, {1}, DType::kF32)
      .Then(&FillVec)
      .Out("out", &Args::out, Like("input"), DType::kF8E4M3)
      .Out("scale", &Args::scale, &VecScales, DType::kF32)
      .Calls(&CheckVec, &ExecuteVec)
      .Reference(&NativeVec)
      .Example({{"input", {4, 64}}, {"channelwise", true}})
      .AddTo(registry);
}

}  // namespace quern
