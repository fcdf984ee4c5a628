#ifndef QUERN_OPS_NORM_INVERSE_RMS_H_
#define QUERN_OPS_NORM_INVERSE_RMS_H_

// Private to this folder: 1 / rms of a row whose squares were summed in f32.

#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/core/dtype.h"
#include "quern/quant/scalar_convert.h"

namespace quern {

// Returns 1 / sqrt(sum_squares / count + eps). A sum that has overflowed is
// made again in double by sum_again(), so that a row of finite elements is
// normalised however large they are. In f32 the root of an infinite sum would
// turn the row into zeros, which look like numbers. Where 1 / rms is a
// denormal, from an rms of 2^126 on, it has an error of up to 2^-22.
template <typename SumAgain>
float InverseRms(float sum_squares, int64_t count, float eps,
                 const SumAgain& sum_again) {
  if (sum_squares != std::numeric_limits<float>::infinity()) {
    return 1.0f / std::sqrt(sum_squares / static_cast<float>(count) + eps);
  }
  const double mean = sum_again() / static_cast<double>(count);
  return static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(eps)));
}

template <typename T>
double SumSquaresInDouble(const T* row, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto v = static_cast<double>(ToF32(row[i]));
    sum += v * v;
  }
  return sum;
}

// Like the other SumSquaresInDouble, of `count` elements of f32, bf16 or f16 at
// `row`.
inline double SumSquaresInDouble(DType dtype, const void* row, int64_t count) {
  if (dtype == DType::kF32) {
    return SumSquaresInDouble(static_cast<const float*>(row), count);
  }
  if (dtype == DType::kBF16) {
    return SumSquaresInDouble(static_cast<const BFloat16*>(row), count);
  }
  return SumSquaresInDouble(static_cast<const Float16*>(row), count);
}

// Like the other InverseRms, of `count` elements of f32, bf16 or f16 at `row`.
inline float InverseRms(float sum_squares, int64_t count, float eps,
                        DType dtype, const void* row) {
  return InverseRms(sum_squares, count, eps,
                    [=] { return SumSquaresInDouble(dtype, row, count); });
}

}  // namespace quern

#endif  // QUERN_OPS_NORM_INVERSE_RMS_H_
