// LinearPlan on weights of int8 with a scale for each column (W8A8), by the
// packed kernels.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/emulate_avx_vnni_int8.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr WeightCase kI8 = {WeightFormat::kI8Channel};

// Before GoogleTest asks which instruction sets there are.
const bool kHasVpdpbssd = EmulateAvxVnniInt8();

class LinearInt8Test : public LinearTest {
 protected:
  // Scales are powers of two, so that every step but the last rounding is
  // exact.
  template <typename C>
  void ExpectExact(const Shape& s, int64_t lo, int64_t hi,
                   const std::vector<Executor*>& executors,
                   WeightLayout layout = WeightLayout::kNK) {
    SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const auto scale = PowersOfTwo(-3, 3);
    KnownWeights w =
        CodedWeights(rng, {WeightFormat::kI8Channel, layout}, s, lo, hi, scale);
    if (s.n % 2 != 0) w.scales.resize(1);
    w.bias = SmallIntegers<float>(rng, s.bias ? s.n : 0, -99, 99);
    const auto q = SmallIntegers<int8_t>(rng, s.m * s.k, lo, hi);
    RowTerms rows;
    for (int64_t i = 0; i < s.m; ++i) {
      rows.scales.push_back(static_cast<float>(scale(rng)));
      rows.zero_points.push_back(static_cast<int32_t>(rng.Integer(-9, 9)));
    }
    LinearSpec spec = SpecOf<int8_t, C>();
    spec.zero_points = Int8ZeroPoint::kUsed;
    const auto plan = Plan(spec, w);
    const auto want = RoundedTo<C>(ProductOf(w, s.m, Dequantised(q, rows)));
    for (Executor* executor : executors) {
      EXPECT_TRUE(
          AllEqual(RunLinear<int8_t, C>(plan, s, q, *executor, rows), want))
          << executor->num_workers() << " workers";
    }
  }

  // Quantising inside gives the bits of quantising first.
  template <typename A>
  void ExpectBitsOfQuantisingFirst(Int8Granularity granularity,
                                   Int8ZeroPoint zero_points) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<A>) << " granularity " << int(granularity)
                 << " zero points " << int(zero_points));
    TestRng rng;
    const Shape s{19, 37, 1100, 3, 0, true};
    const KnownWeights w = RealWeights(rng, kI8, s);
    const bool per_token = granularity == Int8Granularity::kPerToken;
    const bool used = zero_points == Int8ZeroPoint::kUsed;
    LinearSpec spec = SpecOf<A, float>();
    spec.granularity = granularity;
    spec.zero_points = zero_points;
    if (!per_token) {
      spec.a_scale = 0.02f;
      spec.a_zero_point = used ? -17 : 0;
    }
    auto a = UniformReals<A>(rng, s.m * s.k, -3, 2);
    for (size_t i = 0; i < 1100; ++i) a[2200 + i] = A{};  // a zero row
    a[1100] = FromDouble<A>(std::numeric_limits<double>::infinity());
    const auto fused = RunLinear<A, float>(Plan(spec, w), s, a, inline_);

    Int8QuantizeSpec quantize;
    quantize.dtype = DTypeOf<A>;
    quantize.granularity = granularity;
    quantize.zero_points = zero_points;
    quantize.scale = spec.a_scale;
    quantize.zero_point = spec.a_zero_point;
    const auto quantize_plan = Int8QuantizePlan::Create(quantize);
    ASSERT_EQ(quantize_plan.status(), absl::OkStatus());
    std::vector<int8_t> q(a.size());
    RowTerms rows;
    rows.scales.resize(static_cast<size_t>(per_token ? s.m : 0));
    rows.zero_points.resize(static_cast<size_t>(per_token && used ? s.m : 0));
    quantize_plan->Execute(
        DenseMatrix(a.data(), s.m, s.k), DenseMatrix(q.data(), s.m, s.k),
        DenseVector(rows.scales.data(),
                    static_cast<int64_t>(rows.scales.size())),
        DenseVector(rows.zero_points.data(),
                    static_cast<int64_t>(rows.zero_points.size())),
        inline_);
    spec.a = DType::kI8;
    EXPECT_TRUE(AllBitsEqual(
        fused, RunLinear<int8_t, float>(Plan(spec, w), s, q, inline_, rows)));
  }
};
QUERN_INSTANTIATE_INT8_ISA_TEST(LinearInt8Test);

TEST(LinearInt8EmulatedTest, RunsWhereItCan) {
  const auto isas = SupportedIsas();
  EXPECT_EQ(std::count(isas.begin(), isas.end(), kAvx2VnniInt8),
            kHasVpdpbssd ? 1 : 0);
}

// A leaf is asked for by name, and what stands for it would pass unseen.
TEST_P(LinearInt8Test, SaysWhichProductsItTakes) {
  TestRng rng;
  const auto plan =
      Plan(SpecOf<int8_t, float>(), ExactWeights(rng, kI8, {1, 3, 2}));
  const std::string text = plan.Explain(1);
  const bool leaf = std::string(isa()) == kAvxVnniInt8Target;
  EXPECT_EQ(absl::StrContains(text, "s8 x s8 quads"), leaf) << text;
  EXPECT_EQ(absl::StrContains(text, kAvxVnniInt8Target), leaf) << text;
}

TEST_P(LinearInt8Test, IsExactAtEveryRemainder) {
  int64_t i = 0;
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 3, 4, 5, 31, 64, 67}) {
      for (const int64_t m : {1, 2, 3, 5, 8, 13, 14, 15, 29}) {
        ++i;
        Shape s{m, n, k, i % 4, 0, i % 2 == 0};
        ExpectExact<float>(s, -128, 127, {&inline_},
                           i % 5 == 0 ? WeightLayout::kKN : WeightLayout::kNK);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(LinearInt8Test, RoundsOnceToEachOutputType) {
  for (const int64_t m : {1, 9, 33}) {
    ExpectExact<BFloat16>({m, 50, 70, 1, 0, true}, -9, 9, {&inline_});
    ExpectExact<Float16>({m, 51, 70, 0, 0, true}, -9, 9, {&inline_});
  }
}

TEST_P(LinearInt8Test, IsExactAcrossChunksBlocksAndWorkers) {
  const auto two = Workers(2);
  for (const int64_t k : {1023, 1024, 1025, 2500}) {
    ExpectExact<float>({5, 150, k, 0, 0, true}, -9, 9, {two.get()});
  }
  for (const int64_t m : {255, 257, 513}) {
    ExpectExact<float>({m, 72, 40, 3, 0, true}, -128, 127, {two.get()});
  }
  ManyWorkers two_in_turn(2), five(5), many(64);
  for (const int64_t n : {3, 16, 100, 1000}) {
    for (const int64_t m : {1, 16, 40}) {
      if (emulated() && n * m > 100) continue;
      ExpectExact<float>({m, n, 4100, 0, 0, true}, -9, 9,
                         {&two_in_turn, &five, &many});
    }
  }
}

// Each worker quantises in scratch of its own, or else two of them would now
// and then write one row over the other's. Two threads spin where there are two
// CPUs; with more threads than CPUs the first often does all the work.
TEST_P(LinearInt8Test, IsExactWhereThreadsQuantiseAtOnce) {
  const auto executor = Workers(2);
  ExpectExact<float>(
      {emulated() ? 20 : 200, 3, 4100}, -9, 9,
      std::vector<Executor*>(emulated() ? 5 : 50, executor.get()));
}

// Here vpmaddubsw would saturate. Sums of the largest k must fit 32 bits.
TEST_P(LinearInt8Test, DoesNotSaturateOrWrapAtTheExtremes) {
  for (const int64_t k : {int64_t{4}, int64_t{300}, LinearPlan::kMaxKZeroPoint,
                          LinearWeights::kMaxKI8}) {
    const bool zero_points = k <= LinearPlan::kMaxKZeroPoint;
    const Shape s{1, 2, k};
    for (const int weight : {-128, 127}) {
      KnownWeights w = EmptyWeights(kI8, s);
      w.codes.assign(static_cast<size_t>(2 * k), weight);
      w.scales = {1.0};
      for (const int8_t a : {-128, 127}) {
        const std::vector<int8_t> q(static_cast<size_t>(k), a);
        for (const int32_t zero_point : {-128, 0, 127}) {
          if (!zero_points && zero_point != 0) continue;
          LinearSpec spec = SpecOf<int8_t, float>();
          spec.granularity = Int8Granularity::kPerTensor;
          if (zero_points) spec.zero_points = Int8ZeroPoint::kUsed;
          spec.a_zero_point = zero_point;
          const auto plan = Plan(spec, w);
          const double want =
              static_cast<double>(k) * (a - zero_point) * weight;
          // On many workers k is divided, and the pieces are added elsewhere.
          for (const int workers : {1, 64}) {
            if (emulated() && k > 300 && zero_point != 127 && zero_points) {
              continue;
            }
            ManyWorkers executor(workers);
            EXPECT_EQ((RunLinear<int8_t, float>(plan, s, q, executor))[1],
                      static_cast<float>(want))
                << "k=" << k << " a=" << +a << " w=" << weight
                << " zero point=" << zero_point << " workers=" << workers;
          }
        }
      }
    }
  }
}

// Whatever the scales: the dot product to f32, two products and a sum.
TEST_P(LinearInt8Test, StaysWithinTheDerivedBound) {
  TestRng rng;
  const Shape s{17, 200, 1100, 0, 0, true};
  const KnownWeights w = RealWeights(rng, kI8, s);
  const auto q = SmallIntegers<int8_t>(rng, s.m * s.k, -128, 127);
  RowTerms rows;
  rows.scales = UniformReals<float>(rng, s.m, 0.001, 0.1);
  const auto plan = Plan(SpecOf<int8_t, float>(), w);
  const auto bounds = BoundsOf(w, s.m, Dequantised(q, rows));
  EXPECT_TRUE(AllWithin(
      RunLinear<int8_t, float>(plan, s, q, inline_, rows),
      ProductOf(w, s.m, Dequantised(q, rows)),
      [&](double, int64_t flat) { return bounds[static_cast<size_t>(flat)]; }));
}

TEST_P(LinearInt8Test, GivesTheBitsOfQuantisingFirst) {
  for (const auto granularity :
       {Int8Granularity::kPerToken, Int8Granularity::kPerTensor}) {
    for (const auto zeros : {Int8ZeroPoint::kNone, Int8ZeroPoint::kUsed}) {
      ExpectBitsOfQuantisingFirst<BFloat16>(granularity, zeros);
      ExpectBitsOfQuantisingFirst<Float16>(granularity, zeros);
      ExpectBitsOfQuantisingFirst<float>(granularity, zeros);
    }
  }
}

TEST_P(LinearInt8Test, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  const Shape s{emulated() ? 23 : 67, 83, 2100};
  ExpectRowsAlone<BFloat16>(
      Plan(SpecOf<BFloat16, float>(), RealWeights(rng, kI8, s)), s, rng);
}

TEST_P(LinearInt8Test, NoRowsAreNoWork) {
  TestRng rng;
  ExpectNoRowsAreNoWork<BFloat16, BFloat16>(
      Plan(SpecOf<BFloat16, BFloat16>(), ExactWeights(rng, kI8, {0, 3, 2})));
}

TEST_P(LinearInt8Test, ManyThreadsMayExecuteAtOnce) {
  TestRng rng;
  const auto plan =
      Plan(SpecOf<BFloat16, BFloat16>(), RealWeights(rng, kI8, {9, 64, 600}));
  ExpectThreadsAgree<BFloat16, BFloat16>(plan, 9, rng);
}

}  // namespace
}  // namespace quern
