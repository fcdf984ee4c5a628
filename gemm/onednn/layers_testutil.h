#ifndef QUERN_GEMM_ONEDNN_LAYERS_TESTUTIL_H_
#define QUERN_GEMM_ONEDNN_LAYERS_TESTUTIL_H_

// Plans by oneDNN, and int8 layers and rows whose product is known exactly.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

inline LinearPlan OneDnnPlan(LinearSpec spec, const LinearWeights& weights) {
  InlineExecutor executor;
  spec.kernels = "onednn";
  auto plan = LinearPlan::Create(spec, weights, executor);
  EXPECT_EQ(plan.status(), absl::OkStatus());
  EXPECT_STREQ(plan->implementation(), "onednn");
  return *std::move(plan);
}

// How a layer is quantised.
struct Mode {
  bool per_token = true;
  bool zero_points = false;
  bool per_channel = true;
  bool bias = false;
};

inline std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << (mode.per_token ? "per token" : "per tensor")
             << " zero_points=" << mode.zero_points
             << " per_channel=" << mode.per_channel << " bias=" << mode.bias;
}

inline std::vector<Mode> AllModes() {
  std::vector<Mode> modes;
  for (const bool per_token : {true, false}) {
    for (int bits = 0; bits < 8; ++bits) {
      modes.push_back(
          {per_token, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
    }
  }
  return modes;
}

// A layer of int8.
struct Layer {
  KnownWeights w;
  Mode mode;
  // The terms of all rows, where they are per tensor.
  float a_scale = 1.0f;
  int32_t a_zero_point = 0;

  int64_t n() const { return w.spec.n; }
  int64_t k() const { return w.spec.k; }
};

// Rows of a, with one scale and zero point for each, or for all per tensor.
struct Rows {
  int64_t m;
  std::vector<int8_t> a;
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

inline Layer RandomLayer(Rng& rng, int64_t n, int64_t k, const Mode& mode) {
  const auto real = [](Rng& r) {
    return ToDouble(FromDouble<float>(r.Uniform(0.001, 0.01)));
  };
  Layer layer{
      CodedWeights(rng, {WeightFormat::kI8Channel}, {0, n, k}, -128, 127, real),
      mode};
  if (!mode.per_channel) layer.w.scales.resize(1);
  if (mode.bias) layer.w.bias = UniformReals<float>(rng, n, -3, 3);
  layer.a_scale = UniformReals<float>(rng, 1, 0.001, 0.02)[0];
  layer.a_zero_point = static_cast<int32_t>(rng.Integer(-128, 127));
  return layer;
}

inline Rows RandomRows(Rng& rng, int64_t m, const Layer& layer) {
  const bool per_token = layer.mode.per_token;
  Rows rows{m, {}, {layer.a_scale}, {}};
  rows.a = SmallIntegers<int8_t>(rng, m * layer.k(), -128, 127);
  if (per_token) rows.scales = UniformReals<float>(rng, m, 0.001, 0.02);
  if (layer.mode.zero_points) {
    rows.zero_points = {layer.a_zero_point};
    if (per_token) rows.zero_points = SmallIntegers<int32_t>(rng, m, -128, 127);
  }
  return rows;
}

// Scales 2^-2 to 2^2 and a small integer bias: exact while sums fit f32.
inline void MakeExact(Rng& rng, Layer& layer) {
  for (double& scale : layer.w.scales) scale = PowersOfTwo(-1, 1)(rng);
  if (layer.mode.bias) {
    layer.w.bias = SmallIntegers<float>(rng, layer.n(), -99, 99);
  }
}
inline void MakeExact(Rng& rng, Rows& rows) {
  for (float& scale : rows.scales) {
    scale = static_cast<float>(PowersOfTwo(-1, 1)(rng));
  }
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
  return {ReferenceLinear(rows.m, layer.n(), layer.k(), ToDoubles(rows.a),
                          layer.w.codes),
          ColumnSums(layer.n(), layer.k(), layer.w.codes)};
}

inline Exact Reference(const Layer& layer, const Rows& rows,
                       const Product& product) {
  const auto at = [](const auto& v, int64_t i) {
    return static_cast<double>(v[v.size() == 1 ? 0 : static_cast<size_t>(i)]);
  };
  Exact exact;
  for (int64_t i = 0; i < rows.m * layer.n(); ++i) {
    const int64_t row = i / layer.n(), col = i % layer.n();
    // Integers below 2^53: exact in double.
    double p = product.dots[static_cast<size_t>(i)];
    if (!rows.zero_points.empty()) {
      p -= at(rows.zero_points, row) *
           product.col_sums[static_cast<size_t>(col)];
    }
    p *= at(rows.scales, row) * layer.w.scale(0, col);
    exact.products.push_back(p);
    exact.values.push_back(
        p + (layer.w.bias.empty() ? 0.0 : at(layer.w.bias, col)));
  }
  return exact;
}
inline Exact Reference(const Layer& layer, const Rows& rows) {
  return Reference(layer, rows, ProductOf(layer, rows));
}

template <typename Out>
LinearPlan PlanOf(const Layer& layer) {
  LinearSpec spec = SpecOf<int8_t, Out>();
  if (layer.mode.zero_points) spec.zero_points = Int8ZeroPoint::kUsed;
  if (!layer.mode.per_token) {
    spec.granularity = Int8Granularity::kPerTensor;
    spec.a_scale = layer.a_scale;
    if (layer.mode.zero_points) spec.a_zero_point = layer.a_zero_point;
  }
  InlineExecutor executor;
  return OneDnnPlan(spec, layer.w.Pack(executor));
}

// Runs in guarded memory, with a workspace of exactly WorkspaceBytes.
template <typename Out>
std::vector<Out> RunRows(const LinearPlan& plan, const Rows& rows,
                         Executor& executor, int64_t padding = 0) {
  const bool per_token = plan.spec().granularity == Int8Granularity::kPerToken;
  return RunLinear<int8_t, Out>(
      plan, {rows.m, plan.n(), plan.k(), padding}, rows.a, executor,
      per_token ? RowTerms{rows.scales, rows.zero_points} : RowTerms());
}

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_LAYERS_TESTUTIL_H_
