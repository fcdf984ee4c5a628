// Linear layers of f32, bf16 and f16 by oneDNN. Runs once for each instruction
// set that ONEDNN_MAX_CPU_ISA can cap oneDNN to: see BUILD.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers.h"
#include "quern/gemm/onednn/layers_testutil.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr double kEpsF32 = 1.0 / (1 << 23);

// The dtypes of a case as C++ types.
template <typename TA, typename TB, typename TC>
struct Case {
  using A = TA;
  using B = TB;
  using C = TC;
};

template <typename C>
class OneDnnFloatTest : public testing::Test {
 protected:
  using A = typename C::A;
  using B = typename C::B;
  using Out = typename C::C;

  // w is [n, k], dense.
  LinearWeights Weights(int64_t n, int64_t k, const std::vector<B>& w,
                        const std::vector<float>& bias = {},
                        WeightLayout layout = WeightLayout::kNK,
                        int64_t padding = 0) {
    KnownWeights known =
        EmptyWeights({FormatOfFloats(DTypeOf<B>), layout}, {0, n, k, padding});
    known.codes = ToDoubles(w);
    known.bias = bias;
    return known.Pack(inline_);
  }
  template <typename... Args>
  LinearPlan Plan(const Args&... args) {
    return OneDnnPlan(SpecOf<A, Out>(), Weights(args...));
  }

  // Dense in, dense out; strides and guards between.
  std::vector<Out> Run(const LinearPlan& plan, int64_t m,
                       const std::vector<A>& a, Executor& executor,
                       int64_t padding = 0) {
    return RunLinear<A, Out>(plan, {m, plan.n(), plan.k(), padding}, a,
                             executor);
  }

  // The layer behind a plan, and one call of it.
  std::unique_ptr<const OneDnnLayer> Layer(int64_t n, int64_t k,
                                           const std::vector<B>& w) {
    auto layer = CreateOneDnnLayer(SpecOf<A, Out>(), Weights(n, k, w), inline_);
    EXPECT_EQ(layer.status(), absl::OkStatus());
    return *std::move(layer);
  }
  std::vector<Out> RunLayer(const OneDnnLayer& layer, int64_t m, int64_t n,
                            int64_t k, const std::vector<A>& a,
                            int64_t padding = 0) {
    const StridedMatrix<A> in(a, m, k, k + padding);
    StridedMatrix<Out> out(m, n, n + padding);
    LinearArgs args;
    args.a = in.view();
    args.c = out.view();
    // More than enough for strides that ask oneDNN for more.
    auto memory = AlignedBuffer::Create(1 << 20);
    EXPECT_EQ(memory.status(), absl::OkStatus());
    layer.Execute(args, Workspace(*memory), inline_);
    return out.ToDense();
  }

  // Small integers: exact in f32. In bf16 the reference is rounded once.
  void ExpectExact(int64_t m, int64_t n, int64_t k, bool with_bias,
                   WeightLayout layout, int64_t padding, Executor& executor) {
    SCOPED_TRACE(testing::Message() << "m=" << m << " n=" << n << " k=" << k
                                    << " bias=" << with_bias
                                    << " layout=" << WeightLayoutName(layout)
                                    << " padding=" << padding);
    TestRng rng;
    const auto a = SmallIntegers<A>(rng, m * k);
    const auto w = SmallIntegers<B>(rng, n * k);
    const auto bias = SmallIntegers<float>(rng, with_bias ? n : 0, -99, 99);
    const LinearPlan plan = Plan(n, k, w, bias, layout, padding);
    SCOPED_TRACE(plan.Explain(m));
    const auto want = RoundedTo<Out>(
        ReferenceLinear(m, n, k, ToDoubles(a), ToDoubles(w), ToDoubles(bias)));
    EXPECT_TRUE(AllEqual(Run(plan, m, a, executor, padding), want));
  }

  InlineExecutor inline_;
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
TYPED_TEST_SUITE(OneDnnFloatTest, Cases);

TYPED_TEST(OneDnnFloatTest, IsExactOnSmallIntegersAtEveryRemainder) {
  const auto executor = Workers(2);
  for (const int64_t n : {1, 15, 16, 17, 33, 1030}) {
    for (const int64_t k : {1, 2, 32, 67, 129}) {
      for (const int64_t m : {1, 2, 17, 33}) {
        const int64_t variant = n + k + m;
        this->ExpectExact(
            m, n, k, variant % 2 == 0,
            variant % 3 == 0 ? WeightLayout::kKN : WeightLayout::kNK,
            variant % 5, *executor);
      }
    }
  }
}

TYPED_TEST(OneDnnFloatTest, IsExactAcrossRowBlocks) {
  const auto executor = Workers(2);
  for (const int64_t m : {255, 256, 257, 513}) {
    this->ExpectExact(m, 72, 40, true, WeightLayout::kNK, 3, *executor);
  }
}

TYPED_TEST(OneDnnFloatTest, RealsStayWithinTheDerivedBound) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const auto executor = Workers(2);
  const int64_t n = 200, k = 1100;
  const auto w = UniformReals<B>(rng, n * k);
  const auto bias = UniformReals<float>(rng, n);
  const LinearPlan plan = this->Plan(n, k, w, bias);
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

TYPED_TEST(OneDnnFloatTest, NeverRoundsItsOperands) {
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
  const LinearPlan plan = this->Plan(1, 2, w);
  // The product of two fine operands has 23 bits and is exact, too.
  EXPECT_TRUE(AllEqual(this->Run(plan, 1, a, this->inline_), want));
}

TYPED_TEST(OneDnnFloatTest, SpecialsReachTheirRowAndColumnOnly) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t m = 5, n = 70, k = 33;
  auto a = SmallIntegers<A>(rng, m * k, 1, 8);
  auto w = SmallIntegers<B>(rng, n * k, 1, 8);
  a[1 * k + 32] = FromDouble<A>(std::nan(""));
  a[3 * k + 0] = FromDouble<A>(INFINITY);
  w[69 * k + 5] = FromDouble<B>(-INFINITY);
  const LinearPlan plan = this->Plan(n, k, w);
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

TYPED_TEST(OneDnnFloatTest, GivesTheSameBitsForEveryNumberOfThreads) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t n = 1100, k = 777, m = 300;
  const LinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k),
                                     UniformReals<float>(rng, n));
  const auto a = UniformReals<A>(rng, m * k);
  const auto want = this->Run(plan, m, a, this->inline_);
  for (const int workers : {2, 3, 5}) {
    const auto executor = Workers(workers);
    EXPECT_TRUE(AllBitsEqual(this->Run(plan, m, a, *executor), want))
        << workers;
  }
}

TYPED_TEST(OneDnnFloatTest, ARowHasTheSameBitsAloneAndInABatch) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const auto executor = Workers(2);
  for (const int64_t k : {31, 1536, 2100}) {
    const int64_t n = 130, most = 300;
    const LinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k),
                                       UniformReals<float>(rng, n));
    if (absl::StartsWith(plan.Explain(1), "onednn gemm:jit:f32")) {
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

TYPED_TEST(OneDnnFloatTest, ManyThreadsMayExecuteAtOnce) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const int64_t n = 96, k = 130;
  const LinearPlan plan = this->Plan(n, k, UniformReals<B>(rng, n * k));
  const auto a = UniformReals<A>(rng, 80 * k);
  const auto want = this->Run(plan, 80, a, this->inline_);
  std::vector<std::vector<Out>> got(8);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < got.size(); ++t) {
    threads.emplace_back([&, t] {
      // More shapes than the plan keeps kernels for.
      InlineExecutor executor;
      auto memory = AlignedBuffer::Create(*plan.WorkspaceBytes(80, 1));
      std::vector<Out> c(80 * n);
      for (int64_t m = 1; m <= 80; ++m) {
        LinearArgs args;
        args.a = DenseMatrix<const A>(a.data(), m, k);
        args.c = DenseMatrix<Out>(c.data(), m, n);
        plan.Execute(args, Workspace(*memory), executor);
      }
      got[t] = std::move(c);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& c : got) EXPECT_TRUE(AllBitsEqual(c, want));
}

// Row counts share kernels: 256 of them make 45, or 37 where blocks have at
// most 128 rows (RowsPerTaskOfAnyWorkers), and no second round misses.
TYPED_TEST(OneDnnFloatTest, ANewRowCountIsSeldomANewKernel) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  TestRng rng;
  const int64_t n = 40, k = 24;
  const auto layer = this->Layer(n, k, SmallIntegers<B>(rng, n * k));
  const auto run = [&](int64_t step) {
    for (int64_t m = 1; m <= 256; m += step) {
      this->RunLayer(*layer, m, n, k, SmallIntegers<A>(rng, m * k));
    }
    return layer->cache_stats();
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

TYPED_TEST(OneDnnFloatTest, ExecutesWhateverWasEvicted) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  const int64_t m = 4, n = 17, k = 9;
  const auto layer = this->Layer(n, k, SmallIntegers<B>(rng, n * k));
  const auto a = SmallIntegers<A>(rng, m * k);
  const std::vector<Out> want = this->RunLayer(*layer, m, n, k, a);
  for (int round = 0; round < 2; ++round) {
    for (int64_t padding = 0; padding < 160; ++padding) {
      ASSERT_TRUE(
          AllBitsEqual(this->RunLayer(*layer, m, n, k, a, padding), want))
          << padding;
    }
  }
  const OneDnnCacheStats stats = layer->cache_stats();
  EXPECT_EQ(stats.hits + stats.misses, 321);
  // Widened rows and narrowed results go through scratch, which is dense.
  if (stats.misses > 1) {
    EXPECT_EQ(stats.misses - stats.evictions, 128);
  }
}

TYPED_TEST(OneDnnFloatTest, NoRowsIsNoWork) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using Out = typename TypeParam::C;
  TestRng rng;
  ExpectNoRowsAreNoWork<A, Out>(
      this->Plan(16, 16, UniformReals<B>(rng, 16 * 16)));
}

TYPED_TEST(OneDnnFloatTest, UsesNoReferenceKernel) {
  using B = typename TypeParam::B;
  TestRng rng;
  const LinearPlan plan = this->Plan(256, 128, UniformReals<B>(rng, 256 * 128));
  for (const int64_t m : {1, 2, 16, 100, 256}) {
    EXPECT_FALSE(absl::StrContains(plan.Explain(m), "ref")) << plan.Explain(m);
    std::cout << "m=" << m << ": " << plan.Explain(m) << "\n";
  }
  EXPECT_GE(plan.packed_bytes(), 256 * 128 * static_cast<int64_t>(sizeof(B)));
}

}  // namespace
}  // namespace quern
