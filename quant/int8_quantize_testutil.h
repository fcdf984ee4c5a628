#ifndef QUERN_QUANT_INT8_QUANTIZE_TESTUTIL_H_
#define QUERN_QUANT_INT8_QUANTIZE_TESTUTIL_H_

// What the tests of quant/int8_quantize.h share: its formulas, operation by
// operation, and every function of a plan in guarded memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kMax = std::numeric_limits<float>::max();
inline constexpr auto kPerToken = Int8Granularity::kPerToken;
inline constexpr auto kPerTensor = Int8Granularity::kPerTensor;
inline constexpr auto kNone = Int8ZeroPoint::kNone;
inline constexpr auto kUsed = Int8ZeroPoint::kUsed;

// What quantising a row gives.
struct Row {
  float scale;
  int32_t zero_point;
  std::vector<int8_t> q;
};

inline bool SameBits(float a, float b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 ||
         (std::isnan(a) && std::isnan(b));
}

// The header's formulas, operation by operation.
inline Row Formula(const Int8QuantizeSpec& spec, const std::vector<float>& x) {
  Row row = {spec.scale, spec.zero_point, {}};
  if (spec.granularity == kPerToken) {
    float min = 0, max = 0;
    bool finite = true;
    for (float v : x) {
      finite = finite && std::isfinite(v);
      if (std::abs(v) < 0x1p-126f) v = 0;
      if (spec.zero_points == kNone) v = std::abs(v);
      min = std::min(min, v);
      max = std::max(max, v);
    }
    if (!finite) return {kNan, 0, std::vector<int8_t>(x.size(), 0)};
    if (min == 0 && max == 0) return {1, 0, std::vector<int8_t>(x.size(), 0)};
    row.scale =
        spec.zero_points == kNone
            ? max / 127.0f
            : static_cast<float>((static_cast<double>(max) - min) / 255.0);
    row.scale = std::max(row.scale, 0x1p-125f);
    if (spec.zero_points == kUsed) {
      const double steps = static_cast<double>(min) * (1.0f / row.scale);
      row.zero_point = static_cast<int32_t>(-128 - std::nearbyint(steps));
    }
  }
  const float inverse = 1.0f / row.scale;
  for (const float v : x) {
    const double steps = static_cast<double>(v) * inverse;  // exact
    const double code = std::isnan(steps)
                            ? row.zero_point
                            : std::nearbyint(steps) + row.zero_point;
    row.q.push_back(static_cast<int8_t>(std::clamp(code, -128.0, 127.0)));
  }
  return row;
}

// Per token and per tensor, without and with zero points.
inline std::vector<Int8QuantizeSpec> AllModes(DType dtype) {
  std::vector<Int8QuantizeSpec> specs(4);
  for (Int8QuantizeSpec& spec : specs) spec.dtype = dtype;
  specs[1].zero_points = specs[3].zero_points = kUsed;
  specs[2].granularity = specs[3].granularity = kPerTensor;
  specs[2].scale = 0.0213f;  // clamps some of what RandomValues gives
  specs[3].scale = 0.0371f;
  specs[3].zero_point = -37;
  return specs;
}

inline std::vector<float> RandomValues(int64_t count, double scale = 1,
                                       double shift = 0) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::normal_distribution<double> normal(shift, 1);
  std::vector<float> x;
  for (int64_t i = 0; i < count; ++i) {
    x.push_back(static_cast<float>(normal(random) * scale));
  }
  return x;
}

template <typename T>
std::vector<T> RoundedTo(const std::vector<float>& x) {
  std::vector<T> rounded;
  for (const float v : x) rounded.push_back(FromDouble<T>(v));
  return rounded;
}

class Int8QuantizeTest : public IsaTest {
 protected:
  Int8QuantizePlan Plan(const Int8QuantizeSpec& spec) {
    const auto plan = Int8QuantizePlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }

  // x[m, k] with `slack` between rows, by all three functions, each buffer up
  // to a page that may not be touched; expected to agree with each other.
  template <typename T>
  std::vector<Row> Run(const Int8QuantizeSpec& spec,
                       const std::vector<float>& x, int64_t m, int64_t k,
                       int64_t slack, Executor& executor) {
    const Int8QuantizePlan plan = Plan(spec);
    const bool scaled = spec.granularity == kPerToken;
    const bool shifted = scaled && spec.zero_points == kUsed;
    const StridedMatrix<T> in(RoundedTo<T>(x), m, k, k + slack, Edge::kEnd,
                              slack);
    StridedMatrix<int8_t> out(m, k, k + 2 * slack, Edge::kEnd, 3 * slack);
    GuardBuffer<float> scales(scaled ? m : 0);
    GuardBuffer<int32_t> zeros(shifted ? m : 0);
    const absl::Status status =
        plan.CheckArgs(in.view(), out.view(), scales.view(), zeros.view());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_NO_ALLOCATION(plan.Execute(in.view(), out.view(), scales.view(),
                                      zeros.view(), executor));
    std::vector<Row> rows;
    for (int64_t i = 0; i < m; ++i) {
      const int8_t* q = out.view().Row(i);
      rows.push_back({scaled ? scales[i] : spec.scale,
                      shifted ? zeros[i] : spec.zero_point,
                      std::vector<int8_t>(q, q + k)});
      const GuardBuffer<T> row(
          std::vector<T>(in.view().Row(i), in.view().Row(i) + k), Edge::kBegin,
          slack);
      GuardBuffer<int8_t> row_q(k, Edge::kBegin, slack);
      GuardBuffer<uint8_t> row_u(k, Edge::kEnd, slack);
      float scale = -1, scale_u = -1;
      int32_t zero = 99, zero_u = 99;
      EXPECT_NO_ALLOCATION(
          plan.QuantizeRow(row.data(), k, row_q.data(), &scale, &zero);
          plan.QuantizeRowU8(row.data(), k, row_u.data(), &scale_u, &zero_u));
      EXPECT_EQ(row_q.ToVector(), rows.back().q);
      EXPECT_TRUE(SameBits(scale, rows.back().scale));
      EXPECT_TRUE(SameBits(scale_u, rows.back().scale));
      EXPECT_EQ(zero, rows.back().zero_point);
      EXPECT_EQ(zero_u, rows.back().zero_point);
      for (int64_t j = 0; j < k; ++j) {
        EXPECT_EQ(int{row_u[j]} - 128, int{row_q[j]}) << "column " << j;
      }
    }
    return rows;
  }

  // One row.
  template <typename T = float>
  Row RunRow(const Int8QuantizeSpec& spec, const std::vector<float>& x) {
    return Run<T>(spec, x, 1, static_cast<int64_t>(x.size()), 0,
                  inline_executor_)[0];
  }

  template <typename T>
  void ExpectFormula(const Int8QuantizeSpec& spec, const std::vector<float>& x,
                     int64_t m, int64_t k, int64_t slack, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(spec.dtype) << " m=" << m << " k=" << k
                 << " slack=" << slack << " per token "
                 << (spec.granularity == kPerToken) << " zero points "
                 << (spec.zero_points == kUsed));
    const std::vector<Row> rows = Run<T>(spec, x, m, k, slack, executor);
    for (int64_t i = 0; i < m; ++i) {
      std::vector<float> values;
      for (int64_t j = 0; j < k; ++j) {
        const T rounded = FromDouble<T>(x[static_cast<size_t>(i * k + j)]);
        values.push_back(static_cast<float>(ToDouble(rounded)));
      }
      const Row want = Formula(spec, values);
      const Row& got = rows[static_cast<size_t>(i)];
      ASSERT_TRUE(SameBits(got.scale, want.scale))
          << "row " << i << ": " << got.scale << ", not " << want.scale;
      ASSERT_EQ(got.zero_point, want.zero_point) << "row " << i;
      ASSERT_EQ(got.q, want.q) << "row " << i;
    }
  }

  InlineExecutor inline_executor_;
};

}  // namespace quern

#endif  // QUERN_QUANT_INT8_QUANTIZE_TESTUTIL_H_
