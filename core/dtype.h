#ifndef QUERN_CORE_DTYPE_H_
#define QUERN_CORE_DTYPE_H_

// The element types of the library. Public plans take a DType in their spec and
// erase there; below a plan, code is templated on the C++ type.
//
//   DType      C++ type     bits: sign exponent mantissa
//   kF32       float        1 8 23
//   kBF16      BFloat16     1 8 7    the upper half of an f32
//   kF16       Float16      1 5 10
//   kF8E4M3    Float8E4M3   1 4 3    "fn": no infinity, NaN is S.1111.111,
//                                    largest finite 448
//   kF8E5M2    Float8E5M2   1 5 2    IEEE-like: infinity and NaN,
//                                    largest finite 57344
//   kI64, kI32, kI8, kU8     two's complement, unsigned
//
// Conversion between them is in quant/convert.h. OCP 8-bit Floating Point
// Specification 1.0 defines the two 8-bit formats.

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "hwy/base.h"

namespace quern {

// Highway's 16-bit types, so that kernels load them without a cast.
using BFloat16 = hwy::bfloat16_t;
using Float16 = hwy::float16_t;

// Storage only: no arithmetic. Equality is of the bits.
struct Float8E4M3 {
  uint8_t bits;
  friend bool operator==(Float8E4M3 a, Float8E4M3 b) {
    return a.bits == b.bits;
  }
};
struct Float8E5M2 {
  uint8_t bits;
  friend bool operator==(Float8E5M2 a, Float8E5M2 b) {
    return a.bits == b.bits;
  }
};

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kF8E4M3,
  kF8E5M2,
  kI32,
  kI8,
  kU8,
  kI64,
};

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kI8:
    case DType::kU8:
      return 1;
  }
  return 0;
}

// The types that activations come in.
inline constexpr DType kFloatDTypes[] = {DType::kF32, DType::kBF16,
                                         DType::kF16};

// The largest magnitude of a code of one byte that is multiplied with a scale:
// symmetric for i8. 0 for other types.
constexpr float MaxCodeOf(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return 127.0f;
    case DType::kF8E4M3:
      return 448.0f;
    case DType::kF8E5M2:
      return 57344.0f;
    default:
      return 0.0f;
  }
}

// "f32", "bf16", "f16", "f8e4m3", "f8e5m2", "i32", "i8", "u8", "i64".
absl::string_view DTypeName(DType dtype);

// The inverse of DTypeName. InvalidArgument names the text and the choices.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// DTypeOf<T> is the DType of the C++ type T, const or not.
template <typename T>
struct DTypeTraits;
template <>
struct DTypeTraits<float> {
  static constexpr DType kDType = DType::kF32;
};
template <>
struct DTypeTraits<BFloat16> {
  static constexpr DType kDType = DType::kBF16;
};
template <>
struct DTypeTraits<Float16> {
  static constexpr DType kDType = DType::kF16;
};
template <>
struct DTypeTraits<Float8E4M3> {
  static constexpr DType kDType = DType::kF8E4M3;
};
template <>
struct DTypeTraits<Float8E5M2> {
  static constexpr DType kDType = DType::kF8E5M2;
};
template <>
struct DTypeTraits<int64_t> {
  static constexpr DType kDType = DType::kI64;
};
template <>
struct DTypeTraits<int32_t> {
  static constexpr DType kDType = DType::kI32;
};
template <>
struct DTypeTraits<int8_t> {
  static constexpr DType kDType = DType::kI8;
};
template <>
struct DTypeTraits<uint8_t> {
  static constexpr DType kDType = DType::kU8;
};
template <typename T>
struct DTypeTraits<const T> : DTypeTraits<T> {};

template <typename T>
constexpr DType DTypeOf = DTypeTraits<T>::kDType;

}  // namespace quern

#endif  // QUERN_CORE_DTYPE_H_
