#include "quern/testing/reference_gemm.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "Eigen/Core"
#include "quern/core/check.h"

namespace quern {
namespace {

using Matrix =
    Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const Matrix> AsMatrix(const std::vector<double>& v, int64_t rows,
                                  int64_t cols) {
  QUERN_CHECK(static_cast<int64_t>(v.size()) == rows * cols);
  return Eigen::Map<const Matrix>(v.data(), rows, cols);
}

}  // namespace

std::vector<double> ReferenceGemm(int64_t m, int64_t n, int64_t k,
                                  const std::vector<double>& a,
                                  const std::vector<double>& b) {
  const Matrix c = AsMatrix(a, m, k) * AsMatrix(b, k, n);
  return std::vector<double>(c.data(), c.data() + c.size());
}

std::vector<double> ReferenceLinear(int64_t m, int64_t n, int64_t k,
                                    const std::vector<double>& x,
                                    const std::vector<double>& w,
                                    const std::vector<double>& bias) {
  Matrix y = AsMatrix(x, m, k) * AsMatrix(w, n, k).transpose();
  if (!bias.empty()) y.rowwise() += AsMatrix(bias, 1, n).row(0);
  return std::vector<double>(y.data(), y.data() + y.size());
}

std::vector<double> Magnitudes(std::vector<double> v) {
  for (double& x : v) x = std::abs(x);
  return v;
}

}  // namespace quern
