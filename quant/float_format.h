#ifndef QUERN_QUANT_FLOAT_FORMAT_H_
#define QUERN_QUANT_FLOAT_FORMAT_H_

// The narrow floating-point formats as numbers, and what a value too large for
// one becomes. The rules are in quant/convert.h.

#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

// What an infinity, and a finite value that rounds beyond the largest finite
// one, become. NaN stays NaN in both.
enum class OverflowMode : uint8_t {
  kIeee,      // infinity; NaN in f8e4m3, which has no infinity
  kSaturate,  // the largest finite value, with the sign of the input
};

namespace quant_internal {

// A value is  sign * 2^(exponent - kBias) * 1.mantissa, or for exponent 0
// sign * 2^(1 - kBias) * 0.mantissa. Codes below are without the sign bit.
template <int kExponent, int kMantissa, bool kInfinity>
struct FloatFormatOf {
  static constexpr int kExponentBits = kExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr bool kHasInfinity = kInfinity;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  static constexpr uint32_t kQuiet = kInfinity ? 1u << (kMantissa - 1) : 0;
  // What an overflow becomes in kIeee.
  static constexpr uint32_t kOverflow =
      kInfinity ? ((1u << kExponent) - 1) << kMantissa : kSign - 1;
  static constexpr uint32_t kMaxFinite = kOverflow - 1;
  // The f32 bits of a code, read as a finite normal value: the fields move, the
  // bias changes.
  static constexpr uint32_t AsF32(uint32_t code) {
    return (code << (23 - kMantissa)) +
           (static_cast<uint32_t>(127 - kBias) << 23);
  }
};

template <typename T>
struct FloatFormat;
template <>
struct FloatFormat<BFloat16> : FloatFormatOf<8, 7, true> {};
template <>
struct FloatFormat<Float16> : FloatFormatOf<5, 10, true> {};
template <>
struct FloatFormat<Float8E4M3> : FloatFormatOf<4, 3, false> {};
template <>
struct FloatFormat<Float8E5M2> : FloatFormatOf<5, 2, true> {};

constexpr uint32_t kF32Infinity = 0x7F800000u;
constexpr uint32_t kF32Quiet = 0x00400000u;

// Before it is rounded, |x| is replaced by the smaller of |x| and this: the
// largest finite value, or the one that would follow it, whose code is
// kOverflow.
template <typename T>
constexpr uint32_t ClampF32Bits(OverflowMode overflow) {
  using F = FloatFormat<T>;
  return F::AsF32(overflow == OverflowMode::kSaturate ? F::kMaxFinite
                                                      : F::kOverflow);
}

}  // namespace quant_internal
}  // namespace quern

#endif  // QUERN_QUANT_FLOAT_FORMAT_H_
