#include "quern/ops/registry/quant_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/quant/convert.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

constexpr char kDynamic[] = "quant_fp8";
constexpr char kStatic[] = "static_quant_fp8";
constexpr char kInt8[] = "quant_int8";
constexpr char kConvert[] = "convert";

NamedArgs Example(DType dtype) { return {{"x", TensorMeta{dtype, {4, 64}}}}; }
NamedArgs StaticExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"scale", TensorMeta{DType::kF32, {2, 4}}},
          {"block_rows", int64_t{2}},
          {"block_cols", int64_t{16}}};
}

absl::StatusOr<Fp8QuantizeSpec> DynamicSpec(const TensorMeta& x,
                                            const std::string& granularity,
                                            int64_t group_size, bool ue8m0,
                                            double scale_ub) {
  Fp8QuantizeSpec spec;
  spec.dtype = x.dtype;
  spec.format = ue8m0 ? Fp8ScaleFormat::kPowerOfTwo : Fp8ScaleFormat::kF32;
  spec.max_abs = static_cast<float>(scale_ub);
  if (granularity == "tensor") {
    spec.granularity = Fp8Granularity::kTensor;
  } else if (granularity == "group") {
    spec.granularity = Fp8Granularity::kGroup;
    spec.group = group_size;
    QUERN_RETURN_IF_ERROR(CheckAtLeast(kDynamic, "group_size", spec.group, 1));
  } else if (granularity != "token") {
    return InvalidArgument(kDynamic, "granularity=\"", granularity,
                           "\"; need \"tensor\", \"token\" or \"group\"");
  }
  return spec;
}

Metas DynamicShapes(const TensorMeta& x, const std::string& granularity,
                    int64_t group_size, bool ue8m0, double scale_ub) {
  QUERN_ASSIGN_OR_RETURN(
      const Fp8QuantizeSpec spec,
      DynamicSpec(x, granularity, group_size, ue8m0, scale_ub));
  QUERN_ASSIGN_OR_RETURN(const int64_t k, LastExtent(kDynamic, "x", x));
  QUERN_ASSIGN_OR_RETURN(const int64_t m, LeadingRows(kDynamic, "x", x));
  TensorMeta scales = {DType::kF32, {m, 1}};
  if (spec.granularity == Fp8Granularity::kTensor) scales.extents = {1};
  if (spec.granularity == Fp8Granularity::kGroup) {
    scales.extents[1] = DivCeil(k, spec.group);
  }
  return std::vector<TensorMeta>{{DType::kF8E4M3, x.extents}, scales};
}

// A single scale [1] as a matrix. Every other view is returned unchanged.
AnyTensorView AsScales(const AnyTensorView& v) {
  if (v.rank() != 1 || v.extent(0) != 1) return v;
  if (v.writable()) return {v.dtype(), v.mutable_data(), 2, {1, 1}, {1, 1}};
  return {v.dtype(), v.data(), 2, {1, 1}, {1, 1}};
}

// x, q and scales as matrices. The tensors must have been checked.
struct Fp8Matrices {
  explicit Fp8Matrices(Tensors tensors)
      : x(AsMatrix(tensors[0])),
        q(AsMatrix(tensors[1]).As<Float8E4M3, 2>()),
        scales(AsScales(tensors[2]).As<float, 2>()) {}
  AnyTensorView x;
  MatrixView<Float8E4M3> q;
  MatrixView<float> scales;
};

absl::Status CheckDynamic(const Fp8QuantizePlan& plan, Tensors tensors) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(kDynamic, tensors, 3));
  QUERN_RETURN_IF_ERROR(CheckOutput(kDynamic, "out0", AsMatrix(tensors[1]),
                                    DType::kF8E4M3, {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kDynamic, "out1", AsScales(tensors[2]),
                                    DType::kF32, {kAnyExtent, kAnyExtent}));
  const Fp8Matrices m(tensors);
  return plan.CheckArgs(m.x, m.q, m.scales);
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
void NativeDynamic(const Fp8QuantizeSpec& spec, Tensors t) {
  const AnyTensorView tensors[] = {AsMatrix(t[0]), AsMatrix(t[1]), t[2]};
  const int64_t m = tensors[0].extent(0), k = tensors[0].extent(1);
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
        const ScalarRow x(tensors[0], t);
        for (int64_t i = c; i < end; ++i) {
          const float a = std::abs(x[i]);
          if (!(a <= max_abs)) max_abs = std::isnan(max_abs) ? max_abs : a;
        }
      }
      const float s = NativeScale(spec, max_abs);
      const float inverse = 1.0f / s;
      ScalarRow(tensors[2], tensor ? 0 : r).Set(grouped ? c / cols : 0, s);
      for (int64_t t = r; t < r + rows; ++t) {
        const ScalarRow x(tensors[0], t), q(tensors[1], t);
        for (int64_t i = c; i < end; ++i) {
          SetFp8(q, i, grouped ? x[i] / s : x[i] * inverse);
        }
      }
    }
  }
}

template <bool kNative>
Bound Dynamic(const TensorMeta& x, const std::string& granularity,
              int64_t group_size, bool ue8m0, double scale_ub) {
  QUERN_ASSIGN_OR_RETURN(
      const Fp8QuantizeSpec spec,
      DynamicSpec(x, granularity, group_size, ue8m0, scale_ub));
  QUERN_ASSIGN_OR_RETURN(Fp8QuantizePlan made, Fp8QuantizePlan::Create(spec));
  const auto plan = std::make_shared<const Fp8QuantizePlan>(std::move(made));
  const auto check = [plan](Tensors t) { return CheckDynamic(*plan, t); };
  if (kNative) {
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check,
        [spec](Tensors t, Executor&) { NativeDynamic(spec, t); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan->target(), check, [plan](Tensors t, Executor& e) {
        const Fp8Matrices m(t);
        plan->Execute(m.x, m.q, m.scales, e);
      }));
}

Metas StaticShapes(const TensorMeta& x, const TensorMeta&, int64_t, int64_t) {
  QUERN_RETURN_IF_ERROR(LastExtent(kStatic, "x", x).status());
  return std::vector<TensorMeta>{{DType::kF8E4M3, x.extents}};
}

template <bool kNative>
Bound Static(const TensorMeta& x, const TensorMeta& scale, int64_t block_rows,
             int64_t block_cols) {
  QUERN_RETURN_IF_ERROR(
      StaticShapes(x, scale, block_rows, block_cols).status());
  Fp8QuantizeSpec spec;
  spec.dtype = x.dtype;
  spec.granularity = Fp8Granularity::kStatic;
  spec.block_rows = block_rows;
  spec.block_cols = block_cols;
  QUERN_ASSIGN_OR_RETURN(Fp8QuantizePlan made, Fp8QuantizePlan::Create(spec));
  const auto plan = std::make_shared<const Fp8QuantizePlan>(std::move(made));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kStatic, t, 3));
    QUERN_RETURN_IF_ERROR(CheckInput(kStatic, "scale", AsScales(t[1]),
                                     DType::kF32, {kAnyExtent, kAnyExtent}));
    const AnyTensorView q = AsMatrix(t[2]);
    QUERN_RETURN_IF_ERROR(CheckOutput(kStatic, "out", q, DType::kF8E4M3,
                                      {kAnyExtent, kAnyExtent}));
    return plan->CheckStaticArgs(AsMatrix(t[0]),
                                 AsScales(t[1]).As<const float, 2>(),
                                 q.As<Float8E4M3, 2>());
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(
        new BoundCalls("scalar", check, [spec](Tensors t, Executor&) {
          const AnyTensorView all = AsMatrix(t[0]), codes = AsMatrix(t[2]);
          for (int64_t r = 0; r < all.extent(0); ++r) {
            const ScalarRow x(all, r), q(codes, r);
            const ScalarRow scales(
                t[1], spec.block_rows == 0 ? 0 : r / spec.block_rows);
            for (int64_t i = 0; i < all.extent(1); ++i) {
              const float s =
                  scales[spec.block_cols == 0 ? 0 : i / spec.block_cols];
              SetFp8(q, i, x[i] * (1.0f / s));
            }
          }
        }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan->target(), check, [plan](Tensors t, Executor& e) {
        plan->ExecuteStatic(AsMatrix(t[0]), AsScales(t[1]).As<const float, 2>(),
                            AsMatrix(t[2]).As<Float8E4M3, 2>(), e);
      }));
}

Metas Int8Shapes(const TensorMeta& x) {
  QUERN_RETURN_IF_ERROR(LastExtent(kInt8, "x", x).status());
  QUERN_ASSIGN_OR_RETURN(const int64_t rows, LeadingRows(kInt8, "x", x));
  return std::vector<TensorMeta>{{DType::kI8, x.extents},
                                 {DType::kF32, {rows}}};
}

// The equation of quant/int8_quantize.h in double.
void NativeInt8(Tensors t) {
  const AnyTensorView tensors[] = {AsMatrix(t[0]), AsMatrix(t[1]), t[2]};
  for (int64_t r = 0; r < tensors[0].extent(0); ++r) {
    const ScalarRow x(tensors[0], r), q(tensors[1], r);
    float max_abs = 0;
    for (int64_t i = 0; i < tensors[0].extent(1); ++i) {
      const float a = std::abs(x[i]);
      if (!(a <= max_abs)) max_abs = std::isnan(max_abs) ? max_abs : a;
    }
    float s = 1;
    if (!std::isfinite(max_abs)) {
      s = std::nanf("");
    } else if (max_abs >= 0x1p-126f) {
      s = std::max(max_abs / 127.0f, Int8QuantizePlan::kMinScale);
    }
    static_cast<float*>(tensors[2].mutable_data())[r] = s;
    const double inverse = static_cast<double>(1.0f / s);
    for (int64_t i = 0; i < tensors[0].extent(1); ++i) {
      q.Set(i, std::isnan(s) ? 0.0f
                             : static_cast<float>(std::nearbyint(
                                   static_cast<double>(x[i]) * inverse)));
    }
  }
}

template <bool kNative>
Bound Int8(const TensorMeta& x) {
  QUERN_RETURN_IF_ERROR(Int8Shapes(x).status());
  Int8QuantizeSpec spec;
  spec.dtype = x.dtype;
  QUERN_ASSIGN_OR_RETURN(Int8QuantizePlan made, Int8QuantizePlan::Create(spec));
  const auto plan = std::make_shared<const Int8QuantizePlan>(std::move(made));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kInt8, t, 3));
    const AnyTensorView q = AsMatrix(t[1]);
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kInt8, "out0", q, DType::kI8, {kAnyExtent, kAnyExtent}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kInt8, "out1", t[2], DType::kF32, {kAnyExtent}));
    return plan->CheckArgs(AsMatrix(t[0]), q.As<int8_t, 2>(),
                           t[2].As<float, 1>(), {});
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check, [](Tensors t, Executor&) { NativeInt8(t); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan->target(), check, [plan](Tensors t, Executor& e) {
        plan->Execute(AsMatrix(t[0]), AsMatrix(t[1]).As<int8_t, 2>(),
                      t[2].As<float, 1>(), {}, e);
      }));
}

NamedArgs ConvertExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}}, {"out_dtype", "f32"}};
}
Metas ConvertShapes(const TensorMeta& x, const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const DType out,
                         DTypeOr(kConvert, "out_dtype", out_dtype, x.dtype));
  return std::vector<TensorMeta>{{out, x.extents}};
}
template <bool kNative>
Bound Convert(const TensorMeta& x, const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> out,
                         ConvertShapes(x, out_dtype));
  QUERN_ASSIGN_OR_RETURN(const int64_t n, LastExtent(kConvert, "x", x));
  constexpr DType kChoices[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kConvert, "x", x.dtype, kChoices));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kConvert, "out_dtype", out[0].dtype, kChoices));
  ConvertSpec spec;
  spec.from = x.dtype;
  spec.to = out[0].dtype;
  spec.stores = Stores::kCached;  // the next operator reads them
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<BoundOp> fast,
                         BindRowPlan(kConvert, ConvertPlan::Create(spec)));
  if (!kNative) return fast;
  return std::unique_ptr<BoundOp>(
      new BoundRowLoop(std::move(fast), {RowOf::kMatrix, RowOf::kMatrix},
                       [n](absl::Span<const ScalarRow> row) {
                         for (int64_t i = 0; i < n; ++i)
                           row[1].Set(i, row[0][i]);
                       }));
}

}  // namespace

absl::Status RegisterQuantOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&DynamicShapes>(
      "quant_fp8(Tensor x, str granularity=\"token\", int group_size=128, "
      "bool ue8m0=False, float scale_ub=0.0) -> (Tensor, Tensor)",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kDynamic, {{}, OpRows::kFirst, "", {{"q", "out0"}, {"scales", "out1"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Dynamic<false>>(kDynamic, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Dynamic<true>>(kDynamic, kReference));
  QUERN_RETURN_IF_ERROR(
      r.Define<&StaticShapes>("static_quant_fp8(Tensor x, Tensor scale, "
                              "int block_rows=0, int block_cols=0) -> Tensor",
                              &StaticExample));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kStatic, {{}, OpRows::kFirst, "", {{"q", "out"}, {"scales", "scale"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Static<false>>(kStatic, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Static<true>>(kStatic, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&Int8Shapes>(
      "quant_int8(Tensor x) -> (Tensor, Tensor)", &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kInt8, {{}, OpRows::kFirst, "", {{"q", "out0"}, {"scales", "out1"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Int8<false>>(kInt8, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Int8<true>>(kInt8, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&ConvertShapes>(
      "convert(Tensor x, str out_dtype) -> Tensor", &ConvertExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kConvert, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Convert<false>>(kConvert, kSimd));
  return r.Add<&Convert<true>>(kConvert, kReference);
}

}  // namespace quern
