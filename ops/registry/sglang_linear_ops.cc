#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang_ops.h"
#include "quern/ops/registry/sglang_product.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kLinear[] = "weight_packed_linear";
constexpr char kInt8[] = "int8_scaled_mm_cpu";
constexpr char kInt8Quant[] = "int8_scaled_mm_with_quant";
constexpr char kFp8[] = "fp8_scaled_mm_cpu";

absl::Status CheckScales(const SglangProduct& r, const TensorMeta& scales) {
  if (scales.dtype == DType::kF32 &&
      (scales.extents == std::vector<int64_t>{1} ||
       scales.extents == std::vector<int64_t>{r.weights.n})) {
    return absl::OkStatus();
  }
  return InvalidArgument(r.op, "scales2 is not f32[", r.weights.n,
                         "] or f32[1]");
}

absl::StatusOr<SglangProduct> LinearRequest(const TensorMeta& mat1,
                                            const TensorMeta& mat2,
                                            const MaybeMeta& bias,
                                            bool is_vnni) {
  SglangProduct r;
  r.op = kLinear;
  r.x = mat1;
  r.w = mat2;
  r.bias = bias;
  r.packed = is_vnni;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(r.op, "mat2", mat2.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(r.op, "mat1", mat1.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  r.weights.format = FormatOfFloats(mat2.dtype);
  QUERN_RETURN_IF_ERROR(CompleteProduct(r, ""));
  return r;
}
absl::StatusOr<SglangProduct> Int8Request(
    const TensorMeta& mat1, const TensorMeta& mat2, const TensorMeta& scales1,
    const TensorMeta& scales2, const MaybeMeta& bias,
    const std::string& out_dtype, bool is_vnni) {
  SglangProduct r;
  r.op = kInt8;
  r.x = mat1;
  r.w = mat2;
  r.x_scales = scales1;
  r.w_scales = scales2;
  r.bias = bias;
  r.packed = is_vnni;
  QUERN_RETURN_IF_ERROR(CheckDType(r.op, "mat1", mat1.dtype, DType::kU8));
  QUERN_RETURN_IF_ERROR(CheckDType(r.op, "mat2", mat2.dtype, DType::kI8));
  r.weights.format = WeightFormat::kI8Channel;
  if (out_dtype.empty()) {
    return InvalidArgument(r.op, "out_dtype is empty; need f32, bf16 or f16");
  }
  QUERN_RETURN_IF_ERROR(CompleteProduct(r, out_dtype));
  QUERN_ASSIGN_OR_RETURN(const int64_t rows, LeadingRows(r.op, "mat1", mat1));
  if (!(scales1 == TensorMeta{DType::kF32, {rows}})) {
    return InvalidArgument(r.op, "scales1 is not f32[", rows,
                           "], one for each row of mat1");
  }
  QUERN_RETURN_IF_ERROR(CheckScales(r, scales2));
  return r;
}
absl::StatusOr<SglangProduct> Int8QuantRequest(
    const TensorMeta& mat1, const TensorMeta& mat2, const TensorMeta& scales2,
    const MaybeMeta& bias, const std::string& out_dtype, bool is_vnni) {
  SglangProduct r;
  r.op = kInt8Quant;
  r.x = mat1;
  r.w = mat2;
  r.w_scales = scales2;
  r.bias = bias;
  r.packed = is_vnni;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(r.op, "mat1", mat1.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckDType(r.op, "mat2", mat2.dtype, DType::kI8));
  r.weights.format = WeightFormat::kI8Channel;
  QUERN_RETURN_IF_ERROR(CompleteProduct(r, out_dtype));
  QUERN_RETURN_IF_ERROR(CheckScales(r, scales2));
  return r;
}
absl::StatusOr<SglangProduct> Fp8Request(
    const TensorMeta& mat1, const TensorMeta& mat2, const TensorMeta& scales2,
    int64_t block_n, int64_t block_k, const MaybeMeta& bias,
    const std::string& out_dtype, bool is_vnni) {
  SglangProduct r;
  r.op = kFp8;
  r.x = mat1;
  r.w = mat2;
  r.w_scales = scales2;
  r.bias = bias;
  r.packed = is_vnni;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(r.op, "mat1", mat1.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckDType(r.op, "mat2", mat2.dtype, DType::kF8E4M3));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(r.op, "block_n", block_n, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(r.op, "block_k", block_k, 1));
  r.weights.format = WeightFormat::kE4M3Block;
  r.weights.group_size = block_k;
  r.block_n = block_n;
  QUERN_RETURN_IF_ERROR(CompleteProduct(r, out_dtype));
  const TensorMeta want = {
      DType::kF32,
      {DivCeil(r.weights.n, block_n), DivCeil(r.weights.k, block_k)}};
  if (scales2 == want) return r;
  return InvalidArgument(r.op, "scales2 is not f32[", want.extents[0], ", ",
                         want.extents[1], "], one for each block");
}

// The functions that a registry needs for an operator described by kRequest.
template <auto kRequest>
struct OpOf;
template <class... A, absl::StatusOr<SglangProduct> (*kRequest)(A...)>
struct OpOf<kRequest> {
  static Metas Shapes(A... args) {
    QUERN_ASSIGN_OR_RETURN(const SglangProduct r, kRequest(args...));
    return std::vector<TensorMeta>{r.out};
  }
  template <LinearProvider kProvider>
  static Bound Make(A... args) {
    QUERN_ASSIGN_OR_RETURN(const SglangProduct r, kRequest(args...));
    return BindSglangProduct(r, kProvider);
  }
};

template <auto kRequest>
absl::Status Register(OpRegistry& r, absl::string_view op,
                      absl::string_view params, OpExample example) {
  using Op = OpOf<kRequest>;
  QUERN_RETURN_IF_ERROR(r.Define<&Op::Shapes>(
      absl::StrCat(op, "(", params, ") -> Tensor"), example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(op, {{}, OpRows::kLeading}));
  QUERN_RETURN_IF_ERROR(
      (r.Add<&Op::template Make<LinearProvider::kSimd>>(op, "simd")));
  QUERN_RETURN_IF_ERROR(
      (r.Add<&Op::template Make<LinearProvider::kOneDnn>>(op, "onednn")));
  return r.Add<&Op::template Make<LinearProvider::kReference>>(
      op, OpRegistry::kReference);
}

NamedArgs LinearExample(DType dtype) {
  return {{"mat1", TensorMeta{dtype, {4, 64}}},
          {"mat2", TensorMeta{dtype, {32, 64}}},
          {"bias", TensorMeta{DType::kF32, {32}}},
          {"is_vnni", false}};
}
NamedArgs Int8Example(DType dtype) {
  return {{"mat1", TensorMeta{DType::kU8, {4, 64}}},
          {"mat2", TensorMeta{DType::kI8, {32, 64}}},
          {"scales1", TensorMeta{DType::kF32, {4}}},
          {"scales2", TensorMeta{DType::kF32, {32}}},
          {"out_dtype", DTypeName(dtype)},
          {"is_vnni", false}};
}
NamedArgs Int8QuantExample(DType dtype) {
  return {{"mat1", TensorMeta{dtype, {4, 64}}},
          {"mat2", TensorMeta{DType::kI8, {32, 64}}},
          {"scales2", TensorMeta{DType::kF32, {32}}},
          {"is_vnni", false}};
}
NamedArgs Fp8Example(DType dtype) {
  return {{"mat1", TensorMeta{dtype, {4, 64}}},
          {"mat2", TensorMeta{DType::kF8E4M3, {32, 64}}},
          {"scales2", TensorMeta{DType::kF32, {1, 1}}},
          {"block_n", 128},
          {"block_k", 128},
          {"is_vnni", false}};
}

}  // namespace

absl::Status RegisterSglangLinearOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(Register<&LinearRequest>(
      r, kLinear, "Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni",
      &LinearExample));
  QUERN_RETURN_IF_ERROR(Register<&Int8Request>(
      r, kInt8,
      "Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, "
      "Tensor? bias, str out_dtype, bool is_vnni",
      &Int8Example));
  QUERN_RETURN_IF_ERROR(Register<&Int8QuantRequest>(
      r, kInt8Quant,
      "Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
      "str out_dtype=\"\", bool is_vnni",
      &Int8QuantExample));
  return Register<&Fp8Request>(
      r, kFp8,
      "Tensor mat1, Tensor mat2, Tensor scales2, int block_n, int block_k, "
      "Tensor? bias, str out_dtype=\"\", bool is_vnni",
      &Fp8Example);
}

}  // namespace quern
