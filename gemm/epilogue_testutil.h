#ifndef QUERN_GEMM_EPILOGUE_TESTUTIL_H_
#define QUERN_GEMM_EPILOGUE_TESTUTIL_H_

// The activations of gemm/epilogue.h in double, and the bounds that the header
// promises.

#include <algorithm>
#include <cmath>
#include <limits>

#include "gemm/epilogue.h"
#include "testing/reference_activation.h"

namespace quern {

inline constexpr double kUnit = 1.0 / (1 << 24);
inline const double kDenormal = 140 * std::ldexp(1.0, -149);

inline double GeluTanhArgument(double v) {
  return 2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
}

inline double Activated(LinearActivation act, double v) {
  if (act == LinearActivation::kNone) return v;
  if (v == -std::numeric_limits<double>::infinity()) return -0.0;
  switch (act) {
    case LinearActivation::kSilu:
    case LinearActivation::kSiluAndMul:
      return ReferenceSilu(v);
    case LinearActivation::kGelu:
    case LinearActivation::kGeluAndMul:
      return ReferenceGelu(v);
    default:
      // ReferenceGeluTanh cancels where v is far below zero.
      return v / (1 + std::exp(-GeluTanhArgument(v)));
  }
}

// The header's, relative.
inline double BoundOf(LinearActivation act, double v) {
  switch (act) {
    case LinearActivation::kNone:
      return 0;
    case LinearActivation::kSilu:
    case LinearActivation::kSiluAndMul:
      return 10 * kUnit;
    case LinearActivation::kGelu:
    case LinearActivation::kGeluAndMul:
      return (16 + std::min(v * v / 2, 110.0)) * kUnit;
    default:
      return (10 + 4 * std::min(std::abs(GeluTanhArgument(v)), 110.0)) * kUnit;
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_EPILOGUE_TESTUTIL_H_
