#ifndef QUERN_TESTING_REFERENCE_CONVERT_H_
#define QUERN_TESTING_REFERENCE_CONVERT_H_

// Every element type as a formula, in double. For a code with sign s, biased
// exponent b and mantissa m of `mantissa_bits` bits, bias = 2^(eb - 1) - 1:
//
//   b > 0:   (-1)^s * 2^(b - bias) * (1 + m / 2^mantissa_bits)
//   b == 0:  (-1)^s * 2^(1 - bias) * (m / 2^mantissa_bits)
//   b all ones: infinity (m == 0) or NaN; in e4m3fn only b and m all ones is
//   NaN, and there is no infinity.
//
// Encoding rounds to nearest, ties to even, exactly.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "quern/core/dtype.h"

namespace quern {

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;

  int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }
  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t infinity() const {  // b all ones; not an infinity in e4m3fn
    return ((1u << exponent_bits) - 1) << mantissa_bits;
  }
  uint32_t nan() const {
    return has_infinity ? infinity() | (1u << (mantissa_bits - 1))
                        : sign_bit() - 1;
  }
  uint32_t max_finite() const {
    return has_infinity ? infinity() - 1 : sign_bit() - 2;
  }
};

// {0, 0, false} for integers.
template <typename T>
constexpr FloatFormat FormatOf() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>) return {8, 23, true};
  if constexpr (std::is_same_v<U, BFloat16>) return {8, 7, true};
  if constexpr (std::is_same_v<U, Float16>) return {5, 10, true};
  if constexpr (std::is_same_v<U, Float8E4M3>) return {4, 3, false};
  if constexpr (std::is_same_v<U, Float8E5M2>) return {5, 2, true};
  return {0, 0, false};
}

// One of the storage types above (double is not: it is the reference).
template <typename T>
constexpr bool IsFloatStorage = FormatOf<T>().exponent_bits != 0;

// What becomes of a value beyond the largest finite one, infinity included.
enum class Overflow {
  kInfinity,  // IEEE 754: infinity; NaN in e4m3fn, which has none
  kSaturate,  // the largest finite value
};

double Decode(FloatFormat f, uint32_t code);

uint32_t Encode(FloatFormat f, double x,
                Overflow overflow = Overflow::kInfinity);

// The bits of a storage type as a number, and back.
template <typename T>
uint32_t BitsOf(T x) {
  static_assert(sizeof(T) <= sizeof(uint32_t), "an element type");
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));  // little endian, as all of this library
  return bits;
}
template <typename T>
T FromBits(uint32_t bits) {
  static_assert(sizeof(T) <= sizeof(uint32_t), "an element type");
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

// The value of an element of any type.
template <typename T>
double ToDouble(T x) {
  if constexpr (IsFloatStorage<T>) {
    return Decode(FormatOf<T>(), BitsOf(x));
  } else {
    return static_cast<double>(x);
  }
}

// The element of type T nearest to x. Integers saturate; NaN is 0 there.
template <typename T>
T FromDouble(double x, Overflow overflow = Overflow::kInfinity) {
  if constexpr (IsFloatStorage<T>) {
    return FromBits<T>(Encode(FormatOf<T>(), x, overflow));
  } else if constexpr (std::is_integral_v<T>) {
    if (std::isnan(x)) return 0;
    return static_cast<T>(
        std::clamp(std::nearbyint(x),
                   static_cast<double>(std::numeric_limits<T>::lowest()),
                   static_cast<double>(std::numeric_limits<T>::max())));
  } else {
    static_assert(std::is_same_v<T, double>, "an element type or double");
    return x;
  }
}

// Bound on |FromDouble<T>(x) - x| where the result is finite: half a unit in
// the last place, which below the normal numbers stops shrinking.
template <typename T>
double RoundingBound(double x) {
  constexpr FloatFormat f = FormatOf<T>();
  static_assert(f.exponent_bits != 0, "a floating-point storage type");
  const int exponent =
      x == 0.0 ? f.min_exponent() : std::max(std::ilogb(x), f.min_exponent());
  return std::ldexp(0.5, exponent - f.mantissa_bits);
}

// The unit roundoff: |FromDouble<T>(x) - x| <= UnitRoundoff<T>() * |x| for x in
// the normal range.
template <typename T>
double UnitRoundoff() {
  if constexpr (std::is_integral_v<T>) {
    return 0.0;
  } else {
    return std::ldexp(0.5, -FormatOf<T>().mantissa_bits);
  }
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_CONVERT_H_
