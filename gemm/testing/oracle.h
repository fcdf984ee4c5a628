#ifndef QUERN_GEMM_TESTING_ORACLE_H_
#define QUERN_GEMM_TESTING_ORACLE_H_

// Linear layers on known weights in double, and how far from them gemm/linear.h
// allows a result to be.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

// What belongs to the rows of an a that is i8.
struct RowTerms {
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

// scale * (q - zero point), row by row.
inline std::vector<double> Dequantised(const std::vector<int8_t>& q,
                                       const RowTerms& rows) {
  std::vector<double> a = ToDoubles(q);
  const size_t k = a.size() / rows.scales.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (!rows.zero_points.empty()) a[i] -= rows.zero_points[i / k];
    a[i] *= double{rows.scales[i / k]};
  }
  return a;
}

// What gemm/kernels/block_kernels.h multiplies in place of rows of whole
// blocks: ax * qa.
template <typename A>
std::vector<double> QuantisedInBlocks(const std::vector<A>& a) {
  std::vector<double> rows;
  for (size_t at = 0; at < a.size(); at += 32) {
    float most = 0;
    for (size_t i = 0; i < 32; ++i) {
      most = std::max(most, static_cast<float>(std::abs(ToDouble(a[at + i]))));
    }
    const float scale = most == 0 ? 1.0f : std::max(most / 127.0f, 0x1p-125f);
    const float inverse = 1.0f / scale;
    for (size_t i = 0; i < 32; ++i) {
      rows.push_back(scale *
                     std::nearbyint(ToDouble(a[at + i]) * double{inverse}));
    }
  }
  return rows;
}

// The layer in double, for rows a[m, k].
inline std::vector<double> ProductOf(const KnownWeights& w, int64_t m,
                                     const std::vector<double>& a) {
  return ReferenceLinear(m, w.spec.n, w.spec.k, a, w.Values(),
                         ToDoubles(w.bias));
}

// roundings * (sum over k of |a[m, k]| * magnitudes[n, k], plus |bias[n]|)
inline std::vector<double> SumBounds(const KnownWeights& w, int64_t m,
                                     const std::vector<double>& a,
                                     const std::vector<double>& magnitudes,
                                     double roundings) {
  auto bounds = ReferenceLinear(m, w.spec.n, w.spec.k, Magnitudes(a),
                                magnitudes, Magnitudes(ToDoubles(w.bias)));
  for (double& bound : bounds) bound *= roundings;
  return bounds;
}

// Bounds on the error of each element of an f32 ProductOf, as gemm/linear.h
// promises them to rows that are not rounded.
inline std::vector<double> BoundsOf(const KnownWeights& w, int64_t m,
                                    const std::vector<double>& a) {
  const int64_t k = w.spec.k;
  if (w.spec.format == WeightFormat::kI8Channel) {
    // Three roundings of the product, one of the sum, and the second order.
    auto bounds = ReferenceLinear(m, w.spec.n, k, a, w.Values());
    const auto sums = ProductOf(w, m, a);
    for (size_t i = 0; i < bounds.size(); ++i) {
      bounds[i] =
          1.001 * std::ldexp(3 * std::abs(bounds[i]) + std::abs(sums[i]), -24);
    }
    return bounds;
  }
  if (w.spec.format == WeightFormat::kBlocks) {
    // One addition more than gemm/linear.h has is for the bias.
    const auto roundings = static_cast<double>(k + k / 256 + 3 + 1);
    return SumBounds(w, m, a, Magnitudes(w.Values()),
                     1.001 * std::ldexp(roundings, -24));
  }
  // Roundings of a sum, each at most 2^-23 of the magnitudes; one is bias.
  const int64_t roundings =
      k + 1 + (w.grouped() ? 3 * w.groups() + k / 512 : 0);
  const double middle = w.middle();
  const auto magnitudes = w.Each([&](double s, double code, double zero) {
    return s * (std::abs(code - middle) + std::abs(zero - middle));
  });
  return SumBounds(w, m, a, magnitudes,
                   std::ldexp(static_cast<double>(roundings), -23));
}

// c within `bounds` of `want`, and one rounding of what is then there.
template <typename C>
testing::AssertionResult IsWithin(const std::vector<C>& c,
                                  const std::vector<double>& want,
                                  const std::vector<double>& bounds) {
  return AllWithin(c, want, [&](double v, int64_t flat) {
    const double sum = bounds[static_cast<size_t>(flat)];
    return sum + UnitRoundoff<C>() * (std::abs(v) + sum);
  });
}

// c of `weights` for rows that are a in double.
template <typename C>
testing::AssertionResult IsWithinBound(const std::vector<C>& c,
                                       const KnownWeights& weights, int64_t m,
                                       const std::vector<double>& a) {
  return IsWithin(c, ProductOf(weights, m, a), BoundsOf(weights, m, a));
}

// sums[n] = sum over k of w[n, k]
inline std::vector<double> ColumnSums(int64_t n, int64_t k,
                                      const std::vector<double>& w) {
  std::vector<double> sums(static_cast<size_t>(n));
  for (size_t i = 0; i < w.size(); ++i) {
    sums[i / static_cast<size_t>(k)] += w[i];
  }
  return sums;
}

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_ORACLE_H_
