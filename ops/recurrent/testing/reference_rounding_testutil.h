#ifndef QUERN_OPS_RECURRENT_TESTING_REFERENCE_ROUNDING_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_REFERENCE_ROUNDING_TESTUTIL_H_

#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// RoundingBound<T>(x) for the type T of dtype: f32, bf16 or f16.
inline double RoundingBoundOf(DType dtype, double x) {
  if (dtype == DType::kBF16) return RoundingBound<BFloat16>(x);
  if (dtype == DType::kF16) return RoundingBound<Float16>(x);
  return RoundingBound<float>(x);
}

// FromDouble<T>(x) for the type T of dtype, as a double.
inline double NearestOf(DType dtype, double x) {
  if (dtype == DType::kBF16) return ToDouble(FromDouble<BFloat16>(x));
  if (dtype == DType::kF16) return ToDouble(FromDouble<Float16>(x));
  return ToDouble(FromDouble<float>(x));
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_REFERENCE_ROUNDING_TESTUTIL_H_
