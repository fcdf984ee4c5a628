#ifndef QUERN_TESTING_REFERENCE_GEMM_H_
#define QUERN_TESTING_REFERENCE_GEMM_H_

// Matrix products in double. All matrices are dense and row-major. On integers
// the result is exact while it stays below 2^53.

#include <cstdint>
#include <vector>

namespace quern {

// c[m, n] = sum over k of a[m, k] * b[k, n]
std::vector<double> ReferenceGemm(int64_t m, int64_t n, int64_t k,
                                  const std::vector<double>& a,
                                  const std::vector<double>& b);

// y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n] unless bias is empty.
std::vector<double> ReferenceLinear(int64_t m, int64_t n, int64_t k,
                                    const std::vector<double>& x,
                                    const std::vector<double>& w,
                                    const std::vector<double>& bias = {});

// |v|: with it, ReferenceGemm gives sum |a| |b|, from which a bound for each
// element of a product follows: (k * eps_acc) * that.
std::vector<double> Magnitudes(std::vector<double> v);

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_GEMM_H_
