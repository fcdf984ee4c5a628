#include "quern/ops/registry/families/rows/quant_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "quern/core/stores.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/quantised_row.h"
#include "quern/quant/convert.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

struct Args {
  AnyTensorView x, q, scales;
};

// A single scale [1] as a matrix. Every other view is returned unchanged.
AnyTensorView AsScales(const AnyTensorView& v) {
  if (v.rank() != 1 || v.extent(0) != 1) return v;
  if (v.writable()) return {v.dtype(), v.mutable_data(), 2, {1, 1}, {1, 1}};
  return {v.dtype(), v.data(), 2, {1, 1}, {1, 1}};
}

// The tensors as the plans take them.
MatrixView<Float8E4M3> CodesOf(const Args& a) {
  return a.q.As<Float8E4M3, 2>();
}
MatrixView<float> ScalesOf(const Args& a) {
  return AsScales(a.scales).As<float, 2>();
}
MatrixView<const float> StaticScalesOf(const Args& a) {
  return AsScales(a.scales).As<const float, 2>();
}

constexpr char kPlan[] = "quantize";
constexpr int64_t kAnyMatrix[] = {kAnyExtent, kAnyExtent};

absl::Status CheckDynamic(const Args& a) {
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kPlan, "q", a.q, DType::kF8E4M3, kAnyMatrix));
  return CheckOutput(kPlan, "scales", AsScales(a.scales), DType::kF32,
                     kAnyMatrix);
}

absl::Status CheckStatic(const Fp8QuantizePlan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kPlan, "scales", AsScales(a.scales), DType::kF32, kAnyMatrix));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kPlan, "q", a.q, DType::kF8E4M3, kAnyMatrix));
  return plan.CheckStaticArgs(a.x, StaticScalesOf(a), CodesOf(a));
}
void ExecuteStatic(const Fp8QuantizePlan& plan, const Args& a, Workspace,
                   Executor& executor) {
  plan.ExecuteStatic(a.x, StaticScalesOf(a), CodesOf(a), executor);
}

absl::Status CheckInt8(const Int8QuantizePlan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(CheckOutput(kPlan, "q", a.q, DType::kI8, kAnyMatrix));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kPlan, "scales", a.scales, DType::kF32, {kAnyExtent}));
  return plan.CheckArgs(a.x, a.q.As<int8_t, 2>(), a.scales.As<float, 1>(), {});
}
void ExecuteInt8(const Int8QuantizePlan& plan, const Args& a, Workspace,
                 Executor& executor) {
  plan.Execute(a.x, a.q.As<int8_t, 2>(), a.scales.As<float, 1>(), {}, executor);
}

void SetFp8(const ScalarRow& q, int64_t i, float v) {
  q.Set(i, std::isnan(v) ? v : std::min(std::max(v, -448.0f), 448.0f));
}

// The scale of a row or group, rounded up to a power of two if the spec asks
// for it.
float NativeScale(const Fp8QuantizeSpec& spec, float max_abs) {
  if (std::isnan(max_abs) || std::isinf(max_abs)) return std::nanf("");
  if (spec.max_abs > 0) max_abs = std::min(max_abs, spec.max_abs);
  const float s =
      std::max(max_abs / Fp8QuantizePlan::kMax, Fp8QuantizePlan::kMinScale);
  if (spec.format == Fp8ScaleFormat::kF32) return s;
  int exponent = 0;
  const float mantissa = std::frexp(s, &exponent);  // in [1/2, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

// The reference divides by the scale of a group, and multiplies by the
// reciprocal of other scales.
void NativeDynamic(const Fp8QuantizeSpec& spec, const Args& args) {
  const int64_t m = args.x.extent(0), k = args.x.extent(1);
  const bool tensor = spec.granularity == Fp8Granularity::kTensor;
  const bool grouped = spec.granularity == Fp8Granularity::kGroup;
  const int64_t rows = tensor ? m : 1, cols = grouped ? spec.group : k;
  // A tensor, and each row, has a scale even without elements.
  for (int64_t r = 0; r < (tensor ? 1 : m); ++r) {
    for (int64_t c = 0; c < (grouped ? k : std::max<int64_t>(k, 1));
         c += std::max<int64_t>(cols, 1)) {
      const int64_t end = std::min(k, c + cols);
      float max_abs = 0;
      for (int64_t t = r; t < r + rows; ++t) {
        const ScalarRow x(args.x, t);
        for (int64_t i = c; i < end; ++i) {
          const float a = std::abs(x[i]);
          if (!(a <= max_abs)) max_abs = std::isnan(max_abs) ? max_abs : a;
        }
      }
      const float s = NativeScale(spec, max_abs);
      const float inverse = 1.0f / s;
      ScalarRow(args.scales, tensor ? 0 : r).Set(grouped ? c / cols : 0, s);
      for (int64_t t = r; t < r + rows; ++t) {
        const ScalarRow x(args.x, t), q(args.q, t);
        for (int64_t i = c; i < end; ++i) {
          SetFp8(q, i, grouped ? x[i] / s : x[i] * inverse);
        }
      }
    }
  }
}

void NativeInt8(const Int8QuantizeSpec&, const Args& args) {
  for (int64_t r = 0; r < args.x.extent(0); ++r) {
    const ScalarRow x(args.x, r), q(args.q, r);
    const QuantisedRow codes(x, args.x.extent(1));
    static_cast<float*>(args.scales.mutable_data())[r] = codes.scale();
    for (int64_t i = 0; i < args.x.extent(1); ++i) {
      q.Set(i, static_cast<float>(codes[i]));
    }
  }
}

void NativeStatic(const Fp8QuantizeSpec& spec, const Args& args) {
  for (int64_t r = 0; r < args.x.extent(0); ++r) {
    const ScalarRow x(args.x, r), q(args.q, r);
    const ScalarRow scales(args.scales,
                           spec.block_rows == 0 ? 0 : r / spec.block_rows);
    for (int64_t i = 0; i < args.x.extent(1); ++i) {
      const float s = scales[spec.block_cols == 0 ? 0 : i / spec.block_cols];
      SetFp8(q, i, x[i] * (1.0f / s));
    }
  }
}

void NativeConvert(const ConvertSpec&, const Args& args) {
  for (int64_t r = 0; r < RowsOf(args.x); ++r) {
    const ScalarRow x(args.x, r), to(args.q, r);
    for (int64_t i = 0; i < args.x.extent(1); ++i) to.Set(i, x[i]);
  }
}

// One scale for each row, group or the tensor.
std::vector<int64_t> ScalesShape(const Fp8QuantizeSpec& spec,
                                 const OpCall& call, int64_t rows) {
  if (spec.granularity == Fp8Granularity::kTensor) return {1};
  const int64_t k = call.Tensor("x")->extents.back();
  const bool grouped = spec.granularity == Fp8Granularity::kGroup;
  return {rows, grouped ? DivCeil(k, spec.group) : 1};
}

absl::Status FillDynamic(Fp8QuantizeSpec& spec, const OpCall& call) {
  if (call.Bool("ue8m0")) spec.format = Fp8ScaleFormat::kPowerOfTwo;
  if (spec.granularity != Fp8Granularity::kGroup) return absl::OkStatus();
  spec.group = call.Int("group_size");
  return CheckAtLeast(call.op(), "group_size", spec.group, 1);
}

absl::Status AddDynamic(OpRegistry& registry) {
  using Spec = Fp8QuantizeSpec;
  return OpDeclaration<Fp8QuantizePlan, Spec, Args>("quant_fp8")
      .In("x", &Args::x, {kLeading, kAny}, &Spec::dtype)
      .Choice<Fp8Granularity>("granularity", "token",
                              {{"tensor", Fp8Granularity::kTensor},
                               {"token", Fp8Granularity::kToken},
                               {"group", Fp8Granularity::kGroup}},
                              &Spec::granularity)
      .Attr("group_size", int64_t{128})
      .Attr("ue8m0", false)
      .Then(&FillDynamic)
      .Attr("scale_ub", 0.0, &Spec::max_abs)
      .Out("q", &Args::q, Like("x"), DType::kF8E4M3)
      .Out("scales", &Args::scales, &ScalesShape, DType::kF32)
      .CheckFirst(&CheckDynamic)
      .Takes<&Args::x, &CodesOf, &ScalesOf>()
      .Reference(&NativeDynamic)
      .Example({{"x", {4, 64}}})
      .AddTo(registry);
}

absl::Status AddStatic(OpRegistry& registry) {
  using Spec = Fp8QuantizeSpec;
  return OpDeclaration<Fp8QuantizePlan, Spec, Args>("static_quant_fp8")
      .In("x", &Args::x, {kLeading, kAny}, &Spec::dtype)
      .In("scale", &Args::scales)
      .Word("scales", "scale")
      .Given(&Spec::granularity, Fp8Granularity::kStatic)
      .Attr("block_rows", int64_t{0}, &Spec::block_rows)
      .Attr("block_cols", int64_t{0}, &Spec::block_cols)
      .Out("q", &Args::q, Like("x"), DType::kF8E4M3)
      .Calls(&CheckStatic, &ExecuteStatic)
      .Reference(&NativeStatic)
      .Example({{"x", {4, 64}},
                {"scale", {2, 4}, DType::kF32},
                {"block_rows", 2},
                {"block_cols", 16}})
      .AddTo(registry);
}

absl::Status AddInt8(OpRegistry& registry) {
  using Spec = Int8QuantizeSpec;
  return OpDeclaration<Int8QuantizePlan, Spec, Args>("quant_int8")
      .In("x", &Args::x, {kLeading, kAny}, &Spec::dtype)
      .Out("q", &Args::q, Like("x"), DType::kI8)
      .Out("scales", &Args::scales, {kRows}, DType::kF32)
      .Calls(&CheckInt8, &ExecuteInt8)
      .Reference(&NativeInt8)
      .Example({{"x", {4, 64}}})
      .AddTo(registry);
}

absl::Status FillConvert(ConvertSpec& spec, const OpCall& call) {
  spec.stores = Stores::kCached;  // the next operator reads them
  QUERN_ASSIGN_OR_RETURN(spec.to, DTypeOr(call.op(), "out_dtype",
                                          call.Text("out_dtype"), spec.from));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(call.op(), "x", spec.from, kFloatDTypes));
  return CheckDTypeIn(call.op(), "out_dtype", spec.to, kFloatDTypes);
}

absl::Status AddConvert(OpRegistry& registry) {
  using Spec = ConvertSpec;
  return OpDeclaration<ConvertPlan, Spec, Args>("convert")
      .In("x", &Args::x, {kLeading, kAny}, &Spec::from)
      .Need<std::string>("out_dtype")
      .Then(&FillConvert)
      .Out("out", &Args::q, Like("x"), &Spec::to)
      .InPlace("x", "out")
      .Takes<&Args::x, &Args::q>()
      .Reference(&NativeConvert)
      .Example({{"x", {4, 64}}, {"out_dtype", "f32"}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterQuantOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddDynamic(registry));
  QUERN_RETURN_IF_ERROR(AddStatic(registry));
  QUERN_RETURN_IF_ERROR(AddInt8(registry));
  return AddConvert(registry);
}

}  // namespace quern
