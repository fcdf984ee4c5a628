#include "gemm/packed_scaled_linear.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/packed_plan_testutil.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/workers.h"

namespace quern {
namespace {

constexpr double kUnitF32 = 1.0 / (1 << 24);

// Everything but a: what a plan is made of.
struct Layer {
  PackedScaledLinearSpec spec;
  std::vector<int8_t> w;  // dense, in spec.order
  std::vector<float> w_scales;
  std::vector<float> bias;
};

// Activations as int8, and what belongs to their rows.
struct Rows : RowTerms {
  std::vector<int8_t> q;
};

class PackedScaledLinearTest : public PackedPlanTest {
 protected:
  PackedScaledLinearPlan Plan(const Layer& layer, int64_t padding = 0) {
    return ScaledPlan(layer.spec, layer.w, layer.w_scales, layer.bias, padding);
  }

  // dot[m, n], exact in double up to 2^53.
  static std::vector<double> Dots(int64_t m, const Layer& layer,
                                  const Rows& rows) {
    const int64_t k = layer.spec.k, n = layer.spec.n;
    std::vector<double> a = ToDoubles(rows.q);
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] -= rows.zero_points.empty()
                  ? layer.spec.a_zero_point
                  : rows.zero_points[i / static_cast<size_t>(k)];
    }
    return layer.spec.order == WeightOrder::kNK
               ? ReferenceLinear(m, n, k, a, ToDoubles(layer.w))
               : ReferenceGemm(m, n, k, a, ToDoubles(layer.w));
  }

  // Powers of two for scales: every step but the last rounding is exact.
  template <typename C>
  void ExpectExact(const Shape& s, int8_t lo, int8_t hi, Executor& executor) {
    SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    Layer layer;
    layer.spec.n = s.n;
    layer.spec.k = s.k;
    layer.spec.a = DType::kI8;
    layer.spec.c = DTypeOf<C>;
    layer.spec.order = s.order;
    layer.spec.zero_points = Int8ZeroPoint::kUsed;
    layer.w = SmallIntegers<int8_t>(rng, s.n * s.k, lo, hi);
    const bool per_channel = s.n % 2 == 0;
    for (int64_t i = 0; i < (per_channel ? s.n : 1); ++i) {
      layer.w_scales.push_back(
          std::ldexp(1.0f, static_cast<int>(rng.Integer(-3, 3))));
    }
    layer.bias = SmallIntegers<float>(rng, s.bias ? s.n : 0, -99, 99);
    Rows rows;
    rows.q = SmallIntegers<int8_t>(rng, s.m * s.k, lo, hi);
    for (int64_t i = 0; i < s.m; ++i) {
      rows.scales.push_back(
          std::ldexp(1.0f, static_cast<int>(rng.Integer(-3, 3))));
      rows.zero_points.push_back(static_cast<int32_t>(rng.Integer(-9, 9)));
    }
    auto want = Dots(s.m, layer, rows);
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t col = i % static_cast<size_t>(s.n);
      want[i] *= layer.w_scales[per_channel ? col : 0] *
                 rows.scales[i / static_cast<size_t>(s.n)];
      if (s.bias) want[i] += layer.bias[col];
    }
    const auto plan = Plan(layer, s.padding);
    EXPECT_TRUE(AllEqual(Run<int8_t, C>(plan, s, rows.q, executor, rows),
                         RoundedTo<C>(want)));
  }
};
QUERN_INSTANTIATE_ISA_TEST(PackedScaledLinearTest);

TEST_P(PackedScaledLinearTest, IsExactAtEveryRemainder) {
  int64_t i = 0;
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 3, 4, 5, 31, 64, 67}) {
      for (const int64_t m : {1, 2, 3, 5, 8, 13, 14, 15, 29}) {
        ++i;
        const Shape s{m, n, k, i % 4, 0, i % 2 == 0};
        ExpectExact<float>(
            s.In(i % 5 == 0 ? WeightOrder::kKN : WeightOrder::kNK), -128, 127,
            inline_);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(PackedScaledLinearTest, RoundsOnceToEachOutputType) {
  for (const int64_t m : {1, 9, 33}) {
    ExpectExact<BFloat16>({m, 50, 70, 1, 0, true}, -9, 9, inline_);
    ExpectExact<Float16>({m, 51, 70, 0, 0, true}, -9, 9, inline_);
  }
}

TEST_P(PackedScaledLinearTest, IsExactAcrossChunksBlocksAndWorkers) {
  const auto two = Workers(2);
  for (const int64_t k : {1023, 1024, 1025, 2500}) {
    ExpectExact<float>({5, 150, k, 0, 0, true}, -9, 9, *two);
  }
  for (const int64_t m : {255, 257, 513}) {
    ExpectExact<float>({m, 72, 40, 3, 0, true}, -128, 127, *two);
  }
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 1000}) {
      for (const int64_t m : {1, 16, 40}) {
        ExpectExact<float>({m, n, 4100, 0, 0, true}, -9, 9, executor);
      }
    }
  }
}

// Rows that are worth the threads: each worker quantises in scratch of its own,
// or else two of them would now and then write one row over the other's.
TEST_P(PackedScaledLinearTest, IsExactWhereThreadsQuantiseAtOnce) {
  const auto executor = Workers(3);
  for (int repeat = 0; repeat < 3; ++repeat) {
    ExpectExact<float>({200, 3, 4100}, -9, 9, *executor);
  }
}

// vpmaddubsw would saturate; 32 bits must hold the largest k.
TEST_P(PackedScaledLinearTest, DoesNotSaturateOrWrapAtTheExtremes) {
  using Plan = PackedScaledLinearPlan;
  for (const int64_t k :
       {int64_t{4}, int64_t{300}, Plan::kMaxKZeroPoint, Plan::kMaxK}) {
    const bool zero_points = k <= Plan::kMaxKZeroPoint;
    for (const int8_t a : {-128, 127}) {
      for (const int8_t w : {-128, 127}) {
        for (const int32_t zero_point : {-128, 0, 127}) {
          if (!zero_points && zero_point != 0) continue;
          Layer layer;
          layer.spec.n = 2;
          layer.spec.k = k;
          layer.spec.a = DType::kI8;
          layer.spec.c = DType::kF32;
          layer.spec.granularity = Int8Granularity::kPerTensor;
          if (zero_points) layer.spec.zero_points = Int8ZeroPoint::kUsed;
          layer.spec.a_zero_point = zero_point;
          layer.w.assign(static_cast<size_t>(2 * k), w);
          layer.w_scales = {1.0f};
          const std::vector<int8_t> q(static_cast<size_t>(k), a);
          const auto plan = this->Plan(layer);
          const double want = static_cast<double>(k) * (a - zero_point) * w;
          // On many workers k is divided, and the pieces are added elsewhere.
          for (const int workers : {1, 64}) {
            ManyWorkers executor(workers);
            EXPECT_EQ((Run<int8_t, float>(plan, Shape{1}, q, executor))[1],
                      static_cast<float>(want))
                << "k=" << k << " a=" << +a << " w=" << +w
                << " zero point=" << zero_point << " workers=" << workers;
          }
        }
      }
    }
  }
}

// Whatever the scales: the dot product to f32, two products and a sum.
TEST_P(PackedScaledLinearTest, StaysWithinTheDerivedBound) {
  TestRng rng;
  Layer layer;
  layer.spec.n = 200;
  layer.spec.k = 1100;
  layer.spec.a = DType::kI8;
  layer.spec.c = DType::kF32;
  layer.w = SmallIntegers<int8_t>(rng, 200 * 1100, -128, 127);
  layer.w_scales = UniformReals<float>(rng, 200, 0.001, 0.1);
  layer.bias = UniformReals<float>(rng, 200, -50, 50);
  const int64_t m = 17;
  Rows rows;
  rows.q = SmallIntegers<int8_t>(rng, m * 1100, -128, 127);
  rows.scales = UniformReals<float>(rng, m, 0.001, 0.1);
  auto products = Dots(m, layer, rows);
  std::vector<double> want;
  for (size_t i = 0; i < products.size(); ++i) {
    products[i] *= static_cast<double>(layer.w_scales[i % 200]) *
                   static_cast<double>(rows.scales[i / 200]);
    want.push_back(products[i] + static_cast<double>(layer.bias[i % 200]));
  }
  const auto plan = Plan(layer);
  EXPECT_TRUE(
      AllWithin(Run<int8_t, float>(plan, Shape{m}, rows.q, inline_, rows), want,
                [&](double expected, int64_t flat) {
                  // Three roundings of the product, one of the sum, and the
                  // second order.
                  return 1.001 * kUnitF32 *
                         (3 * std::abs(products[static_cast<size_t>(flat)]) +
                          std::abs(expected));
                }));
}

// Quantising inside gives the bits of quantising first.
template <typename A>
void QuantisesLikeTheOperator(
    const std::function<std::vector<float>(const Layer&, const std::vector<A>&,
                                           bool fused)>& run) {
  TestRng rng;
  for (const auto granularity :
       {Int8Granularity::kPerToken, Int8Granularity::kPerTensor}) {
    for (const auto zero_points :
         {Int8ZeroPoint::kNone, Int8ZeroPoint::kUsed}) {
      Layer layer;
      layer.spec.n = 37;
      layer.spec.k = 1100;
      layer.spec.c = DType::kF32;
      layer.spec.granularity = granularity;
      layer.spec.zero_points = zero_points;
      if (granularity == Int8Granularity::kPerTensor) {
        layer.spec.a_scale = 0.02f;
        if (zero_points == Int8ZeroPoint::kUsed) layer.spec.a_zero_point = -17;
      }
      layer.w = SmallIntegers<int8_t>(rng, 37 * 1100, -128, 127);
      layer.w_scales = UniformReals<float>(rng, 37, 0.001, 0.1);
      layer.bias = UniformReals<float>(rng, 37);
      auto a = UniformReals<A>(rng, 19 * 1100, -3, 2);
      for (size_t i = 0; i < 1100; ++i) a[2200 + i] = A{};  // a zero row
      a[1100] = FromDouble<A>(std::numeric_limits<double>::infinity());
      EXPECT_TRUE(AllBitsEqual(run(layer, a, true), run(layer, a, false)))
          << DTypeName(DTypeOf<A>) << " granularity " << int(granularity)
          << " zero points " << int(zero_points);
    }
  }
}

class FusedQuantisationTest : public PackedScaledLinearTest {
 protected:
  template <typename A>
  std::vector<float> RunBoth(Layer layer, const std::vector<A>& a, bool fused) {
    const int64_t m = 19, k = layer.spec.k;
    layer.spec.a = fused ? DTypeOf<A> : DType::kI8;
    const auto plan = Plan(layer);
    if (fused) return Run<A, float>(plan, Shape{m, 0, 0, 3}, a, inline_);
    Int8QuantizeSpec spec;
    spec.dtype = DTypeOf<A>;
    spec.granularity = layer.spec.granularity;
    spec.zero_points = layer.spec.zero_points;
    spec.scale = layer.spec.a_scale;
    spec.zero_point = layer.spec.a_zero_point;
    const auto quantize = Int8QuantizePlan::Create(spec);
    EXPECT_TRUE(quantize.ok()) << quantize.status();
    Rows rows;
    rows.q.resize(a.size());
    const bool per_token = spec.granularity == Int8Granularity::kPerToken;
    if (per_token) rows.scales.resize(static_cast<size_t>(m));
    if (per_token && spec.zero_points == Int8ZeroPoint::kUsed) {
      rows.zero_points.resize(static_cast<size_t>(m));
    }
    quantize->Execute(
        DenseMatrix(a.data(), m, k), DenseMatrix(rows.q.data(), m, k),
        DenseVector(rows.scales.data(),
                    static_cast<int64_t>(rows.scales.size())),
        DenseVector(rows.zero_points.data(),
                    static_cast<int64_t>(rows.zero_points.size())),
        inline_);
    return Run<int8_t, float>(plan, Shape{m}, rows.q, inline_, rows);
  }

  template <typename A>
  void ExpectSame() {
    QuantisesLikeTheOperator<A>(
        [this](const Layer& layer, const std::vector<A>& a, bool fused) {
          return RunBoth<A>(layer, a, fused);
        });
  }
};
QUERN_INSTANTIATE_ISA_TEST(FusedQuantisationTest);

TEST_P(FusedQuantisationTest, GivesTheBitsOfQuantisingFirst) {
  ExpectSame<BFloat16>();
  ExpectSame<Float16>();
  ExpectSame<float>();
}

TEST_P(PackedScaledLinearTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  Layer layer;
  layer.spec.n = 83;
  layer.spec.k = 2100;
  layer.spec.c = DType::kF32;
  layer.w = SmallIntegers<int8_t>(rng, 83 * 2100, -128, 127);
  layer.w_scales = UniformReals<float>(rng, 83, 0.001, 0.1);
  const int64_t m = 67;
  const auto a = UniformReals<BFloat16>(rng, m * 2100);
  const auto plan = Plan(layer);
  const auto batch = Run<BFloat16, float>(plan, Shape{m}, a, inline_);
  for (const int workers : {2, 3, 64}) {
    ManyWorkers executor(workers);
    EXPECT_TRUE(
        AllBitsEqual(Run<BFloat16, float>(plan, Shape{m}, a, executor), batch));
    for (const int64_t first : {0, 66}) {
      const std::vector<BFloat16> row(a.begin() + first * 2100,
                                      a.begin() + (first + 1) * 2100);
      const std::vector<float> want(batch.begin() + first * 83,
                                    batch.begin() + (first + 1) * 83);
      EXPECT_TRUE(AllBitsEqual(
          Run<BFloat16, float>(plan, Shape{1}, row, executor), want));
    }
  }
}

TEST_P(PackedScaledLinearTest, NoRowsAreNoWork) {
  Layer layer;
  layer.spec.n = 3;
  layer.spec.k = 2;
  layer.w.resize(6);
  layer.w_scales = {1.0f};
  const auto plan = Plan(layer);
  const MatrixView<const BFloat16> a(nullptr, {0, 2}, {2, 1});
  const MatrixView<BFloat16> c(nullptr, {0, 3}, {3, 1});
  EXPECT_EQ(plan.CheckArgs(a, AnyTensorView(), AnyTensorView(), c),
            absl::OkStatus());
  plan.Execute(a, c, Workspace(), inline_);
}

TEST_P(PackedScaledLinearTest, ManyThreadsMayExecuteAtOnce) {
  TestRng rng;
  Layer layer;
  layer.spec.n = 64;
  layer.spec.k = 600;
  layer.w = SmallIntegers<int8_t>(rng, 64 * 600, -128, 127);
  layer.w_scales = {0.01f};
  const auto a = UniformReals<BFloat16>(rng, 9 * 600);
  const auto plan = Plan(layer);
  const auto want = Run<BFloat16, BFloat16>(plan, Shape{9}, a, inline_);
  std::vector<std::vector<BFloat16>> got(8);
  std::vector<std::thread> threads;
  for (auto& result : got) {
    threads.emplace_back([&] {
      result.resize(want.size());
      InlineExecutor executor;
      auto memory = AlignedBuffer::Create(plan.WorkspaceBytes(9, 1));
      for (int i = 0; i < 20; ++i) {
        plan.Execute(DenseMatrix(a.data(), 9, 600),
                     DenseMatrix(result.data(), 9, 64), Workspace(*memory),
                     executor);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : got) EXPECT_TRUE(AllBitsEqual(result, want));
}

}  // namespace
}  // namespace quern
