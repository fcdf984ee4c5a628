// The shapes that vLLM and SGLang test their linear layers with, on LinearPlan
// by either implementation, with exact integers in place of their tolerances:
// several M, one after the other, on one plan; bias on and off; scales per
// token, per tensor, per channel; zero points on and off; a row stride of its
// own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/sanitized.h"
#include "quern/testing/workers.h"

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

class PeerGridsTest : public testing::TestWithParam<const char*> {
 protected:
  LinearPlan Plan(LinearSpec spec, const Grid& g, WeightFormat format,
                  const LinearSource& source) {
    LinearWeightsSpec weights_spec;
    weights_spec.n = g.n;
    weights_spec.k = g.k;
    weights_spec.format = format;
    const auto weights =
        LinearWeights::Pack(weights_spec, {source}, *executor_);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    spec.kernels = GetParam();
    auto plan = LinearPlan::Create(spec, *weights, *executor_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    return *std::move(plan);
  }
  void Execute(const LinearPlan& plan, const LinearArgs& args) {
    const auto bytes =
        plan.WorkspaceBytes(args.a.extent(0), executor_->num_workers());
    ASSERT_EQ(bytes.status(), absl::OkStatus());
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_EQ(memory.status(), absl::OkStatus());
    plan.Execute(args, Workspace(*memory), *executor_);
  }

  const std::unique_ptr<HwyExecutor> executor_ = Workers(2);
};
INSTANTIATE_TEST_SUITE_P(Kernels, PeerGridsTest,
                         testing::Values("packed", "onednn"));

TEST_P(PeerGridsTest, FloatsAreExact) {
  TestRng rng;
  for (const Grid& g : Grids()) {
    // 4 * 4 * 4096 < 2^24: exact in f32, in any order.
    const auto w = SmallIntegers<int8_t>(rng, g.n * g.k, -4, 4);
    const auto weights = Strided<BFloat16>(w, g.n, g.k, g.k);
    const auto bias = SmallIntegers<float>(rng, g.n, -99, 99);
    const std::vector<Rows> all = AllRows(rng, g, 4, ToDoubles(w));
    for (const bool with_bias : {true, false}) {
      if (!with_bias && g.n * g.k > 1 << 22) continue;
      LinearSource source;
      source.codes = DenseMatrix(weights.data(), g.n, g.k);
      if (with_bias) source.bias = DenseVector(bias.data(), g.n);
      const auto plan = Plan(LinearSpec(), g, WeightFormat::kBF16, source);
      for (size_t i = 0; i < g.ms.size(); ++i) {
        const int64_t m = g.ms[i];
        SCOPED_TRACE(testing::Message() << "n=" << g.n << " k=" << g.k
                                        << " m=" << m << " bias=" << with_bias);
        const int64_t stride = g.k + 5;
        const auto rows = Strided<BFloat16>(all[i].a, m, g.k, stride);
        std::vector<BFloat16> c(static_cast<size_t>(m * g.n));
        LinearArgs args;
        args.a = MatrixView<const BFloat16>(rows.data(), {m, g.k}, {stride, 1});
        args.c = DenseMatrix(c.data(), m, g.n);
        Execute(plan, args);
        std::vector<double> want = all[i].dots;
        for (size_t at = 0; with_bias && at < want.size(); ++at) {
          want[at] += double{bias[at % static_cast<size_t>(g.n)]};
        }
        ASSERT_TRUE(AllEqual(c, RoundedTo<BFloat16>(want)));
      }
    }
  }
}

// A layer of int8: which of its terms are there.
struct Terms {
  bool per_token, zeros, per_channel, bias;
};

// Scales are powers of two: the integers stay exact up to the last rounding.
TEST_P(PeerGridsTest, Int8IsExact) {
  std::vector<Terms> every;
  for (int bits = 0; bits < 16; ++bits) {
    every.push_back(
        {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0});
  }
  TestRng rng;
  for (const Grid& g : Grids()) {
    const auto w = SmallIntegers<int8_t>(rng, g.n * g.k, -20, 20);
    const std::vector<double> exact_w = ToDoubles(w);
    const std::vector<Rows> all = AllRows(rng, g, 20, exact_w);
    const std::vector<double> sums = ColumnSums(g.n, g.k, exact_w);
    const auto bias = SmallIntegers<float>(rng, g.n, -99, 99);
    for (const Terms& t : every) {
      // One of the sixteen for the large ones.
      if (g.n * g.k > 1 << 22 && &t != &every.back()) continue;
      LinearSpec spec;
      spec.a = DType::kI8;
      spec.c = DType::kF32;
      if (t.zeros) spec.zero_points = Int8ZeroPoint::kUsed;
      if (!t.per_token) {
        spec.granularity = Int8Granularity::kPerTensor;
        spec.a_scale = 0.5f;
        spec.a_zero_point = t.zeros ? 7 : 0;
      }
      std::vector<float> w_scales;
      for (int64_t i = 0; i < (t.per_channel ? g.n : 1); ++i) {
        w_scales.push_back(i % 3 == 0 ? 2.0f : 0.25f);
      }
      LinearSource source;
      source.codes = DenseMatrix(w.data(), g.n, g.k);
      source.scales =
          DenseVector(w_scales.data(), static_cast<int64_t>(w_scales.size()));
      if (t.bias) source.bias = DenseVector(bias.data(), g.n);
      const auto plan = Plan(spec, g, WeightFormat::kI8Channel, source);
      for (size_t i = 0; i < g.ms.size(); ++i) {
        const int64_t m = g.ms[i];
        SCOPED_TRACE(testing::Message()
                     << "n=" << g.n << " k=" << g.k << " m=" << m
                     << " per token=" << t.per_token << " azp=" << t.zeros
                     << " per channel=" << t.per_channel << " bias=" << t.bias);
        const int64_t stride = g.k + 3;
        const auto rows = Strided<int8_t>(all[i].a, m, g.k, stride);
        std::vector<float> scales;
        std::vector<int32_t> zero_points;
        for (int64_t r = 0; r < m; ++r) {
          scales.push_back(t.per_token && r % 2 == 0 ? 1.0f : 0.5f);
          zero_points.push_back(!t.zeros      ? 0
                                : t.per_token ? static_cast<int32_t>(r % 9)
                                              : 7);
        }
        std::vector<float> c(static_cast<size_t>(m * g.n));
        LinearArgs args;
        args.a = MatrixView<const int8_t>(rows.data(), {m, g.k}, {stride, 1});
        args.c = DenseMatrix(c.data(), m, g.n);
        if (t.per_token) args.a_scales = DenseVector(scales.data(), m);
        if (t.per_token && t.zeros) {
          args.a_zero_points = DenseVector(zero_points.data(), m);
        }
        Execute(plan, args);
        std::vector<double> want;
        for (size_t at = 0; at < c.size(); ++at) {
          const size_t col = at % static_cast<size_t>(g.n);
          const size_t row = at / static_cast<size_t>(g.n);
          const double dot = all[i].dots[at] - zero_points[row] * sums[col];
          want.push_back(dot * double{scales[row]} *
                         double{w_scales[t.per_channel ? col : 0]});
          if (t.bias) want[at] += double{bias[col]};
        }
        ASSERT_TRUE(AllEqual(c, RoundedTo<float>(want)));
      }
    }
  }
}

}  // namespace
}  // namespace quern
