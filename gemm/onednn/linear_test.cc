// Runs once for each instruction set that ONEDNN_MAX_CPU_ISA can cap oneDNN to:
// see BUILD.

#include "quern/gemm/onednn/linear.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/packing/vnni_pack.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr double kEpsF32 = 1.0 / (1 << 23);

template <typename T>
std::vector<T> Transposed(const std::vector<T>& v, int64_t rows, int64_t cols) {
  std::vector<T> t(v.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      t[static_cast<size_t>(c * rows + r)] =
          v[static_cast<size_t>(r * cols + c)];
    }
  }
  return t;
}

// The dtypes of a case as C++ types.
template <typename TA, typename TB, typename TC>
struct Case {
  using A = TA;
  using B = TB;
  using C = TC;
};

template <typename C>
class OneDnnLinearTest : public testing::Test {
 protected:
  using A = typename C::A;
  using B = typename C::B;
  using Out = typename C::C;

  // w is [n, k], dense.
  OneDnnLinearPlan Plan(int64_t n, int64_t k, const std::vector<B>& w,
                        const std::vector<float>& bias = {},
                        WeightOrder order = WeightOrder::kNK,
                        int64_t padding = 0) {
    OneDnnLinearSpec spec;
    spec.n = n;
    spec.k = k;
    spec.a = DTypeOf<A>;
    spec.c = DTypeOf<Out>;
    spec.order = order;
    const bool by_rows = order == WeightOrder::kNK;
    const int64_t rows = by_rows ? n : k, cols = by_rows ? k : n;
    const StridedMatrix<B> weights(by_rows ? w : Transposed(w, n, k), rows,
                                   cols, cols + padding);
    AnyTensorView bias_view;
    const GuardBuffer<float> guarded_bias(bias);
    if (!bias.empty()) bias_view = guarded_bias.view();
    auto plan =
        OneDnnLinearPlan::Create(spec, weights.view(), bias_view, inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  // Dense in, dense out; strides and guards between.
  std::vector<Out> Run(const OneDnnLinearPlan& plan, int64_t m,
                       const std::vector<A>& a, Executor& executor,
                       int64_t padding = 0, Edge edge = Edge::kEnd) {
    const int64_t n = plan.spec().n, k = plan.spec().k;
    const StridedMatrix<A> in(a, m, k, k + padding, edge);
    StridedMatrix<Out> out(m, n, n + padding, edge);
    EXPECT_TRUE(plan.CheckArgs(in.view(), out.view()).ok())
        << plan.CheckArgs(in.view(), out.view());
    plan.Execute(in.view(), out.view(), scratch_, executor);
    return out.ToDense();
  }

  // Small integers: exact in f32. In bf16 the reference is rounded once.
  void ExpectExact(int64_t m, int64_t n, int64_t k, bool with_bias,
                   WeightOrder order, int64_t padding, Executor& executor) {
    SCOPED_TRACE(testing::Message() << "m=" << m << " n=" << n << " k=" << k
                                    << " bias=" << with_bias << " order="
                                    << int(order) << " padding=" << padding);
    TestRng rng;
    const auto a = SmallIntegers<A>(rng, m * k);
    const auto w = SmallIntegers<B>(rng, n * k);
    const auto bias = SmallIntegers<float>(rng, with_bias ? n : 0, -99, 99);
    const OneDnnLinearPlan plan = Plan(n, k, w, bias, order, padding);
    SCOPED_TRACE(plan.Explain(m));
    const auto want = RoundedTo<Out>(
        ReferenceLinear(m, n, k, ToDoubles(a), ToDoubles(w), ToDoubles(bias)));
    const Edge edge = m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
    EXPECT_TRUE(AllEqual(Run(plan, m, a, executor, padding, edge), want));
  }

  InlineExecutor inline_;
  OneDnnLinearScratch scratch_;
};

using BF = BFloat16;
using F16 = Float16;
using Cases =
    testing::Types<Case<BF, BF, float>, Case<BF, BF, BF>,
                   Case<float, float, float>, Case<float, float, BF>,
                   Case<float, BF, float>, Case<float, BF, BF>,
                   Case<BF, float, float>, Case<BF, float, BF>,
                   Case<F16, F16, float>, Case<F16, F16, F16>,
                   Case<BF, BF, F16>, Case<float, F16, F16>, Case<F16, BF, BF>>;
TYPED_TEST_SUITE(OneDnnLinearTest, Cases);

TYPED_TEST(OneDnnLinearTest, IsExactOnSmallIntegersAtEveryRemainder) {
  const auto executor = Workers(2);
  for (const int64_t n : {1, 15, 16, 17, 33, 1030}) {
    for (const int64_t k : {1, 2, 32, 67, 129}) {
      for (const int64_t m : {1, 2, 17, 33}) {
        const int64_t variant = n + k + m;
        this->ExpectExact(
            m, n, k, variant % 2 == 0,
            variant % 3 == 0 ? WeightOrder::kKN : WeightOrder::kNK, variant % 5,
            *executor);
      }
    }
  }
}

TYPED_TEST(OneDnnLinearTest, IsExactAcrossRowBlocks) {
  const auto executor = Workers(2);
  for (const int64_t m : {255, 256, 257, 513}) {
    this->ExpectExact(m, 72, 40, true, WeightOrder::kNK, 3, *executor);
  }
}

TYPED_TEST(OneDnnLinearTest, RealsStayWithinTheDerivedBound) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const auto executor = Workers(2);
  const int64_t n = 200, k = 1100;
  const auto w = UniformReals<B>(rng, n * k);
  const auto bias = UniformReals<float>(rng, n);
  const OneDnnLinearPlan plan = this->Plan(n, k, w, bias);
  for (const int64_t m : {1, 5, 65}) {
    SCOPED_TRACE(plan.Explain(m));
    const auto a = UniformReals<A>(rng, m * k);
    const auto da = ToDoubles(a), dw = ToDoubles(w), db = ToDoubles(bias);
    const auto want = ReferenceLinear(m, n, k, da, dw, db);
    const auto magnitude = ReferenceLinear(m, n, k, Magnitudes(da),
                                           Magnitudes(dw), Magnitudes(db));
    // k + 1 sums, each off by at most kEpsF32 of the magnitude; one rounding of
    // what is then there.
    const double eps_out = UnitRoundoff<Out>();
    EXPECT_TRUE(AllWithin(this->Run(plan, m, a, *executor), want,
                          [&](double expected, int64_t flat) {
                            const double sums =
                                double(k + 1) * kEpsF32 *
                                magnitude[static_cast<size_t>(flat)];
                            return sums + eps_out * (std::abs(expected) + sums);
                          }));
  }
}

TYPED_TEST(OneDnnLinearTest, NeverRoundsItsOperands) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  // 1 + 2^-11 is lost in bf16, f16 and tf32; the large terms cancel.
  const double fine = 1.0 + std::ldexp(1.0, -11);
  const bool fine_a = DTypeOf<A> == DType::kF32;
  const bool fine_b = DTypeOf<B> == DType::kF32;
  const auto a = RoundedTo<A>({fine_a ? fine : 1.0, 1.0});
  const auto w = RoundedTo<B>({fine_b ? fine : 1.0, -1.0});
  const auto want =
      RoundedTo<Out>(ReferenceLinear(1, 1, 2, ToDoubles(a), ToDoubles(w)));
  const OneDnnLinearPlan plan = this->Plan(1, 2, w);
  // The product of two fine operands has 23 bits and is exact, too.
  EXPECT_TRUE(AllEqual(this->Run(plan, 1, a, this->inline_), want));
}

TYPED_TEST(OneDnnLinearTest, SpecialsReachTheirRowAndColumnOnly) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t m = 5, n = 70, k = 33;
  auto a = SmallIntegers<A>(rng, m * k, 1, 8);
  auto w = SmallIntegers<B>(rng, n * k, 1, 8);
  a[1 * k + 32] = FromDouble<A>(std::nan(""));
  a[3 * k + 0] = FromDouble<A>(INFINITY);
  w[69 * k + 5] = FromDouble<B>(-INFINITY);
  const OneDnnLinearPlan plan = this->Plan(n, k, w);
  const auto c = this->Run(plan, m, a, this->inline_);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double value = ToDouble(c[static_cast<size_t>(i * n + j)]);
      if (i == 1 || (i == 3 && j == 69)) {
        EXPECT_TRUE(std::isnan(value)) << i << ", " << j;
      } else if (i == 3 || j == 69) {
        EXPECT_EQ(value, i == 3 ? INFINITY : -INFINITY) << i << ", " << j;
      } else {
        EXPECT_TRUE(std::isfinite(value)) << i << ", " << j;
      }
    }
  }
}

TYPED_TEST(OneDnnLinearTest, GivesTheSameBitsForEveryNumberOfThreads) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t n = 1100, k = 777, m = 300;
  const OneDnnLinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k),
                                           UniformReals<float>(rng, n));
  const auto a = UniformReals<A>(rng, m * k);
  const auto want = this->Run(plan, m, a, this->inline_);
  for (const int workers : {2, 3, 5}) {
    const auto executor = Workers(workers);
    EXPECT_TRUE(AllBitsEqual(this->Run(plan, m, a, *executor), want))
        << workers;
  }
}

TYPED_TEST(OneDnnLinearTest, ARowHasTheSameBitsAloneAndInABatch) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const auto executor = Workers(2);
  for (const int64_t k : {31, 1536, 2100}) {
    const int64_t n = 130, most = 300;
    const OneDnnLinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k),
                                             UniformReals<float>(rng, n));
    if (absl::StartsWith(plan.Explain(1), "gemm:jit:f32")) {
      GTEST_SKIP() << "no promise on this CPU: " << plan.Explain(1);
    }
    const auto a = UniformReals<A>(rng, most * k);
    const auto want = this->Run(plan, most, a, *executor);
    std::vector<int64_t> sizes = {64, 65, 127, 200, 256, 257};
    for (int64_t m = 1; m <= 33; ++m) sizes.push_back(m);
    for (const int64_t m : sizes) {
      const std::vector<A> rows(a.begin(), a.begin() + m * k);
      const std::vector<Out> first(want.begin(), want.begin() + m * n);
      ASSERT_TRUE(AllBitsEqual(this->Run(plan, m, rows, *executor), first))
          << "m=" << m << " k=" << k << ": " << plan.Explain(m);
    }
  }
}

TYPED_TEST(OneDnnLinearTest, ManyThreadsMayExecuteAtOnce) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const int64_t n = 96, k = 130;
  const OneDnnLinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k));
  const auto a = UniformReals<A>(rng, 80 * k);
  const auto want = this->Run(plan, 80, a, this->inline_);
  std::vector<std::vector<Out>> got(8);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < got.size(); ++t) {
    threads.emplace_back([&, t] {
      // More shapes than the plan keeps kernels for.
      InlineExecutor executor;
      OneDnnLinearScratch scratch;
      std::vector<Out> c(80 * n);
      for (int64_t m = 1; m <= 80; ++m) {
        plan.Execute(DenseMatrix<const A>(a.data(), m, k),
                     DenseMatrix<Out>(c.data(), m, n), scratch, executor);
      }
      got[t] = std::move(c);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& c : got) EXPECT_TRUE(AllBitsEqual(c, want));
}

// Row counts share kernels: 256 of them make 45, or 37 where blocks have at
// most 128 rows (RowsPerTaskOfAnyWorkers), and no second round misses.
TYPED_TEST(OneDnnLinearTest, ANewRowCountIsSeldomANewKernel) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t n = 40, k = 24;
  const OneDnnLinearPlan plan = this->Plan(n, k, SmallIntegers<B>(rng, n * k));
  const auto run = [&](int64_t step) {
    for (int64_t m = 1; m <= 256; m += step) {
      this->Run(plan, m, SmallIntegers<A>(rng, m * k), this->inline_);
    }
    return plan.cache_stats();
  };
  // A bucket's own size runs with the strides of a and c, others with the
  // scratch's: the same here, for both are dense.
  const OneDnnCacheStats once = run(1), twice = run(5);
  EXPECT_TRUE(once.misses == 45 || once.misses == 37) << once.misses;
  // Each of the 52 calls of the second round looks for one kernel, or for those
  // of a whole block and of the rest.
  EXPECT_EQ(twice.misses, once.misses);
  EXPECT_GE(twice.hits, once.hits + 52);
  EXPECT_LE(twice.hits, once.hits + 2 * 52);
  EXPECT_EQ(twice.evictions, 0);
}

TYPED_TEST(OneDnnLinearTest, ExecutesWhateverWasEvicted) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const int64_t m = 4, n = 17, k = 9;
  const OneDnnLinearPlan plan = this->Plan(n, k, SmallIntegers<B>(rng, n * k));
  const auto a = SmallIntegers<A>(rng, m * k);
  const std::vector<Out> want = this->Run(plan, m, a, this->inline_);
  for (int round = 0; round < 2; ++round) {
    for (int64_t padding = 0; padding < 160; ++padding) {
      ASSERT_TRUE(
          AllBitsEqual(this->Run(plan, m, a, this->inline_, padding), want))
          << padding;
    }
  }
  const OneDnnCacheStats stats = plan.cache_stats();
  EXPECT_EQ(stats.hits + stats.misses, 321);
  // Widened rows and narrowed results go through scratch, which is dense.
  if (stats.misses > 1) {
    EXPECT_EQ(stats.misses - stats.evictions, 128);
  }
}

TYPED_TEST(OneDnnLinearTest, NoRowsIsNoWork) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const OneDnnLinearPlan plan =
      this->Plan(16, 16, UniformReals<B>(rng, 16 * 16));
  const MatrixView<const A> a = DenseMatrix<const A>(nullptr, 0, 16);
  const MatrixView<Out> c = DenseMatrix<Out>(nullptr, 0, 16);
  EXPECT_TRUE(plan.CheckArgs(a, c).ok());
  plan.Execute(a, c, this->scratch_, this->inline_);
  EXPECT_EQ(this->scratch_.bytes(), 0u);
}

TYPED_TEST(OneDnnLinearTest, UsesNoReferenceKernel) {
  using B = typename TypeParam::B;
  TestRng rng;
  const OneDnnLinearPlan plan =
      this->Plan(256, 128, UniformReals<B>(rng, 256 * 128));
  for (const int64_t m : {1, 2, 16, 100, 256}) {
    EXPECT_FALSE(absl::StrContains(plan.Explain(m), "ref")) << plan.Explain(m);
    std::cout << "m=" << m << ": " << plan.Explain(m) << "\n";
  }
  EXPECT_GE(plan.packed_bytes(), 256u * 128u * sizeof(B));
}

}  // namespace
}  // namespace quern
