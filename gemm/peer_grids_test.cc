// The shapes that vLLM and SGLang test their linear layers with, on the front
// doors, with exact integers in place of their tolerances: several M, one after
// the other, on one plan; bias on and off; scales per token, per tensor, per
// channel; zero points on and off; a row stride of its own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/executor.h"
#include "core/hwy_executor.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "gtest/gtest.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/sanitized.h"
#include "testing/workers.h"

namespace quern {
namespace {

struct Grid {
  int64_t n, k;
  std::vector<int64_t> ms;
};

// vLLM's two sequences of M for its (N, K); SGLang's M for its own. Of the two
// large matrices fewer M, and none under a sanitizer: they take minutes there.
std::vector<Grid> Grids() {
  const std::vector<int64_t> vllm = {16, 1, 32, 128, 64, 1, 17, 1, 31, 17};
  std::vector<Grid> grids = {
      {256, 128, vllm},           {1023, 491, vllm},
      {1001, 15, vllm},           {16, 512, {1, 101}},
      {416, 512, {1, 101}},       {12, 512, {1, 8, 32, 1024}},
      {1, 512, {1, 8, 32, 1024}}, {384, 544, {2, 128}}};
  if (!QuickTests() && !kSanitized) {
    grids.push_back({4096, 4096, {16, 1, 17}});
    grids.push_back({16384, 4096, {1, 4}});
  }
  return grids;
}

// The rows a[m, k] of one product, and the product dots[m, n] = a w^T. All
// plans of a grid share them, because the product is most of the test's time.
struct Rows {
  std::vector<int8_t> a;
  std::vector<double> dots;
};

std::vector<Rows> AllRows(TestRng& rng, const Grid& g, int64_t most,
                          const std::vector<double>& w) {
  std::vector<Rows> all;
  for (const int64_t m : g.ms) {
    const auto a = SmallIntegers<int8_t>(rng, m * g.k, -most, most);
    all.push_back({a, ReferenceLinear(m, g.n, g.k, ToDoubles(a), w)});
  }
  return all;
}

// Copies dense rows to rows `stride` apart, NaN or garbage between them.
template <typename T, typename From>
std::vector<T> Strided(const std::vector<From>& from, int64_t rows,
                       int64_t cols, int64_t stride) {
  std::vector<T> to(static_cast<size_t>(rows * stride), FromDouble<T>(77));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      to[static_cast<size_t>(r * stride + c)] = FromDouble<T>(
          static_cast<double>(from[static_cast<size_t>(r * cols + c)]));
    }
  }
  return to;
}

class PeerGridsTest : public testing::TestWithParam<LinearImpl> {
 protected:
  const std::unique_ptr<HwyExecutor> executor_ = Workers(2);
  LinearScratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(Impl, PeerGridsTest,
                         testing::Values(LinearImpl::kPacked,
                                         LinearImpl::kOneDnn));

TEST_P(PeerGridsTest, LinearIsExact) {
  TestRng rng;
  for (const Grid& g : Grids()) {
    // 4 * 4 * 4096 < 2^24: exact in f32, in any order.
    const auto w = SmallIntegers<int8_t>(rng, g.n * g.k, -4, 4);
    const auto weights = Strided<BFloat16>(w, g.n, g.k, g.k);
    const auto bias = SmallIntegers<float>(rng, g.n, -99, 99);
    const std::vector<Rows> all = AllRows(rng, g, 4, ToDoubles(w));
    for (const bool with_bias : {true, false}) {
      if (!with_bias && g.n * g.k > 1 << 22) continue;
      LinearSpec spec;
      spec.n = g.n;
      spec.k = g.k;
      spec.impl = GetParam();
      AnyTensorView bias_view;
      if (with_bias) bias_view = DenseVector(bias.data(), g.n);
      const auto plan = LinearPlan::Create(
          spec, DenseMatrix(weights.data(), g.n, g.k), bias_view, *executor_);
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (size_t i = 0; i < g.ms.size(); ++i) {
        const int64_t m = g.ms[i];
        SCOPED_TRACE(testing::Message() << "n=" << g.n << " k=" << g.k
                                        << " m=" << m << " bias=" << with_bias);
        const int64_t stride = g.k + 5;
        const auto rows = Strided<BFloat16>(all[i].a, m, g.k, stride);
        std::vector<BFloat16> c(static_cast<size_t>(m * g.n));
        ASSERT_TRUE(scratch_.Reserve(*plan, m, *executor_).ok());
        plan->Execute(
            MatrixView<const BFloat16>(rows.data(), {m, g.k}, {stride, 1}),
            DenseMatrix(c.data(), m, g.n), scratch_, *executor_);
        std::vector<double> want = all[i].dots;
        for (size_t at = 0; with_bias && at < want.size(); ++at) {
          want[at] += double{bias[at % static_cast<size_t>(g.n)]};
        }
        ASSERT_TRUE(AllEqual(c, RoundedTo<BFloat16>(want)));
      }
    }
  }
}

// Scales are powers of two: the integers stay exact up to the last rounding.
TEST_P(PeerGridsTest, ScaledLinearIsExact) {
  TestRng rng;
  for (const Grid& g : Grids()) {
    const bool large = g.n * g.k > 1 << 22;
    const auto w = SmallIntegers<int8_t>(rng, g.n * g.k, -20, 20);
    const std::vector<double> exact_w = ToDoubles(w);
    const std::vector<Rows> all = AllRows(rng, g, 20, exact_w);
    const std::vector<double> ones(static_cast<size_t>(g.k), 1.0);
    const std::vector<double> sums =
        ReferenceLinear(1, g.n, g.k, ones, exact_w);
    const auto bias = SmallIntegers<float>(rng, g.n, -99, 99);
    for (const auto granularity :
         {Int8Granularity::kPerToken, Int8Granularity::kPerTensor}) {
      for (const auto zeros : {Int8ZeroPoint::kNone, Int8ZeroPoint::kUsed}) {
        for (const bool per_channel : {true, false}) {
          for (const bool with_bias : {true, false}) {
            const bool per_token = granularity == Int8Granularity::kPerToken;
            const bool used = zeros == Int8ZeroPoint::kUsed;
            // One of the eight for the large ones.
            if (large && !(per_token && used && per_channel && with_bias)) {
              continue;
            }
            ScaledLinearSpec spec;
            spec.n = g.n;
            spec.k = g.k;
            spec.a = DType::kI8;
            spec.c = DType::kF32;
            spec.granularity = granularity;
            spec.zero_points = zeros;
            if (!per_token) {
              spec.a_scale = 0.5f;
              spec.a_zero_point = used ? 7 : 0;
            }
            spec.impl = GetParam();
            std::vector<float> w_scales;
            for (int64_t i = 0; i < (per_channel ? g.n : 1); ++i) {
              w_scales.push_back(i % 3 == 0 ? 2.0f : 0.25f);
            }
            AnyTensorView bias_view;
            if (with_bias) bias_view = DenseVector(bias.data(), g.n);
            const auto plan = ScaledLinearPlan::Create(
                spec, DenseMatrix(w.data(), g.n, g.k),
                DenseVector(w_scales.data(),
                            static_cast<int64_t>(w_scales.size())),
                bias_view, *executor_);
            ASSERT_TRUE(plan.ok()) << plan.status();
            for (size_t i = 0; i < g.ms.size(); ++i) {
              const int64_t m = g.ms[i];
              SCOPED_TRACE(testing::Message()
                           << "n=" << g.n << " k=" << g.k << " m=" << m
                           << " per token=" << per_token << " azp=" << used
                           << " per channel=" << per_channel
                           << " bias=" << with_bias);
              const int64_t stride = g.k + 3;
              const auto rows = Strided<int8_t>(all[i].a, m, g.k, stride);
              std::vector<float> scales;
              std::vector<int32_t> zero_points;
              for (int64_t r = 0; r < m; ++r) {
                scales.push_back(!per_token ? 0.5f : r % 2 == 0 ? 1.0f : 0.5f);
                zero_points.push_back(!used       ? 0
                                      : per_token ? static_cast<int32_t>(r % 9)
                                                  : 7);
              }
              std::vector<float> c(static_cast<size_t>(m * g.n));
              ScaledLinearArgs args;
              args.a =
                  MatrixView<const int8_t>(rows.data(), {m, g.k}, {stride, 1});
              if (per_token) args.a_scales = DenseVector(scales.data(), m);
              if (per_token && used) {
                args.a_zero_points = DenseVector(zero_points.data(), m);
              }
              args.c = DenseMatrix(c.data(), m, g.n);
              ASSERT_TRUE(scratch_.Reserve(*plan, m, *executor_).ok());
              plan->Execute(args, scratch_, *executor_);
              std::vector<double> want;
              for (size_t at = 0; at < c.size(); ++at) {
                const size_t col = at % static_cast<size_t>(g.n);
                const size_t row = at / static_cast<size_t>(g.n);
                const double dot =
                    all[i].dots[at] - zero_points[row] * sums[col];
                want.push_back(dot * double{scales[row]} *
                               double{w_scales[per_channel ? col : 0]});
                if (with_bias) want[at] += double{bias[col]};
              }
              ASSERT_TRUE(AllEqual(c, RoundedTo<float>(want)));
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern
