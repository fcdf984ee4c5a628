#ifndef QUERN_QUANT_SCALAR_CONVERT_H_
#define QUERN_QUANT_SCALAR_CONVERT_H_

// One value at a time: what quant/convert.h does to many, with the same rules
// and the same bits. Integer arithmetic only, so the result does not depend on
// the processor's rounding or flush-to-zero modes. For readers of files,
// references and tests; loops belong to ConvertPlan.

#include <cstdint>

#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/quant/float_format.h"

namespace quern {
namespace quant_internal {

// The code of T nearest to the f32 with these bits, ties to even.
template <typename T>
constexpr uint32_t EncodeBits(uint32_t f32_bits, OverflowMode overflow) {
  using F = FloatFormat<T>;
  constexpr int kDropped = 23 - F::kMantissaBits;
  const uint32_t sign = (f32_bits >> 31)
                        << (F::kExponentBits + F::kMantissaBits);
  uint32_t abs = f32_bits & 0x7FFFFFFFu;
  if (abs > kF32Infinity) {
    const uint32_t payload =
        F::kHasInfinity ? (abs >> kDropped) & (F::kQuiet * 2 - 1) : 0;
    return sign | F::kOverflow | F::kQuiet | payload;
  }
  const uint32_t clamp = ClampF32Bits<T>(overflow);
  if (abs > clamp) abs = clamp;
  if (abs == kF32Infinity) return sign | F::kOverflow;

  // value = significand * 2^(exponent - 127 - 23)
  const bool normal = (abs >> 23) != 0;
  const uint32_t significand = (abs & 0x7FFFFFu) | (normal ? 0x800000u : 0u);
  const int exponent = (normal ? static_cast<int>(abs >> 23) : 1) - 127;
  // Below the smallest normal value of T, every halving drops one bit more.
  const int field = exponent + F::kBias;
  const int shift = kDropped + (field < 1 ? 1 - field : 0);
  if (shift > 25) return sign;  // less than half of the smallest value
  uint32_t code = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  if (rest > half || (rest == half && (code & 1) != 0)) ++code;
  // The hidden bit, or a carry out of the mantissa, counts into the exponent.
  if (field > 1) code += static_cast<uint32_t>(field - 1) << F::kMantissaBits;
  return sign | (code < F::kOverflow ? code : F::kOverflow);
}

// The f32 bits of a code of T: exact.
template <typename T>
constexpr uint32_t DecodeBits(uint32_t code) {
  using F = FloatFormat<T>;
  constexpr int kAdded = 23 - F::kMantissaBits;
  if (F::kExponentBits == 8) return code << kAdded;  // bf16, NaN untouched
  const uint32_t sign = (code & F::kSign) != 0 ? 0x80000000u : 0u;
  const uint32_t abs = code & (F::kSign - 1);
  if (abs > F::kMaxFinite) {
    if (F::kHasInfinity && abs == F::kOverflow) return sign | kF32Infinity;
    return sign | kF32Infinity | kF32Quiet |
           (F::kHasInfinity ? (abs << kAdded) & 0x7FFFFFu : 0);
  }
  uint32_t mantissa = abs & ((1u << F::kMantissaBits) - 1);
  int field = static_cast<int>(abs >> F::kMantissaBits);
  if (field == 0) {
    if (mantissa == 0) return sign;
    for (field = 1; (mantissa >> F::kMantissaBits) == 0; --field) mantissa *= 2;
    mantissa &= (1u << F::kMantissaBits) - 1;
  }
  return sign | static_cast<uint32_t>(field + 127 - F::kBias) << 23 |
         mantissa << kAdded;
}

}  // namespace quant_internal

// Overloads, so that code templated on the element type reads the same for
// each. Not named as Highway's functions: argument-dependent lookup finds both.
inline float ToF32(float x) { return x; }
inline float ToF32(BFloat16 x) {
  const uint32_t code = hwy::BitCastScalar<uint16_t>(x);
  return hwy::BitCastScalar<float>(quant_internal::DecodeBits<BFloat16>(code));
}
inline float ToF32(Float16 x) {
  const uint32_t code = hwy::BitCastScalar<uint16_t>(x);
  return hwy::BitCastScalar<float>(quant_internal::DecodeBits<Float16>(code));
}
inline float ToF32(Float8E4M3 x) {
  return hwy::BitCastScalar<float>(
      quant_internal::DecodeBits<Float8E4M3>(x.bits));
}
inline float ToF32(Float8E5M2 x) {
  return hwy::BitCastScalar<float>(
      quant_internal::DecodeBits<Float8E5M2>(x.bits));
}

// FromF32<BFloat16>(x), FromF32<Float16>(x), FromF32<Float8E4M3>(x),
// FromF32<Float8E5M2>(x), FromF32<float>(x).
template <typename T>
inline T FromF32(float x, OverflowMode overflow = OverflowMode::kIeee) {
  if constexpr (hwy::IsSame<T, float>()) {
    return x;
  } else {
    const uint32_t code = quant_internal::EncodeBits<T>(
        hwy::BitCastScalar<uint32_t>(x), overflow);
    if constexpr (sizeof(T) == 2) {
      return T::FromBits(static_cast<uint16_t>(code));
    } else {
      return T{static_cast<uint8_t>(code)};
    }
  }
}

}  // namespace quern

#endif  // QUERN_QUANT_SCALAR_CONVERT_H_
