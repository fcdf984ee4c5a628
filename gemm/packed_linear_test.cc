#include "gemm/packed_linear.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
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
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;

constexpr double kEpsF32 = 1.0 / (1 << 23);

class PackedLinearTest : public PackedPlanTest {
 protected:
  // Small integers, exact in f32; the reference is rounded once to C.
  template <typename A, typename B, typename C>
  void ExpectExact(const Shape& s, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<A>) << " by " << DTypeName(DTypeOf<B>)
                 << " to " << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng;
    const auto a = SmallIntegers<A>(rng, s.m * s.k);
    const auto w = SmallIntegers<B>(rng, s.n * s.k);
    const auto bias = SmallIntegers<float>(rng, s.bias ? s.n : 0, -99, 99);
    const auto plan = Plan<A, B, C>(s, w, bias);
    auto want = ReferenceProduct(s, ToDoubles(a), ToDoubles(w));
    for (size_t i = 0; s.bias && i < want.size(); ++i) {
      want[i] += ToDouble(bias[i % static_cast<size_t>(s.n)]);
    }
    EXPECT_TRUE(AllEqual(Run<A, C>(plan, s, a, executor), RoundedTo<C>(want)));
  }

  template <typename A, typename B, typename C>
  void ExpectExactAtEveryRemainder() {
    int64_t i = 0;
    for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
      for (const int64_t k : {1, 2, 3, 16, 31, 33, 67}) {
        for (const int64_t m : {1, 2, 3, 5, 8, 13, 14, 15, 29}) {
          ++i;
          Shape s{m, n, k, i % 4, i % 3, i % 2 == 0};
          s.order = i % 5 == 0 ? WeightOrder::kKN : WeightOrder::kNK;
          ExpectExact<A, B, C>(s, inline_);
          if (HasFailure()) return;
        }
      }
    }
  }

  template <typename A, typename B, typename C>
  void ExpectRealsWithinBound() {
    TestRng rng;
    const auto executor = Workers(2);
    Shape s{1, 200, 1100};
    const auto w = UniformReals<B>(rng, s.n * s.k);
    const auto bias = UniformReals<float>(rng, s.n);
    const auto plan = Plan<A, B, C>(s, w, bias);
    for (const int64_t m : {1, 5, 65}) {
      s.m = m;
      SCOPED_TRACE(testing::Message() << s << " " << plan.Explain(m));
      const auto a = UniformReals<A>(rng, m * s.k);
      const auto da = ToDoubles(a), dw = ToDoubles(w), db = ToDoubles(bias);
      const auto want = ReferenceLinear(m, s.n, s.k, da, dw, db);
      const auto magnitude = ReferenceLinear(m, s.n, s.k, Magnitudes(da),
                                             Magnitudes(dw), Magnitudes(db));
      // k + 1 sums, each off by at most kEpsF32 of the magnitude; one rounding
      // of what is then there.
      EXPECT_TRUE(AllWithin(
          Run<A, C>(plan, s, a, *executor), want,
          [&](double expected, int64_t flat) {
            const double sums = static_cast<double>(s.k + 1) * kEpsF32 *
                                magnitude[static_cast<size_t>(flat)];
            return sums + UnitRoundoff<C>() * (std::abs(expected) + sums);
          }));
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(PackedLinearTest);

TEST_P(PackedLinearTest, IsExactOnSmallIntegersAtEveryRemainderOfBF16) {
  ExpectExactAtEveryRemainder<BF, BF, float>();
}
TEST_P(PackedLinearTest, IsExactOnSmallIntegersAtEveryRemainderOfF16) {
  ExpectExactAtEveryRemainder<F16, F16, float>();
}
TEST_P(PackedLinearTest, IsExactOnSmallIntegersAtEveryRemainderOfF32) {
  ExpectExactAtEveryRemainder<float, float, float>();
}

TEST_P(PackedLinearTest, MultipliesEveryPairOfTypes) {
  for (const int64_t m : {1, 9, 15}) {
    const Shape s{m, 35, 37, 1, 0, true};
    ExpectExact<BF, F16, BF>(s, inline_);
    ExpectExact<BF, float, F16>(s, inline_);
    ExpectExact<F16, BF, F16>(s, inline_);
    ExpectExact<F16, float, BF>(s, inline_);
    ExpectExact<float, BF, BF>(s, inline_);
    ExpectExact<float, F16, F16>(s, inline_);
    ExpectExact<BF, BF, BF>(s, inline_);
    ExpectExact<F16, F16, F16>(s, inline_);
    ExpectExact<float, float, BF>(s, inline_);
  }
}

TEST_P(PackedLinearTest, IsExactAcrossChunksOfK) {
  const auto executor = Workers(2);
  for (const int64_t k : {255, 256, 257, 511, 512, 513, 1024, 1537}) {
    for (const int64_t m : {1, 4, 17}) {
      const Shape s{m, 150, k, 0, 0, true};
      ExpectExact<BF, BF, float>(s, *executor);
      ExpectExact<float, float, float>(s, *executor);
    }
  }
}

TEST_P(PackedLinearTest, IsExactAcrossBlocksOfRows) {
  const auto executor = Workers(2);
  for (const int64_t m : {255, 256, 257, 513}) {
    ExpectExact<BF, BF, BF>({m, 72, 40, 3, 0, true}, *executor);
  }
}

TEST_P(PackedLinearTest, IsExactHoweverManyWorkersDivideIt) {
  // From one panel, whose k must be divided, to more tasks than workers.
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 1000}) {
      for (const int64_t m : {1, 16, 40}) {
        ExpectExact<BF, BF, float>({m, n, 2100, 0, 0, true}, executor);
      }
    }
  }
}

TEST_P(PackedLinearTest, RealsStayWithinTheDerivedBound) {
  ExpectRealsWithinBound<BF, BF, float>();
  ExpectRealsWithinBound<BF, BF, BF>();
  ExpectRealsWithinBound<float, BF, float>();
  ExpectRealsWithinBound<F16, F16, F16>();
  ExpectRealsWithinBound<float, float, float>();
}

// Neither threads, nor the rows beside it, nor the strides change a row.
TEST_P(PackedLinearTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  Shape s{67, 83, 1700};
  const auto w = UniformReals<BF>(rng, s.n * s.k);
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  const auto plan = Plan<BF, BF, float>(s, w, {});
  const auto batch = Run<BF, float>(plan, s, a, inline_);
  for (const int workers : {2, 3, 64}) {
    ManyWorkers executor(workers);
    EXPECT_TRUE(AllBitsEqual(Run<BF, float>(plan, s, a, executor), batch))
        << workers << " workers";
  }
  ManyWorkers many(64);
  for (const int64_t rows : {1, 2, 6, 16}) {
    for (const int64_t first : {0, 5, 51}) {
      Shape part = s;
      part.m = rows;
      part.padding = 3;
      const std::vector<BF> some(a.begin() + first * s.k,
                                 a.begin() + (first + rows) * s.k);
      const std::vector<float> want(batch.begin() + first * s.n,
                                    batch.begin() + (first + rows) * s.n);
      EXPECT_TRUE(AllBitsEqual(Run<BF, float>(plan, part, some, many), want))
          << rows << " rows from " << first;
    }
  }
}

TEST_P(PackedLinearTest, NeverRoundsItsOperands) {
  // 1 + 2^-10 is lost in bf16, 1 + 2^-20 in f16 too; the large terms cancel.
  const std::vector<float> a = {1.0f + 1.0f / (1 << 20), 1.0f};
  const auto plan =
      Plan<float, BF, float>({1, 1, 2}, RoundedTo<BF>({1.0, -1.0}), {});
  EXPECT_EQ((Run<float, float>(plan, {1, 1, 2}, a, inline_))[0],
            1.0f / (1 << 20));
  const auto half = RoundedTo<F16>({1.0 + 1.0 / 1024, -1.0});
  const auto f16 = Plan<float, F16, float>({1, 1, 2}, half, {});
  EXPECT_EQ((Run<float, float>(f16, {1, 1, 2}, {1.0f, 1.0f}, inline_))[0],
            1.0f / 1024);
}

TEST_P(PackedLinearTest, ANonFiniteRowStaysInItsRow) {
  const Shape s{5, 40, 70};
  TestRng rng;
  auto a = SmallIntegers<BF>(rng, s.m * s.k);
  const auto w = SmallIntegers<BF>(rng, s.n * s.k, 1, 8);
  const auto plan = Plan<BF, BF, float>(s, w, {});
  const auto clean = Run<BF, float>(plan, s, a, inline_);
  a[static_cast<size_t>(2 * s.k + 69)] =
      FromDouble<BF>(std::numeric_limits<double>::quiet_NaN());
  a[static_cast<size_t>(3 * s.k)] =
      FromDouble<BF>(std::numeric_limits<double>::infinity());
  const auto out = Run<BF, float>(plan, s, a, inline_);
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

TEST_P(PackedLinearTest, NoRowsAreNoWork) {
  const auto plan =
      Plan<BF, BF, float>({0, 3, 2}, std::vector<BF>(6, BF{}), {});
  const MatrixView<const BF> a(nullptr, {0, 2}, {2, 1});
  const MatrixView<float> c(nullptr, {0, 3}, {3, 1});
  EXPECT_EQ(plan.CheckArgs(a, c), absl::OkStatus());
  plan.Execute(a, c, Workspace(), inline_);
}

TEST_P(PackedLinearTest, ManyThreadsMayExecuteAtOnce) {
  TestRng rng;
  const Shape s{9, 64, 600};
  const auto w = UniformReals<BF>(rng, s.n * s.k);
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  const auto plan = Plan<BF, BF, BF>(s, w, {});
  const auto want = Run<BF, BF>(plan, s, a, inline_);
  std::vector<std::vector<BF>> got(8);
  std::vector<std::thread> threads;
  for (auto& result : got) {
    threads.emplace_back([&] {
      result.resize(want.size());
      InlineExecutor executor;
      auto memory = AlignedBuffer::Create(plan.WorkspaceBytes(s.m, 1));
      for (int i = 0; i < 20; ++i) {
        plan.Execute(DenseMatrix(a.data(), s.m, s.k),
                     DenseMatrix(result.data(), s.m, s.n), Workspace(*memory),
                     executor);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : got) EXPECT_TRUE(AllBitsEqual(result, want));
}

}  // namespace
}  // namespace quern
