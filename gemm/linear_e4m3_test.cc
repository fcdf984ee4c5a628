// Weights of kE4M3Block: fp8 with a scale for each block of columns and of k.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using F8 = Float8E4M3;

constexpr WeightCase kE4M3 = {WeightFormat::kE4M3Block};

Shape ShapeOf(int64_t n, int64_t k, int64_t block_n = 128,
              int64_t block_k = 128) {
  Shape s{0, n, k, 2};
  s.block_n = block_n;
  s.group_size = block_k;
  return s;
}

KnownWeights Exact(Rng& rng, const Shape& s) {
  return CodedWeights(rng, kE4M3, s, -8, 8, PowersOfTwo(-2, 2));
}

// Codes in [-2, 2] with scales up to 1, and a bias.
KnownWeights Real(Rng& rng, const Shape& s) {
  KnownWeights w = CodedWeights(rng, kE4M3, s, 0, 0, [](Rng& r) {
    return ToDouble(FromDouble<float>(r.Uniform(0.1, 1)));
  });
  w.codes = ToDoubles(UniformReals<F8>(rng, s.n * s.k, -2, 2));
  w.bias = UniformReals<float>(rng, s.n);
  return w;
}

class LinearE4M3Test : public LinearTest {
 protected:
  template <typename A, typename C>
  void ExpectExact(Shape s, const std::vector<int64_t>& rows,
                   Executor& executor, int64_t padding = 0) {
    TestRng rng;
    KnownWeights w = Exact(rng, s);
    w.bias = SmallIntegers<float>(rng, s.k % 2 == 0 ? s.n : 0, -99, 99);
    const auto plan = Plan(SpecOf<A, C>(), w);
    s.padding = padding;
    s.shift = padding % 3;
    for (const int64_t m : rows) {
      s.m = m;
      LinearTest::ExpectExact<A, C>(
          plan, w, s, SmallIntegers<A>(rng, m * s.k, -4, 4), executor);
    }
  }

  template <typename A, typename C>
  void Bounded(const Shape& s) {
    TestRng rng;
    const auto workers = Workers(2);
    const KnownWeights w = Real(rng, s);
    const auto plan = Plan(SpecOf<A, C>(), w);
    for (const int64_t m : {1, 3, 5, 33}) {
      SCOPED_TRACE(testing::Message() << s << " " << plan.Explain(m));
      const auto a = UniformReals<A>(rng, m * s.k);
      EXPECT_TRUE(IsWithinBound(RunLinear<A, C>(plan, {m}, a, *workers), w, m,
                                ToDoubles(a)));
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearE4M3Test);

TEST_P(LinearE4M3Test, IsExactOnSmallIntegersAtEveryRemainder) {
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 3, 4, 5, 16, 31, 67}) {
      ExpectExact<BF, float>(ShapeOf(n, k, 16, 16),
                             {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 29}, inline_,
                             n % 4);
      if (HasFailure()) return;
    }
  }
}

TEST_P(LinearE4M3Test, IsExactForAnyTypes) {
  const Shape s = ShapeOf(35, 150, 32, 48);
  ExpectExact<BF, BF>(s, {1, 9}, inline_, 1);
  ExpectExact<BF, F16>(s, {1, 9}, inline_, 1);
  ExpectExact<F16, F16>(s, {1, 9}, inline_, 1);
  ExpectExact<F16, float>(s, {1, 9}, inline_, 1);
  ExpectExact<float, float>(s, {1, 9}, inline_, 1);
  ExpectExact<float, BF>(s, {1, 9}, inline_, 1);
}

TEST_P(LinearE4M3Test, IsExactAcrossBlocksAndChunksOfK) {
  const auto executor = Workers(2);
  for (const int64_t k : {127, 128, 129, 511, 512, 513, 1090}) {
    // 48 does not divide the 512 k of a chunk; 2000 is more than k.
    for (const int64_t block_k : {16, 48, 128, 640, 2000}) {
      ExpectExact<BF, float>(ShapeOf(150, k, 128, block_k), {1, 4, 17, 40},
                             *executor);
      if (HasFailure()) return;
    }
  }
  ExpectExact<float, float>(ShapeOf(150, 1090), {1, 17, 40}, *executor);
}

TEST_P(LinearE4M3Test, IsExactAcrossBlocksOfRowsAndWorkers) {
  ExpectExact<BF, BF>(ShapeOf(72, 40), {255, 256, 257, 513}, inline_, 3);
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 400}) {
      ExpectExact<BF, float>(ShapeOf(n, 1500), {1, 16, 40}, executor);
    }
  }
}

TEST_P(LinearE4M3Test, StaysWithinTheDerivedBound) {
  Bounded<BF, float>(ShapeOf(200, 1100));
  Bounded<BF, BF>(ShapeOf(131, 700, 64, 32));
  Bounded<float, float>(ShapeOf(200, 1100));
  Bounded<F16, F16>(ShapeOf(40, 300));
}

TEST_P(LinearE4M3Test, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  KnownWeights w = Real(rng, ShapeOf(83, 1700));
  w.bias.clear();
  ExpectRowsAlone<BF>(Plan(SpecOf<BF, float>(), w), {67}, rng);
  ExpectRowsAlone<float>(Plan(SpecOf<float, float>(), w), {37}, rng);
}

// Row m picks w[., m]; a NaN anywhere in a column is in every sum of it.
TEST_P(LinearE4M3Test, DecodesAllCodesExactly) {
  constexpr int64_t kN = 256, kK = 7;
  KnownWeights w = EmptyWeights(kE4M3, ShapeOf(kN, kK));
  w.scales.assign(kN, 1.0);
  std::vector<bool> nan(kN);
  for (int64_t n = 0; n < kN; ++n) {
    for (int64_t k = 0; k < kK; ++k) {
      w.codes.push_back(ToDouble(F8{static_cast<uint8_t>(n + 51 * k)}));
      if (std::isnan(w.codes.back())) nan[static_cast<size_t>(n)] = true;
    }
  }
  const auto plan = Plan(SpecOf<BF, float>(), w);
  for (const int64_t rows : {int64_t{1}, kK}) {
    for (int64_t first = 0; first + rows <= kK; ++first) {
      std::vector<double> a(static_cast<size_t>(rows * kK));
      for (int64_t r = 0; r < rows; ++r) {
        a[static_cast<size_t>(r * kK + first + r)] = 1;
      }
      const auto got =
          RunLinear<BF, float>(plan, {rows}, RoundedTo<BF>(a), inline_);
      for (int64_t i = 0; i < rows * kN; ++i) {
        const int64_t n = i % kN, k = first + i / kN;
        const float c = got[static_cast<size_t>(i)];
        if (nan[static_cast<size_t>(n)]) {
          EXPECT_TRUE(std::isnan(c)) << n;
        } else {
          EXPECT_EQ(c, w.code(n, k)) << "code " << (n + 51 * k) % 256;
        }
      }
    }
  }
}

TEST_P(LinearE4M3Test, ANonFiniteRowStaysInItsRow) {
  TestRng rng;
  KnownWeights w =
      CodedWeights(rng, kE4M3, ShapeOf(40, 70), 1, 8, PowersOfTwo(0, 0));
  const auto plan = Plan(SpecOf<BF, float>(), w);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const int64_t m : {3, 6}) {
    ExpectStaysInItsRow(plan, SmallIntegers<BF>(rng, m * 70), 69, {kInfinity},
                        [](float c, double) { return c == kInfinity; });
  }
}

// Blocks of columns begin anew with each source.
TEST_P(LinearE4M3Test, EachSourceHasBlocksOfItsOwn) {
  TestRng rng;
  KnownWeights all = EmptyWeights(kE4M3, ShapeOf(0, 96, 0, 48));
  all.scales.resize(2 * 100);
  std::vector<WeightSources> kept;
  std::vector<LinearSource> sources;
  for (const Shape& s : {ShapeOf(45, 96, 32, 48), ShapeOf(3, 96, 2, 48),
                         ShapeOf(52, 96, 128, 48)}) {
    const KnownWeights w = Exact(rng, s);
    all.codes.insert(all.codes.end(), w.codes.begin(), w.codes.end());
    for (int64_t i = 0; i < 2 * s.n; ++i) {
      all.scales[static_cast<size_t>(i / s.n * 100 + all.spec.n + i % s.n)] =
          w.scales[static_cast<size_t>(i)];
    }
    kept.emplace_back(w);
    sources.push_back(kept.back().All());
    all.spec.n += s.n;
  }
  ASSERT_EQ(all.spec.n, 100);
  const auto weights = LinearWeights::Pack(all.spec, sources, inline_);
  ASSERT_EQ(weights.status(), absl::OkStatus());
  const auto plan = Plan(SpecOf<BF, float>(), *weights);
  for (const int64_t m : {1, 17}) {
    LinearTest::ExpectExact<BF, float>(
        plan, all, {m}, SmallIntegers<BF>(rng, m * 96, -4, 4), inline_);
  }
}

TEST_P(LinearE4M3Test, NoRowsAreNoWork) {
  TestRng rng;
  const auto plan = Plan(SpecOf<BF, float>(), Exact(rng, ShapeOf(4, 3)));
  EXPECT_TRUE(
      (RunLinear<BF, float>(plan, {0}, std::vector<BF>(), inline_)).empty());
}

}  // namespace
}  // namespace quern
