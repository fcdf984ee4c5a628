#include "gemm/onednn/scaled_linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <ostream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/onednn/scratch.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/workers.h"

namespace quern {
namespace {

using Spec = OneDnnScaledLinearSpec;
using Plan = OneDnnScaledLinearPlan;
using Activation = Spec::Activation;

// How a layer is quantised.
struct Mode {
  Activation activation = Activation::kPerToken;
  bool zero_points = false;
  bool per_channel = true;
  bool bias = false;
};

std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << (mode.activation == Activation::kPerTensor ? "per tensor"
                                                           : "per token")
             << " zero_points=" << mode.zero_points
             << " per_channel=" << mode.per_channel << " bias=" << mode.bias;
}

std::vector<Mode> AllModes() {
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
std::vector<float> Powers(Rng& rng, int64_t count, int64_t lo, int64_t hi) {
  std::vector<float> v;
  for (int64_t i = 0; i < count; ++i) {
    v.push_back(std::ldexp(1.0f, static_cast<int>(rng.Integer(lo, hi))));
  }
  return v;
}

Layer RandomLayer(Rng& rng, int64_t n, int64_t k, const Mode& mode) {
  Layer layer{n, k, mode, {}, {}, {}};
  layer.w = SmallIntegers<int8_t>(rng, n * k, -128, 127);
  layer.w_scales =
      UniformReals<float>(rng, mode.per_channel ? n : 1, 0.001, 0.01);
  if (mode.bias) layer.bias = UniformReals<float>(rng, n, -3, 3);
  return layer;
}

Rows RandomRows(Rng& rng, int64_t m, const Layer& layer) {
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
void MakeExact(Rng& rng, Layer& layer) {
  layer.w_scales =
      Powers(rng, static_cast<int64_t>(layer.w_scales.size()), -1, 1);
  if (layer.mode.bias) {
    layer.bias = SmallIntegers<float>(rng, layer.n, -99, 99);
  }
}
void MakeExact(Rng& rng, Rows& rows) {
  rows.scales = Powers(rng, static_cast<int64_t>(rows.scales.size()), -1, 1);
}

// The two halves of a result before rounding: scaled sum, and bias.
struct Exact {
  std::vector<double> products;
  std::vector<double> values;
};

Exact Reference(const Layer& layer, const Rows& rows) {
  const auto at = [](const auto& v, int64_t i) {
    return static_cast<double>(v[v.size() == 1 ? 0 : static_cast<size_t>(i)]);
  };
  const int64_t m = rows.m, n = layer.n, k = layer.k;
  std::vector<double> a = ToDoubles(rows.a);
  for (int64_t i = 0; i < m * k && !rows.zero_points.empty(); ++i) {
    a[static_cast<size_t>(i)] -= at(rows.zero_points, i / k);
  }
  Exact exact;
  // Integers below 2^53: exact in double.
  exact.products = ReferenceLinear(m, n, k, a, ToDoubles(layer.w));
  for (int64_t i = 0; i < m * n; ++i) {
    double& p = exact.products[static_cast<size_t>(i)];
    p *= at(rows.scales, i / n) * at(layer.w_scales, i % n);
    exact.values.push_back(p +
                           (layer.bias.empty() ? 0.0 : at(layer.bias, i % n)));
  }
  return exact;
}

// Runs everything in guarded memory.
class Runner {
 public:
  template <typename Out>
  static Plan Create(const Layer& layer, WeightOrder order = WeightOrder::kNK,
                     int64_t padding = 0) {
    Spec spec;
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
    auto plan = Plan::Create(
        spec, weights.view(), scales.view(),
        layer.bias.empty() ? AnyTensorView() : AnyTensorView(bias.view()),
        executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  template <typename Out>
  static std::vector<Out> Run(const Plan& plan, const Rows& rows,
                              Executor& executor, OneDnnScratch& scratch,
                              int64_t padding = 0, Edge edge = Edge::kEnd) {
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

template <typename T>
class OneDnnScaledLinearTest : public testing::Test {
 protected:
  void ExpectExact(const Layer& layer, const Rows& rows, Executor& executor,
                   WeightOrder order = WeightOrder::kNK, int64_t padding = 0) {
    const Plan plan = Runner::Create<T>(layer, order, padding);
    SCOPED_TRACE(testing::Message()
                 << "m=" << rows.m << " n=" << layer.n << " k=" << layer.k
                 << " " << layer.mode << " padding=" << padding << " "
                 << plan.Explain(rows.m));
    // Sums are rounded to f32, then to T: no bit is lost before that.
    const auto f32 = RoundedTo<float>(Reference(layer, rows).values);
    EXPECT_TRUE(
        AllEqual(Runner::Run<T>(plan, rows, executor, scratch_, padding,
                                rows.m % 2 == 0 ? Edge::kBegin : Edge::kEnd),
                 RoundedTo<T>(ToDoubles(f32))));
  }

  // f32 roundings of the sum, the scales' product, the product and the result,
  // then one to T.
  void ExpectClose(const Plan& plan, const Layer& layer, const Rows& rows,
                   Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << "m=" << rows.m << " n=" << layer.n << " k=" << layer.k
                 << " " << layer.mode << " " << plan.Explain(rows.m));
    const Exact want = Reference(layer, rows);
    const double u = UnitRoundoff<float>();
    EXPECT_TRUE(AllWithin(
        Runner::Run<T>(plan, rows, executor, scratch_), want.values,
        [&](double value, int64_t flat) {
          const double product =
              std::abs(want.products[static_cast<size_t>(flat)]);
          const double f32 = 1.0001 * u * (3 * product + std::abs(value));
          return f32 + UnitRoundoff<T>() * (std::abs(value) + f32) +
                 RoundingBound<T>(0);
        }));
  }

  InlineExecutor inline_;
  OneDnnScratch scratch_;
};

using Types = testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(OneDnnScaledLinearTest, Types);

TYPED_TEST(OneDnnScaledLinearTest, IsExactOnIntegersAtEveryRemainder) {
  TestRng rng;
  const auto executor = Workers(2);
  const std::vector<Mode> modes = AllModes();
  size_t next = 0;
  for (const int64_t n : {1, 15, 16, 17, 33, 530}) {
    for (const int64_t k : {1, 3, 4, 67, 129}) {
      for (const int64_t m : {1, 2, 5, 17}) {
        const Mode& mode = modes[next++ % modes.size()];
        Layer layer = RandomLayer(rng, n, k, mode);
        MakeExact(rng, layer);
        Rows rows = RandomRows(rng, m, layer);
        MakeExact(rng, rows);
        const int64_t variant = n + k + m;
        this->ExpectExact(
            layer, rows, *executor,
            variant % 3 == 0 ? WeightOrder::kKN : WeightOrder::kNK,
            variant % 4);
      }
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, IsExactAcrossRowBlocks) {
  TestRng rng;
  const auto executor = Workers(2);
  for (const Mode& mode : AllModes()) {
    for (const int64_t m : {255, 256, 257, 513}) {
      Layer layer = RandomLayer(rng, 70, 40, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, m, layer);
      MakeExact(rng, rows);
      this->ExpectExact(layer, rows, *executor, WeightOrder::kNK, 3);
    }
  }
}

// What vpmaddubsw would saturate: sums of two products beyond 2^15.
TYPED_TEST(OneDnnScaledLinearTest, DoesNotSaturateAtTheExtremes) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias) continue;
    for (const int64_t k : {2, 4, 64, 1023, 1025, 2049}) {
      Layer layer = RandomLayer(rng, 20, k, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, 4, layer);
      MakeExact(rng, rows);
      const int8_t extremes[] = {-128, 127};
      for (int64_t i = 0; i < 4 * k; ++i) {
        rows.a[static_cast<size_t>(i)] = extremes[i / k % 2];
      }
      for (int64_t i = 0; i < 20 * k; ++i) {
        layer.w[static_cast<size_t>(i)] = extremes[i / k % 2];
      }
      for (size_t i = 0; i < rows.zero_points.size(); ++i) {
        rows.zero_points[i] = extremes[i / 2 % 2];
      }
      this->ExpectExact(layer, rows, this->inline_);
    }
  }
}

// Terms that cancel: every bit of the large sums on the way counts.
TYPED_TEST(OneDnnScaledLinearTest, KeepsEveryBitOfLongSums) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias || !mode.per_channel) continue;
    const int64_t k = 65792;
    Layer layer = RandomLayer(rng, 3, k, mode);
    MakeExact(rng, layer);
    Rows rows = RandomRows(rng, 2, layer);
    MakeExact(rng, rows);
    // The first half of k adds 2^29, the second takes all away but a little.
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t col = 0; col < 3; ++col) {
        layer.w[static_cast<size_t>(col * k + i)] = i < k / 2 ? -128 : 127;
      }
      for (int64_t row = 0; row < 2; ++row) {
        rows.a[static_cast<size_t>(row * k + i)] =
            i % 1000 == 7 ? static_cast<int8_t>(i % 127) : -128;
      }
    }
    this->ExpectExact(layer, rows, this->inline_);
  }
}

TYPED_TEST(OneDnnScaledLinearTest, TakesTheLargestK) {
  for (const Mode& mode : AllModes()) {
    if (mode.bias || mode.per_channel) continue;
    const bool bounded =
        mode.zero_points && mode.activation == Activation::kPerTensor;
    const int64_t k = bounded ? Plan::kMaxKZeroPoint : Plan::kMaxK;
    // f16 holds up to 65504.
    Layer layer{2, k, mode, {}, {0x1p-10f}, {}};
    layer.w.assign(static_cast<size_t>(2 * k), -128);
    Rows rows{2, {}, {0x1p-10f}, {}};
    rows.a.assign(static_cast<size_t>(2 * k), -128);
    if (mode.activation == Activation::kPerToken) rows.scales.push_back(0.5f);
    if (mode.zero_points) rows.zero_points.push_back(127);
    if (mode.zero_points && mode.activation == Activation::kPerToken) {
      rows.zero_points.push_back(1 << 28);
    }
    this->ExpectExact(layer, rows, this->inline_);
  }
}

// The shapes of vLLM's test_onednn, and its sequences of m on one plan.
TYPED_TEST(OneDnnScaledLinearTest, RealScalesStayWithinTheDerivedBound) {
  TestRng rng;
  const auto executor = Workers(2);
  const int64_t shapes[][2] = {{256, 128}, {1023, 491}, {1001, 15}};
  for (const auto& shape : shapes) {
    for (const Mode& mode : AllModes()) {
      const Layer layer = RandomLayer(rng, shape[0], shape[1], mode);
      const Plan plan = Runner::Create<TypeParam>(
          layer, mode.bias ? WeightOrder::kKN : WeightOrder::kNK);
      for (const int64_t m : {16, 1, 32, 128, 64, 1, 17, 1, 31, 17}) {
        if (QuickTests() && m > 17) continue;
        this->ExpectClose(plan, layer, RandomRows(rng, m, layer), *executor);
      }
      EXPECT_EQ(plan.cache_stats().evictions, 0);
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, TheSameForALayerOfAModel) {
  if (QuickTests()) GTEST_SKIP() << "large";
  TestRng rng;
  const auto executor = Workers(2);
  for (const Activation activation :
       {Activation::kPerToken, Activation::kPerTensor}) {
    const Layer layer =
        RandomLayer(rng, 4096, 4096, {activation, true, true, true});
    const Plan plan = Runner::Create<TypeParam>(layer);
    for (const int64_t m : {16, 1}) {
      this->ExpectClose(plan, layer, RandomRows(rng, m, layer), *executor);
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, ThreadsAndNeighboursChangeNoBit) {
  TestRng rng;
  const int64_t n = 1100, k = 1300, m = 300;
  for (const Mode& mode : AllModes()) {
    if (mode.bias != mode.zero_points || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, n, k, mode);
    const Plan plan = Runner::Create<TypeParam>(layer);
    Rows rows = RandomRows(rng, m, layer);
    const auto want =
        Runner::Run<TypeParam>(plan, rows, this->inline_, this->scratch_);
    for (const int workers : {2, 3, 5}) {
      const auto executor = Workers(workers);
      EXPECT_TRUE(AllBitsEqual(
          Runner::Run<TypeParam>(plan, rows, *executor, this->scratch_), want))
          << workers;
    }
    for (const int64_t fewer : {257, 200, 33, 17, 8, 3, 2, 1}) {
      rows.m = fewer;
      rows.a.resize(static_cast<size_t>(fewer * k));
      if (mode.activation == Activation::kPerToken) {
        rows.scales.resize(static_cast<size_t>(fewer));
        if (mode.zero_points) {
          rows.zero_points.resize(static_cast<size_t>(fewer));
        }
      }
      const std::vector<TypeParam> first(want.begin(),
                                         want.begin() + fewer * n);
      EXPECT_TRUE(AllBitsEqual(
          Runner::Run<TypeParam>(plan, rows, this->inline_, this->scratch_),
          first))
          << fewer;
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, EightThreadsMayExecuteAtOnce) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (!mode.bias || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, 96, 130, mode);
    const Plan plan = Runner::Create<TypeParam>(layer);
    std::vector<Rows> rows;
    std::vector<std::vector<TypeParam>> want;
    // Another plan: the threads below find no kernel ready.
    const Plan first = Runner::Create<TypeParam>(layer);
    for (int64_t m = 1; m <= 80; m += 3) {
      rows.push_back(RandomRows(rng, m, layer));
      want.push_back(Runner::Run<TypeParam>(first, rows.back(), this->inline_,
                                            this->scratch_));
    }
    std::vector<std::vector<std::vector<TypeParam>>> got(8);
    std::vector<std::thread> threads;
    for (auto& mine : got) {
      threads.emplace_back([&] {
        InlineExecutor executor;
        OneDnnScratch scratch;
        for (const Rows& some : rows) {
          mine.push_back(Runner::Run<TypeParam>(plan, some, executor, scratch));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& mine : got) {
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(AllBitsEqual(mine[i], want[i])) << rows[i].m;
      }
    }
  }
}

TYPED_TEST(OneDnnScaledLinearTest, NoRowsIsNoWork) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const Layer layer = RandomLayer(rng, 16, 16, mode);
    const Plan plan = Runner::Create<TypeParam>(layer);
    const float scale = 1.0f;
    const int32_t zero = 0;
    const int64_t count = mode.activation == Activation::kPerTensor ? 1 : 0;
    OneDnnScaledLinearArgs args;
    args.a = DenseMatrix<const int8_t>(nullptr, 0, 16);
    args.c = DenseMatrix<TypeParam>(nullptr, 0, 16);
    args.scales = DenseVector<const float>(&scale, count);
    if (mode.zero_points) {
      args.zero_points = DenseVector<const int32_t>(&zero, count);
    }
    EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
    plan.Execute(args, this->scratch_, this->inline_);
    EXPECT_EQ(this->scratch_.bytes(), 0u);
  }
}

TYPED_TEST(OneDnnScaledLinearTest, UsesNoReferenceKernel) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    const Plan plan =
        Runner::Create<TypeParam>(RandomLayer(rng, 256, 128, mode));
    for (const int64_t m : {1, 100, 256}) {
      EXPECT_FALSE(absl::StartsWith(plan.Explain(m), "ref")) << plan.Explain(m);
    }
    if (mode.bias && mode.per_channel) {
      std::cout << mode << ": " << plan.Explain(16) << "\n";
    }
  }
}

class ScaledEpilogueTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(ScaledEpilogueTest);

TEST_P(ScaledEpilogueTest, IsExactAtEveryRemainder) {
  TestRng rng;
  InlineExecutor executor;
  OneDnnScratch scratch;
  for (const Mode& mode : AllModes()) {
    if (mode.activation == Activation::kPerTensor) continue;
    for (const int64_t n : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33}) {
      Layer layer = RandomLayer(rng, n, 60, mode);
      MakeExact(rng, layer);
      Rows rows = RandomRows(rng, 3, layer);
      MakeExact(rng, rows);
      const Plan plan = Runner::Create<float>(layer);
      EXPECT_RAN_ON(plan);
      EXPECT_TRUE(AllEqual(Runner::Run<float>(plan, rows, executor, scratch, 1),
                           Reference(layer, rows).values))
          << n;
    }
  }
}

}  // namespace
}  // namespace quern
