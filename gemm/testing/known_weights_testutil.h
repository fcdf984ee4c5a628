#ifndef QUERN_GEMM_TESTING_KNOWN_WEIGHTS_TESTUTIL_H_
#define QUERN_GEMM_TESTING_KNOWN_WEIGHTS_TESTUTIL_H_

// Weights of linear layers, in every format, whose values tests know in double.
//
//   const auto w = ExactWeights(rng, {WeightFormat::kI4Group}, shape);
//   const LinearWeights packed = w.Pack(executor);    // from guarded memory
//   const auto want = w.Product(m, ToDoubles(a));     // the layer, in double

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

enum class Residual { kNone, kApart, kInPlace };

struct Shape {
  int64_t m = 0, n = 0, k = 0;
  int64_t padding = 0;  // after each row of a, b and c
  int64_t shift = 0;    // of a and c, from the guarded page
  bool bias = false;
  WeightLayout layout = WeightLayout::kNK;
  LinearActivation act = LinearActivation::kNone;
  Residual residual = Residual::kNone;

  int64_t cols() const { return ColumnsOfC(act, n); }
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "m=" << s.m << " n=" << s.n << " k=" << s.k
             << " padding=" << s.padding << " shift=" << s.shift
             << " bias=" << s.bias << " " << WeightLayoutName(s.layout) << " "
             << LinearActivationName(s.act) << " residual "
             << static_cast<int>(s.residual);
}

// Weights of any format, in double: b[k, n] = scale * (code - zero).
struct KnownWeights {
  static constexpr int64_t kBlockN = 40;  // columns of a scale of kE4M3Block

  LinearWeightsSpec spec;
  WeightLayout layout = WeightLayout::kNK;
  int64_t padding = 0;
  std::vector<double> codes;   // [n, k]
  std::vector<double> scales;  // [groups, n]; empty for 1; kI8Channel: [n], [1]
  std::vector<double> zeros;   // [groups, n], or empty
  std::vector<float> bias;     // [n], or empty
  // [k], kI4Group alone: the group of each k; empty: in order.
  std::vector<int32_t> g_idx;

  // A code that the kernels take for 0.
  double middle() const {
    return spec.format == WeightFormat::kI4Group ? 8 : 0;
  }
  bool grouped() const { return spec.format >= WeightFormat::kE4M3Block; }
  int64_t groups() const {
    return grouped() ? DivCeil(spec.k, spec.group_size) : 1;
  }
  int64_t group_of(int64_t i) const {
    if (!g_idx.empty()) return g_idx[static_cast<size_t>(i)];
    return grouped() ? i / spec.group_size : 0;
  }
  // scale, code and zero of every weight, to f, as [n, k].
  template <typename F>
  std::vector<double> Each(const F& f) const {
    std::vector<double> all;
    all.reserve(codes.size());
    for (int64_t col = 0; col < spec.n; ++col) {
      for (int64_t i = 0; i < spec.k; ++i) {
        const auto at = static_cast<size_t>(group_of(i) * spec.n + col);
        all.push_back(f(scales.empty()       ? 1.0
                        : scales.size() == 1 ? scales[0]
                                             : scales[at],
                        codes[all.size()],
                        zeros.empty() ? middle() : zeros[at]));
      }
    }
    return all;
  }
  std::vector<double> Values() const {
    return Each(
        [](double s, double code, double zero) { return s * (code - zero); });
  }

  // The layer in double, for rows a[m, k].
  std::vector<double> Product(int64_t m, const std::vector<double>& a) const {
    return ReferenceLinear(m, spec.n, spec.k, a, Values(), ToDoubles(bias));
  }
  // Bounds on the error of each element of an f32 Product, as gemm/linear.h
  // promises them.
  std::vector<double> Bounds(int64_t m, const std::vector<double>& a) const {
    std::vector<double> bounds;
    if (spec.format == WeightFormat::kI8Channel) {
      // Three roundings of the product, one of the sum, and the second order.
      bounds = ReferenceLinear(m, spec.n, spec.k, a, Values());
      const auto sums = Product(m, a);
      for (size_t i = 0; i < bounds.size(); ++i) {
        bounds[i] =
            1.001 *
            std::ldexp(3 * std::abs(bounds[i]) + std::abs(sums[i]), -24);
      }
      return bounds;
    }
    // Roundings of a sum, each at most 2^-23 of the magnitudes; one is bias.
    const int64_t roundings =
        spec.k + 1 + (grouped() ? 3 * groups() + spec.k / 512 : 0);
    const double zero_code = middle();
    bounds = ReferenceLinear(
        m, spec.n, spec.k, Magnitudes(a),
        Each([&](double s, double code, double zero) {
          return s * (std::abs(code - zero_code) + std::abs(zero - zero_code));
        }),
        Magnitudes(ToDoubles(bias)));
    for (double& bound : bounds) {
      bound = std::ldexp(bound * static_cast<double>(roundings), -23);
    }
    return bounds;
  }

  LinearWeights Pack(Executor& executor) const {
    switch (spec.format) {
      case WeightFormat::kF32:
        return PackAs<float>(executor);
      case WeightFormat::kBF16:
        return PackAs<BFloat16>(executor);
      case WeightFormat::kF16:
        return PackAs<Float16>(executor);
      case WeightFormat::kE4M3Block:
        return PackAs<Float8E4M3>(executor);
      case WeightFormat::kI4Group:
        return PackAs<uint8_t>(executor);
      default:
        return PackAs<int8_t>(executor);
    }
  }

 private:
  LinearWeights PackSource(LinearSource source, Executor& executor) const {
    const GuardBuffer<float> guarded(bias);
    const GuardBuffer<int32_t> group(g_idx);
    if (!g_idx.empty()) source.g_idx = group.view();
    source.layout = layout;
    source.block_n = kBlockN;
    if (!bias.empty()) source.bias = guarded.view();
    auto weights = LinearWeights::Pack(spec, {source}, executor);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    return *std::move(weights);
  }

  template <typename T>
  LinearWeights PackAs(Executor& executor) const {
    const bool nk = layout == WeightLayout::kNK;
    const int64_t rows = nk ? spec.n : spec.k, cols = nk ? spec.k : spec.n;
    std::vector<double> laid = codes;
    for (int64_t i = 0; !nk && i < rows * cols; ++i) {
      laid[static_cast<size_t>(i)] =
          codes[static_cast<size_t>(i % cols * rows + i / cols)];
    }
    const StridedMatrix<T> matrix(RoundedTo<T>(laid), rows, cols,
                                  cols + padding);
    LinearSource source;
    source.codes = matrix.view();

    std::vector<double> s = scales;
    int64_t scale_rows = groups();
    if (spec.format == WeightFormat::kE4M3Block) {
      s.clear();
      scale_rows = DivCeil(spec.n, kBlockN);
      for (int64_t col = 0; col < spec.n; col += kBlockN) {
        for (int64_t g = 0; g < groups(); ++g) {
          s.push_back(scales[static_cast<size_t>(g * spec.n + col)]);
        }
      }
    }
    const int64_t scale_cols = static_cast<int64_t>(s.size()) / scale_rows;
    const StridedMatrix<float> guarded_scales(RoundedTo<float>(s), scale_rows,
                                              scale_cols, scale_cols + padding);
    const StridedMatrix<uint8_t> guarded_zeros(RoundedTo<uint8_t>(zeros),
                                               zeros.empty() ? 0 : groups(),
                                               spec.n, spec.n + padding);
    if (grouped()) {
      source.scales = guarded_scales.view();
    } else if (!s.empty()) {
      source.scales = DenseVector(guarded_scales.view().data(), scale_cols);
    }
    if (!zeros.empty()) source.zeros = guarded_zeros.view();
    return PackSource(source, executor);
  }
};

// sums[n] = sum over k of w[n, k]
inline std::vector<double> ColumnSums(int64_t n, int64_t k,
                                      const std::vector<double>& w) {
  std::vector<double> sums(static_cast<size_t>(n));
  for (size_t i = 0; i < w.size(); ++i)
    sums[i / static_cast<size_t>(k)] += w[i];
  return sums;
}

// Formats with the ways in which their weights are given.
struct FormatCase {
  WeightFormat format;
  bool zeros = false;
};
inline constexpr FormatCase kEveryFormat[] = {
    {WeightFormat::kF32},           {WeightFormat::kBF16},
    {WeightFormat::kF16},           {WeightFormat::kI8Channel},
    {WeightFormat::kE4M3Block},     {WeightFormat::kI4Group},
    {WeightFormat::kI4Group, true}, {WeightFormat::kI8Group}};

inline std::ostream& operator<<(std::ostream& out, const FormatCase& f) {
  return out << WeightFormatName(f.format) << (f.zeros ? " with zeros" : "");
}

// Weights of the n, k, padding, layout and activation of s, to be filled.
inline KnownWeights EmptyWeights(WeightFormat format, const Shape& s) {
  KnownWeights w;
  w.spec.format = format;
  w.spec.n = s.n;
  w.spec.k = s.k;
  w.spec.group_size = 32;
  w.spec.gated = IsGated(s.act);
  w.layout = s.layout;
  w.padding = s.padding;
  return w;
}

// Codes that are integers in [lo, hi] above their zero, with scale(rng) for
// each column or each group and column.
template <typename Scale>
KnownWeights CodedWeights(Rng& rng, FormatCase f, const Shape& s, int64_t lo,
                          int64_t hi, const Scale& scale) {
  KnownWeights w = EmptyWeights(f.format, s);
  w.codes = SmallIntegers<double>(rng, s.n * s.k, lo, hi);
  const bool scaled = w.grouped() || f.format == WeightFormat::kI8Channel;
  for (int64_t i = 0; scaled && i < w.groups() * s.n; ++i) {
    const bool shared = f.format == WeightFormat::kE4M3Block &&
                        i % s.n % KnownWeights::kBlockN != 0;
    w.scales.push_back(shared ? w.scales.back() : scale(rng));
    if (f.zeros)
      w.zeros.push_back(static_cast<double>(rng.Integer(-lo, 15 - hi)));
  }
  for (size_t i = 0; i < w.codes.size() && w.middle() != 0; ++i) {
    const auto col = static_cast<int64_t>(i) / s.k;
    const auto group = static_cast<int64_t>(i) % s.k / w.spec.group_size;
    w.codes[i] +=
        f.zeros ? w.zeros[static_cast<size_t>(group * s.n + col)] : w.middle();
  }
  return w;
}

// Integers in [-most, most], where most <= 7 of 4-bit codes, times scales that
// are 2^-e, 0 <= e <= halvings: sums are exact.
inline KnownWeights ExactWeights(Rng& rng, FormatCase f, const Shape& s,
                                 int64_t most = 7, int halvings = 0) {
  KnownWeights w = CodedWeights(rng, f, s, -most, most, [&](Rng& r) {
    return std::ldexp(1.0, -static_cast<int>(r.Integer(0, halvings)));
  });
  w.bias = SmallIntegers<float>(rng, s.bias ? s.n : 0, -99, 99);
  return w;
}

// Reals, or codes times scales that are reals.
inline KnownWeights RealWeights(Rng& rng, FormatCase f, const Shape& s) {
  const bool bytes = f.format == WeightFormat::kI8Channel ||
                     f.format == WeightFormat::kI8Group;
  KnownWeights w =
      CodedWeights(rng, f, s, bytes ? -128 : -4, bytes ? 127 : 4, [&](Rng& r) {
        const double scale = r.Uniform(0.001, bytes ? 0.02 : 0.1);
        return ToDouble(FromDouble<Float16>(scale));
      });
  switch (f.format) {
    case WeightFormat::kF32:
      w.codes = ToDoubles(UniformReals<float>(rng, s.n * s.k));
      break;
    case WeightFormat::kBF16:
      w.codes = ToDoubles(UniformReals<BFloat16>(rng, s.n * s.k));
      break;
    case WeightFormat::kF16:
      w.codes = ToDoubles(UniformReals<Float16>(rng, s.n * s.k));
      break;
    default:
      break;
  }
  w.bias = UniformReals<float>(rng, s.bias ? s.n : 0, -5, 5);
  return w;
}

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_KNOWN_WEIGHTS_TESTUTIL_H_
