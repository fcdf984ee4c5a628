#ifndef QUERN_TESTING_REFERENCE_GEMM_H_
#define QUERN_TESTING_REFERENCE_GEMM_H_

// Matrix products in double. All matrices are dense and row-major. On integers
// the result is exact while it stays below 2^53.

#include <cmath>
#include <cstdint>
#include <vector>

#include "Eigen/Core"
#include "core/check.h"

namespace quern {

namespace reference_internal {

using Matrix =
    Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline Eigen::Map<const Matrix> AsMatrix(const std::vector<double>& v,
                                         int64_t rows, int64_t cols) {
  QUERN_CHECK(static_cast<int64_t>(v.size()) == rows * cols);
  return Eigen::Map<const Matrix>(v.data(), rows, cols);
}

}  // namespace reference_internal

// c[m, n] = sum over k of a[m, k] * b[k, n]
inline std::vector<double> ReferenceGemm(int64_t m, int64_t n, int64_t k,
                                         const std::vector<double>& a,
                                         const std::vector<double>& b) {
  using reference_internal::AsMatrix;
  const reference_internal::Matrix c = AsMatrix(a, m, k) * AsMatrix(b, k, n);
  return std::vector<double>(c.data(), c.data() + c.size());
}

// y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n] unless bias is empty.
inline std::vector<double> ReferenceLinear(
    int64_t m, int64_t n, int64_t k, const std::vector<double>& x,
    const std::vector<double>& w, const std::vector<double>& bias = {}) {
  using reference_internal::AsMatrix;
  reference_internal::Matrix y =
      AsMatrix(x, m, k) * AsMatrix(w, n, k).transpose();
  if (!bias.empty()) y.rowwise() += AsMatrix(bias, 1, n).row(0);
  return std::vector<double>(y.data(), y.data() + y.size());
}

// |v|: with it, ReferenceGemm gives sum |a| |b|, from which a bound for each
// element of a product follows: (k * eps_acc) * that.
inline std::vector<double> Magnitudes(std::vector<double> v) {
  for (double& x : v) x = std::abs(x);
  return v;
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_GEMM_H_
