#ifndef QUERN_CORE_MATH_UTIL_H_
#define QUERN_CORE_MATH_UTIL_H_

// Integer arithmetic on sizes. The checked forms are for Create and Build,
// where a size comes from outside; they report overflow instead of wrapping.

#include <cstdint>

namespace quern {

// ceil(a / b) for a >= 0, b >= 1, without forming a + b - 1.
constexpr int64_t DivCeil(int64_t a, int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

// The smallest multiple of b that is >= a. The caller knows that it fits.
constexpr int64_t RoundUp(int64_t a, int64_t b) { return DivCeil(a, b) * b; }

// *product = a * b. False, and *product unspecified, if that overflows.
inline bool CheckedMul(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

// *sum = a + b. False, and *sum unspecified, if that overflows.
inline bool CheckedAdd(int64_t a, int64_t b, int64_t* sum) {
  return !__builtin_add_overflow(a, b, sum);
}

}  // namespace quern

#endif  // QUERN_CORE_MATH_UTIL_H_
