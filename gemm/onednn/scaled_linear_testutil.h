#ifndef QUERN_GEMM_ONEDNN_SCALED_LINEAR_TESTUTIL_H_
#define QUERN_GEMM_ONEDNN_SCALED_LINEAR_TESTUTIL_H_

// What the tests of gemm/onednn/scaled_linear.h share: layers and rows, what
// their product is exactly, and Execute in guarded memory.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/scaled_linear.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

using Activation = OneDnnScaledLinearSpec::Activation;

// How a layer is quantised.
struct Mode {
  Activation activation = Activation::kPerToken;
  bool zero_points = false;
  bool per_channel = true;
  bool bias = false;
};

inline std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << (mode.activation == Activation::kPerTensor ? "per tensor"
                                                           : "per token")
             << " zero_points=" << mode.zero_points
             << " per_channel=" << mode.per_channel << " bias=" << mode.bias;
}

inline std::vector<Mode> AllModes() {
  std::vector<Mode> modes;
  for (const Activation activation :
       {Activation::kPerToken, Activation::kPerTensor}) {
    for (int bits = 0; bits < 8; ++bits) {
      modes.push_back(
          {activation, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
    }
  }
  return modes;
}

// Weights of a layer, [n, k].
struct Layer {
  int64_t n, k;
  Mode mode;
  std::vector<int8_t> w;
  std::vector<float> w_scales;
  std::vector<float> bias;
};

struct Rows {
  int64_t m;
  std::vector<int8_t> a;
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

// Powers of two: products with them are exact.
inline std::vector<float> Powers(Rng& rng, int64_t count, int64_t lo,
                                 int64_t hi) {
  std::vector<float> v;
  for (int64_t i = 0; i < count; ++i) {
    v.push_back(std::ldexp(1.0f, static_cast<int>(rng.Integer(lo, hi))));
  }
  return v;
}

inline Layer RandomLayer(Rng& rng, int64_t n, int64_t k, const Mode& mode) {
  Layer layer{n, k, mode, {}, {}, {}};
  layer.w = SmallIntegers<int8_t>(rng, n * k, -128, 127);
  layer.w_scales =
      UniformReals<float>(rng, mode.per_channel ? n : 1, 0.001, 0.01);
  if (mode.bias) layer.bias = UniformReals<float>(rng, n, -3, 3);
  return layer;
}

inline Rows RandomRows(Rng& rng, int64_t m, const Layer& layer) {
  const bool one = layer.mode.activation == Activation::kPerTensor;
  Rows rows{m, {}, {}, {}};
  rows.a = SmallIntegers<int8_t>(rng, m * layer.k, -128, 127);
  rows.scales = UniformReals<float>(rng, one ? 1 : m, 0.001, 0.02);
  if (layer.mode.zero_points) {
    rows.zero_points = one ? SmallIntegers<int32_t>(rng, 1, -128, 127)
                           : SmallIntegers<int32_t>(rng, m, -1000, 1000);
  }
  return rows;
}

// Scales 2^-2 to 2^2 and a small integer bias: exact while sums fit f32.
inline void MakeExact(Rng& rng, Layer& layer) {
  layer.w_scales =
      Powers(rng, static_cast<int64_t>(layer.w_scales.size()), -1, 1);
  if (layer.mode.bias) {
    layer.bias = SmallIntegers<float>(rng, layer.n, -99, 99);
  }
}
inline void MakeExact(Rng& rng, Rows& rows) {
  rows.scales = Powers(rng, static_cast<int64_t>(rows.scales.size()), -1, 1);
}

// The two halves of a result before rounding: scaled sum, and bias.
struct Exact {
  std::vector<double> products;
  std::vector<double> values;
};

// a * w and the column sums of w, in double: what modes have in common.
struct Product {
  std::vector<double> dots;
  std::vector<double> col_sums;
};

inline Product ProductOf(const Layer& layer, const Rows& rows) {
  const std::vector<double> w = ToDoubles(layer.w);
  const std::vector<double> ones(static_cast<size_t>(layer.k), 1.0);
  return {ReferenceLinear(rows.m, layer.n, layer.k, ToDoubles(rows.a), w),
          ReferenceLinear(1, layer.n, layer.k, ones, w)};
}

inline Exact Reference(const Layer& layer, const Rows& rows,
                       const Product& product) {
  const auto at = [](const auto& v, int64_t i) {
    return static_cast<double>(v[v.size() == 1 ? 0 : static_cast<size_t>(i)]);
  };
  Exact exact;
  for (int64_t i = 0; i < rows.m * layer.n; ++i) {
    const int64_t row = i / layer.n, col = i % layer.n;
    // Integers below 2^53: exact in double.
    double p = product.dots[static_cast<size_t>(i)];
    if (!rows.zero_points.empty()) {
      p -= at(rows.zero_points, row) *
           product.col_sums[static_cast<size_t>(col)];
    }
    p *= at(rows.scales, row) * at(layer.w_scales, col);
    exact.products.push_back(p);
    exact.values.push_back(p +
                           (layer.bias.empty() ? 0.0 : at(layer.bias, col)));
  }
  return exact;
}
inline Exact Reference(const Layer& layer, const Rows& rows) {
  return Reference(layer, rows, ProductOf(layer, rows));
}

// Runs everything in guarded memory.
class Runner {
 public:
  template <typename Out>
  static OneDnnScaledLinearPlan Create(const Layer& layer,
                                       WeightOrder order = WeightOrder::kNK,
                                       int64_t padding = 0) {
    OneDnnScaledLinearSpec spec;
    spec.n = layer.n;
    spec.k = layer.k;
    spec.c = DTypeOf<Out>;
    spec.activation = layer.mode.activation;
    spec.zero_points = layer.mode.zero_points;
    spec.order = order;
    std::vector<int8_t> w = layer.w;
    int64_t r = layer.n, c = layer.k;
    if (order == WeightOrder::kKN) {
      for (int64_t i = 0; i < r * c; ++i) {
        w[static_cast<size_t>(i % c * r + i / c)] =
            layer.w[static_cast<size_t>(i)];
      }
      std::swap(r, c);
    }
    const StridedMatrix<int8_t> weights(w, r, c, c + padding);
    const GuardBuffer<float> scales(layer.w_scales), bias(layer.bias);
    InlineExecutor executor;
    auto plan = OneDnnScaledLinearPlan::Create(
        spec, weights.view(), scales.view(),
        layer.bias.empty() ? AnyTensorView() : AnyTensorView(bias.view()),
        executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  template <typename Out>
  static std::vector<Out> Run(const OneDnnScaledLinearPlan& plan,
                              const Rows& rows, Executor& executor,
                              OneDnnScratch& scratch, int64_t padding = 0,
                              Edge edge = Edge::kEnd) {
    const int64_t n = plan.spec().n, k = plan.spec().k;
    const StridedMatrix<int8_t> a(rows.a, rows.m, k, k + padding, edge);
    const GuardBuffer<float> scales(rows.scales);
    const GuardBuffer<int32_t> zero_points(rows.zero_points);
    StridedMatrix<Out> c(rows.m, n, n + padding, edge);
    OneDnnScaledLinearArgs args{a.view(), scales.view(), {}, c.view()};
    if (plan.spec().zero_points) args.zero_points = zero_points.view();
    EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
    plan.Execute(args, scratch, executor);
    return c.ToDense();
  }
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_SCALED_LINEAR_TESTUTIL_H_
