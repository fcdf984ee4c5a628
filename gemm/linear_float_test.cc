// LinearPlan on weights of f32, bf16 and f16, by the packed kernels.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using Format = WeightFormat;

class LinearFloatTest : public LinearTest {
 protected:
  // Small integers, exact in f32; the reference is rounded once to C.
  template <typename A, typename C>
  void ExpectExact(const WeightCase& c, const Shape& s,
                   const std::vector<Executor*>& executors) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<A>) << " by " << c << " to "
                 << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng;
    const auto a = SmallIntegers<A>(rng, s.m * s.k);
    const auto w = ExactWeights(rng, c, s);
    const auto plan = Plan(SpecOf<A, C>(), w);
    const auto want = RoundedTo<C>(ProductOf(w, s.m, ToDoubles(a)));
    for (Executor* executor : executors) {
      EXPECT_TRUE(AllEqual(RunLinear<A, C>(plan, s, a, *executor), want))
          << executor->num_workers() << " workers";
    }
  }

  template <typename A>
  void ExpectExactAtEveryRemainder(Format format) {
    int64_t i = 0;
    for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
      for (const int64_t k : {1, 2, 3, 16, 31, 33, 67}) {
        for (const int64_t m : {1, 2, 3, 5, 8, 13, 14, 15, 29}) {
          ++i;
          Shape s{m, n, k, i % 4, i % 3, i % 2 == 0};
          const auto layout =
              i % 5 == 0 ? WeightLayout::kKN : WeightLayout::kNK;
          ExpectExact<A, float>({format, layout}, s, {&inline_});
          if (HasFailure()) return;
        }
      }
    }
  }

  template <typename A, typename C>
  void ExpectRealsWithinBound(Format format) {
    TestRng rng;
    const auto executor = Workers(2);
    Shape s{1, 200, 1100, 0, 0, true};
    const auto w = RealWeights(rng, {format}, s);
    const auto plan = Plan(SpecOf<A, C>(), w);
    for (const int64_t m : {1, 5, 65}) {
      s.m = m;
      SCOPED_TRACE(testing::Message() << s << " " << plan.Explain(m));
      const auto a = UniformReals<A>(rng, m * s.k);
      EXPECT_TRUE(IsWithinBound(RunLinear<A, C>(plan, s, a, *executor), w, m,
                                ToDoubles(a)));
    }
  }

  // a plan of one column of `codes`.
  LinearPlan ColumnPlan(Format format, const std::vector<double>& codes) {
    Shape s{1, 1, static_cast<int64_t>(codes.size())};
    KnownWeights w = EmptyWeights({format}, s);
    w.codes = codes;
    return Plan(SpecOf<float, float>(), w);
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearFloatTest);

TEST_P(LinearFloatTest, IsExactOnSmallIntegersAtEveryRemainderOfBF16) {
  ExpectExactAtEveryRemainder<BF>(Format::kBF16);
}
TEST_P(LinearFloatTest, IsExactOnSmallIntegersAtEveryRemainderOfF16) {
  ExpectExactAtEveryRemainder<F16>(Format::kF16);
}
TEST_P(LinearFloatTest, IsExactOnSmallIntegersAtEveryRemainderOfF32) {
  ExpectExactAtEveryRemainder<float>(Format::kF32);
}

TEST_P(LinearFloatTest, MultipliesEveryPairOfTypes) {
  for (const int64_t m : {1, 9, 15}) {
    const Shape s{m, 35, 37, 1, 0, true};
    ExpectExact<BF, BF>({Format::kF16}, s, {&inline_});
    ExpectExact<BF, F16>({Format::kF32}, s, {&inline_});
    ExpectExact<F16, F16>({Format::kBF16}, s, {&inline_});
    ExpectExact<F16, BF>({Format::kF32}, s, {&inline_});
    ExpectExact<float, BF>({Format::kBF16}, s, {&inline_});
    ExpectExact<float, F16>({Format::kF16}, s, {&inline_});
    ExpectExact<BF, BF>({Format::kBF16}, s, {&inline_});
    ExpectExact<F16, F16>({Format::kF16}, s, {&inline_});
    ExpectExact<float, BF>({Format::kF32}, s, {&inline_});
  }
}

TEST_P(LinearFloatTest, IsExactAcrossChunksOfK) {
  const auto executor = Workers(2);
  for (const int64_t k : {255, 256, 257, 511, 512, 513, 1024, 1537}) {
    for (const int64_t m : {1, 4, 17}) {
      const Shape s{m, 150, k, 0, 0, true};
      ExpectExact<BF, float>({Format::kBF16}, s, {executor.get()});
      ExpectExact<float, float>({Format::kF32}, s, {executor.get()});
    }
  }
}

TEST_P(LinearFloatTest, IsExactAcrossBlocksOfRows) {
  const auto executor = Workers(2);
  for (const int64_t m : {255, 256, 257, 513}) {
    ExpectExact<BF, BF>({Format::kBF16}, {m, 72, 40, 3, 0, true},
                        {executor.get()});
  }
}

TEST_P(LinearFloatTest, IsExactHoweverManyWorkersDivideIt) {
  // Shapes go from one panel, whose k must be divided, to more tasks than
  // workers.
  ManyWorkers two(2), five(5), many(64);
  for (const int64_t n : {3, 16, 100, 1000}) {
    for (const int64_t m : {1, 16, 40}) {
      ExpectExact<BF, float>({Format::kBF16}, {m, n, 2100, 0, 0, true},
                             {&two, &five, &many});
    }
  }
}

TEST_P(LinearFloatTest, RealsStayWithinTheDerivedBound) {
  ExpectRealsWithinBound<BF, float>(Format::kBF16);
  ExpectRealsWithinBound<BF, BF>(Format::kBF16);
  ExpectRealsWithinBound<float, float>(Format::kBF16);
  ExpectRealsWithinBound<F16, F16>(Format::kF16);
  ExpectRealsWithinBound<float, float>(Format::kF32);
}

TEST_P(LinearFloatTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  const Shape s{67, 83, 1700};
  const auto plan =
      Plan(SpecOf<BF, float>(), RealWeights(rng, {Format::kBF16}, s));
  ExpectRowsAlone<BF>(plan, s, rng);
}

TEST_P(LinearFloatTest, NeverRoundsItsOperands) {
  // 1 + 2^-10 is lost in bf16, 1 + 2^-20 in f16 too; the large terms cancel.
  const Shape s{1, 1, 2};
  const float tiny = 1.0f / (1 << 20);
  const auto bf16 = ColumnPlan(Format::kBF16, {1.0, -1.0});
  EXPECT_EQ((RunLinear<float, float>(bf16, s, {1.0f + tiny, 1.0f}, inline_))[0],
            tiny);
  const auto f16 = ColumnPlan(Format::kF16, {1.0 + 1.0 / 1024, -1.0});
  EXPECT_EQ((RunLinear<float, float>(f16, s, {1.0f, 1.0f}, inline_))[0],
            1.0f / 1024);
}

TEST_P(LinearFloatTest, ANonFiniteRowStaysInItsRow) {
  const Shape s{5, 40, 70};
  TestRng rng;
  auto a = SmallIntegers<BF>(rng, s.m * s.k);
  KnownWeights w = EmptyWeights({Format::kBF16}, s);
  w.codes = SmallIntegers<double>(rng, s.n * s.k, 1, 8);
  const auto plan = Plan(SpecOf<BF, float>(), w);
  const auto clean = RunLinear<BF, float>(plan, s, a, inline_);
  a[static_cast<size_t>(2 * s.k + 69)] =
      FromDouble<BF>(std::numeric_limits<double>::quiet_NaN());
  a[static_cast<size_t>(3 * s.k)] =
      FromDouble<BF>(std::numeric_limits<double>::infinity());
  const auto out = RunLinear<BF, float>(plan, s, a, inline_);
  for (int64_t i = 0; i < s.m * s.n; ++i) {
    const float value = out[static_cast<size_t>(i)];
    switch (i / s.n) {
      case 2:
        EXPECT_TRUE(std::isnan(value)) << i;
        break;
      case 3:
        EXPECT_EQ(value, std::numeric_limits<float>::infinity()) << i;
        break;
      default:
        EXPECT_EQ(value, clean[static_cast<size_t>(i)]) << i;
    }
  }
}

TEST_P(LinearFloatTest, NoRowsAreNoWork) {
  TestRng rng;
  ExpectNoRowsAreNoWork<BF, float>(
      Plan(SpecOf<BF, float>(), ExactWeights(rng, {Format::kBF16}, {0, 3, 2})));
}

TEST_P(LinearFloatTest, ManyThreadsMayExecuteAtOnce) {
  TestRng rng;
  const auto plan =
      Plan(SpecOf<BF, BF>(), RealWeights(rng, {Format::kBF16}, {9, 64, 600}));
  ExpectThreadsAgree<BF, BF>(plan, 9, rng);
}

}  // namespace
}  // namespace quern
