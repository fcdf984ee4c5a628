#include "quern/testing/reference_convert.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quern {

double Decode(FloatFormat f, uint32_t code) {
  const double sign = (code & f.sign_bit()) != 0 ? -1.0 : 1.0;
  const uint32_t magnitude = code & (f.sign_bit() - 1);
  if (magnitude > f.max_finite()) {
    return f.has_infinity && magnitude == f.infinity()
               ? sign * std::numeric_limits<double>::infinity()
               : std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
  }
  const auto biased = static_cast<int>(magnitude >> f.mantissa_bits);
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  const uint32_t whole =
      biased > 0 ? mantissa | 1u << f.mantissa_bits : mantissa;
  const int exponent = f.min_exponent() + std::max(biased, 1) - 1;
  return sign *
         std::ldexp(static_cast<double>(whole), exponent - f.mantissa_bits);
}

uint32_t Encode(FloatFormat f, double x, Overflow overflow) {
  const uint32_t sign = std::signbit(x) ? f.sign_bit() : 0;
  if (std::isnan(x)) return sign | f.nan();
  const uint32_t beyond = overflow == Overflow::kSaturate ? f.max_finite()
                          : f.has_infinity                ? f.infinity()
                                                          : f.nan();
  if (std::isinf(x)) return sign | beyond;
  const double magnitude = std::abs(x);
  const int exponent = magnitude == 0.0
                           ? f.min_exponent()
                           : std::max(std::ilogb(magnitude), f.min_exponent());
  // Scaling by a power of two is exact; nearbyint rounds ties to even.
  const auto quanta = static_cast<uint64_t>(
      std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent)));
  // The implicit bit of a normal number, and a carry, add one to the exponent.
  const uint64_t code =
      (static_cast<uint64_t>(exponent - f.min_exponent()) << f.mantissa_bits) +
      quanta;
  return sign | (code > f.max_finite() ? beyond : static_cast<uint32_t>(code));
}

}  // namespace quern
