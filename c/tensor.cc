#include "quern/c/tensor.h"

#include <cstddef>
#include <limits>
#include <new>
#include <optional>

#include "absl/strings/str_cat.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {
namespace {

// The layout of DLPack's DLTensor on a 64-bit CPU.
static_assert(sizeof(quern_tensor) == 48 && offsetof(quern_tensor, data) == 0 &&
              offsetof(quern_tensor, device) == 8 &&
              offsetof(quern_tensor, ndim) == 16 &&
              offsetof(quern_tensor, dtype) == 20 &&
              offsetof(quern_tensor, shape) == 24 &&
              offsetof(quern_tensor, strides) == 32 &&
              offsetof(quern_tensor, byte_offset) == 40);
static_assert(sizeof(quern_device) == 8 && sizeof(quern_dtype) == 4 &&
              offsetof(quern_device, device_id) == 4 &&
              offsetof(quern_dtype, bits) == 1 &&
              offsetof(quern_dtype, lanes) == 2);
// Layouts that quern.h promises never to change.
static_assert(sizeof(quern_argument) == 24 &&
              offsetof(quern_argument, type) == 8 &&
              offsetof(quern_argument, value) == 16);
static_assert(sizeof(quern_operand) == 24 &&
              offsetof(quern_operand, tensor) == 8 &&
              offsetof(quern_operand, flags) == 16);

constexpr uint32_t Key(uint32_t code, uint32_t bits) {
  return code << 8 | bits;
}

std::optional<DType> FromC(quern_dtype dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  switch (Key(dtype.code, dtype.bits)) {
    case Key(QUERN_CODE_FLOAT, 32):
      return DType::kF32;
    case Key(QUERN_CODE_BFLOAT, 16):
      return DType::kBF16;
    case Key(QUERN_CODE_FLOAT, 16):
      return DType::kF16;
    case Key(QUERN_CODE_FLOAT8_E4M3FN, 8):
      return DType::kF8E4M3;
    case Key(QUERN_CODE_FLOAT8_E5M2, 8):
      return DType::kF8E5M2;
    case Key(QUERN_CODE_INT, 8):
      return DType::kI8;
    case Key(QUERN_CODE_INT, 32):
      return DType::kI32;
    case Key(QUERN_CODE_INT, 64):
      return DType::kI64;
    case Key(QUERN_CODE_UINT, 8):
    case Key(QUERN_CODE_BOOL, 8):
      return DType::kU8;
    default:
      return std::nullopt;
  }
}

absl::Status WrongDType(absl::string_view op, absl::string_view name,
                        quern_dtype dtype) {
  return Unimplemented(
      op, name, " has DLPack type code ", int{dtype.code}, ", ",
      int{dtype.bits}, " bits, ", dtype.lanes,
      " lanes; need one lane of i8, i32, i64, u8, f16, f32, bf16, f8e4m3fn "
      "or f8e5m2");
}

absl::Status CheckShape(absl::string_view op, absl::string_view name,
                        const quern_tensor& tensor) {
  if (tensor.ndim < 1 || tensor.ndim > AnyTensorView::kMaxRank) {
    return InvalidArgument(op, name, " has ndim=", tensor.ndim, "; need 1 to ",
                           AnyTensorView::kMaxRank);
  }
  if (tensor.shape == nullptr) {
    return InvalidArgument(op, name, " has a null shape");
  }
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] >= 0) continue;
    return InvalidArgument(op, name, " has shape[", d, "]=", tensor.shape[d],
                           "; need 0 or more");
  }
  return absl::OkStatus();
}

absl::Status SetStrides(absl::string_view op, absl::string_view name,
                        const quern_tensor& tensor,
                        AnyTensorView::Dims& strides) {
  if (tensor.strides != nullptr) {
    for (int32_t d = 0; d < tensor.ndim; ++d) {
      strides[static_cast<size_t>(d)] = tensor.strides[d];
      if (tensor.strides[d] >= 0 || tensor.shape[d] <= 1) continue;
      return InvalidArgument(op, name, " has strides[", d,
                             "]=", tensor.strides[d], "; need 0 or more");
    }
    return absl::OkStatus();
  }
  int64_t stride = 1;
  for (int32_t d = tensor.ndim; d-- > 0;) {
    strides[static_cast<size_t>(d)] = stride;
    const int64_t extent = tensor.shape[d] == 0 ? 1 : tensor.shape[d];
    if (!CheckedMul(stride, extent, &stride)) {
      return InvalidArgument(op, name, " has a shape of 2^63 elements or more");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlace(absl::string_view op, absl::string_view name,
                        const quern_tensor& tensor, uint64_t flags) {
  if (tensor.device.device_type != QUERN_CPU) {
    return InvalidArgument(op, name,
                           " has device_type=", tensor.device.device_type,
                           "; need ", int{QUERN_CPU}, ", the CPU");
  }
  if ((flags & ~uint64_t{QUERN_READ_ONLY}) != 0) {
    return InvalidArgument(op, name, " has flags=", flags, "; need 0 or ",
                           int{QUERN_READ_ONLY}, ", read-only");
  }
  if (tensor.byte_offset == 0) return absl::OkStatus();
  if (tensor.data == nullptr) {
    return InvalidArgument(op, name, " has byte_offset=", tensor.byte_offset,
                           " and null data");
  }
  const auto base = reinterpret_cast<uintptr_t>(tensor.data);
  if (tensor.byte_offset > std::numeric_limits<uintptr_t>::max() - base) {
    return InvalidArgument(op, name, " has byte_offset=", tensor.byte_offset,
                           ", which is beyond the address space");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TensorMeta> MetaOf(absl::string_view op, absl::string_view name,
                                  const quern_tensor& tensor) {
  QUERN_RETURN_IF_ERROR(CheckShape(op, name, tensor));
  const std::optional<DType> dtype = FromC(tensor.dtype);
  if (!dtype.has_value()) return WrongDType(op, name, tensor.dtype);
  return TensorMeta{*dtype, {tensor.shape, tensor.shape + tensor.ndim}};
}

absl::Status SetView(absl::string_view op, absl::string_view name,
                     const quern_tensor& tensor, uint64_t flags,
                     AnyTensorView& view) {
  QUERN_RETURN_IF_ERROR(CheckShape(op, name, tensor));
  const std::optional<DType> dtype = FromC(tensor.dtype);
  if (!dtype.has_value()) return WrongDType(op, name, tensor.dtype);
  QUERN_RETURN_IF_ERROR(CheckPlace(op, name, tensor, flags));
  AnyTensorView::Dims extents, strides;  // the first tensor.ndim are set
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    extents[static_cast<size_t>(d)] = tensor.shape[d];
  }
  QUERN_RETURN_IF_ERROR(SetStrides(op, name, tensor, strides));
  void* const data =
      reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tensor.data) +
                              static_cast<uintptr_t>(tensor.byte_offset));
  // In its place: a copy would wait for the numbers that were just stored.
  if ((flags & QUERN_READ_ONLY) != 0) {
    new (&view) AnyTensorView(*dtype, static_cast<const void*>(data),
                              tensor.ndim, extents, strides);
  } else {
    new (&view) AnyTensorView(*dtype, data, tensor.ndim, extents, strides);
  }
  return absl::OkStatus();
}

quern_dtype ToC(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return quern_dtype_of(QUERN_CODE_FLOAT, 32);
    case DType::kBF16:
      return quern_dtype_of(QUERN_CODE_BFLOAT, 16);
    case DType::kF16:
      return quern_dtype_of(QUERN_CODE_FLOAT, 16);
    case DType::kF8E4M3:
      return quern_dtype_of(QUERN_CODE_FLOAT8_E4M3FN, 8);
    case DType::kF8E5M2:
      return quern_dtype_of(QUERN_CODE_FLOAT8_E5M2, 8);
    case DType::kI32:
      return quern_dtype_of(QUERN_CODE_INT, 32);
    case DType::kI8:
      return quern_dtype_of(QUERN_CODE_INT, 8);
    case DType::kU8:
      return quern_dtype_of(QUERN_CODE_UINT, 8);
    case DType::kI64:
      return quern_dtype_of(QUERN_CODE_INT, 64);
  }
  return quern_dtype_of(0, 0);
}

}  // namespace c_abi
}  // namespace quern
