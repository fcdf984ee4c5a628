#include "gemm/packed_linear.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/workers.h"

namespace quern {
namespace {

constexpr double kEpsF32 = 1.0 / (1 << 23);

struct Shape {
  int64_t m, n, k;
  int64_t padding = 0;
  int64_t shift = 0;
  bool bias = false;
  WeightOrder order = WeightOrder::kNK;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "m=" << s.m << " n=" << s.n << " k=" << s.k
             << " padding=" << s.padding << " bias=" << s.bias
             << (s.order == WeightOrder::kNK ? " [N, K]" : " [K, N]");
}

class PackedLinearTest : public IsaTest {
 protected:
  // w is dense, in the order of s.
  template <typename A, typename B, typename C>
  PackedLinearPlan Plan(const Shape& s, const std::vector<B>& w,
                        const std::vector<float>& bias) {
    PackedLinearSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.a = DTypeOf<A>;
    spec.b = DTypeOf<B>;
    spec.c = DTypeOf<C>;
    spec.order = s.order;
    const bool nk = s.order == WeightOrder::kNK;
    const int64_t rows = nk ? s.n : s.k, cols = nk ? s.k : s.n;
    const StridedMatrix<B> weights(w, rows, cols, cols + s.padding);
    const GuardBuffer<float> guarded(bias);
    AnyTensorView bias_view;
    if (!bias.empty()) bias_view = guarded.view();
    auto plan =
        PackedLinearPlan::Create(spec, weights.view(), bias_view, inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  template <typename A, typename C>
  std::vector<C> Run(const PackedLinearPlan& plan, const Shape& s,
                     const std::vector<A>& a, Executor& executor) {
    const Edge edge = s.m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
    const StridedMatrix<A> in(a, s.m, s.k, s.k + s.padding, edge, s.shift);
    StridedMatrix<C> out(s.m, s.n, s.n + s.padding, edge, s.shift);
    EXPECT_EQ(plan.CheckArgs(in.view(), out.view()), absl::OkStatus());
    // Poisoned, and not a byte more than was asked for.
    const int64_t bytes = plan.WorkspaceBytes(s.m, executor.num_workers());
    GuardBuffer<float> memory(bytes / 4);
    EXPECT_NO_ALLOCATION(plan.Execute(
        in.view(), out.view(),
        Workspace(memory.data(), static_cast<size_t>(bytes)), executor));
    return out.ToDense();
  }

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
    std::vector<double> want;
    if (s.order == WeightOrder::kNK) {
      want = ReferenceLinear(s.m, s.n, s.k, ToDoubles(a), ToDoubles(w),
                             ToDoubles(bias));
    } else {
      want = ReferenceGemm(s.m, s.n, s.k, ToDoubles(a), ToDoubles(w));
      for (size_t i = 0; s.bias && i < want.size(); ++i) {
        want[i] += ToDouble(bias[i % static_cast<size_t>(s.n)]);
      }
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

  InlineExecutor inline_;
};
QUERN_INSTANTIATE_ISA_TEST(PackedLinearTest);

using BF = BFloat16;
using F16 = Float16;

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

void ExpectRefusal(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
      << status << "\nlacks: " << words;
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(PackedLinearPlanTest, RefusesABadSpec) {
  InlineExecutor executor;
  std::vector<BF> w(12);
  std::vector<float> bias(4);
  const AnyTensorView weights = DenseMatrix(w.data(), 4, 3);
  PackedLinearSpec good;
  good.n = 4;
  good.k = 3;
  ASSERT_TRUE(
      PackedLinearPlan::Create(good, weights, AnyTensorView(), executor).ok());
  const auto refuse = [&](auto change, const AnyTensorView& b,
                          absl::StatusCode code, const std::string& words) {
    PackedLinearSpec spec = good;
    change(spec);
    ExpectRefusal(PackedLinearPlan::Create(spec, weights, b, executor).status(),
                  code, words);
  };
  using Spec = PackedLinearSpec;
  const AnyTensorView none;
  refuse([](Spec& s) { s.n = 0; }, none, kInvalid,
         "packed_linear: n=0; need 1 <= n <= 2147483647");
  refuse([](Spec& s) { s.k = int64_t{1} << 31; }, none, kInvalid,
         "k=2147483648; need 1 <= k");
  refuse([](Spec& s) { s.k = -3; }, none, kInvalid, "k=-3");
  // Gate and up fit 2^63 bytes each, but not together.
  Spec huge;
  huge.n = PackedLinearPlan::kMaxExtent - 1;
  huge.k = PackedLinearPlan::kMaxExtent;
  huge.activation = LinearActivation::kSiluAndMul;
  ExpectRefusal(PackedLinearPlan::Create(
                    huge, MatrixView<BF>(w.data(), {huge.n, huge.k}, {0, 1}),
                    none, executor)
                    .status(),
                kInvalid, "packed weights have more than 2^63 bytes");
  refuse([](Spec& s) { s.a = DType::kI8; }, none,
         absl::StatusCode::kUnimplemented, "a is i8; need f32 or bf16 or f16");
  refuse([](Spec& s) { s.b = DType::kF8E4M3; }, none,
         absl::StatusCode::kUnimplemented, "b is f8e4m3");
  refuse([](Spec& s) { s.c = DType::kI32; }, none,
         absl::StatusCode::kUnimplemented, "c is i32");
  refuse([](Spec& s) { s.b = DType::kF16; }, none, kInvalid,
         "weights is bf16; need f16");
  refuse([](Spec& s) { s.n = 5; }, none, kInvalid,
         "weights is [4, 3]; need [5, 3]");
  refuse([](Spec& s) { s.order = WeightOrder::kKN; }, none, kInvalid,
         "weights is [4, 3]; need [3, 4]");
  refuse([](Spec&) {}, DenseVector(bias.data(), 3), kInvalid,
         "bias is [3]; need [4]");
  refuse([](Spec&) {}, DenseVector(w.data(), 4), kInvalid,
         "bias is bf16; need f32");
}

TEST(PackedLinearPlanTest, RefusesBadArguments) {
  InlineExecutor executor;
  std::vector<BF> w(12), a(6), c(8);
  const std::vector<BF> constant(8);
  PackedLinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  const auto plan = PackedLinearPlan::Create(spec, DenseMatrix(w.data(), 4, 3),
                                             AnyTensorView(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  EXPECT_EQ(plan->CheckArgs(in, out), absl::OkStatus());
  const auto refuse = [&](const AnyTensorView& x, const AnyTensorView& y,
                          const std::string& words) {
    ExpectRefusal(plan->CheckArgs(x, y), kInvalid, words);
  };
  refuse(DenseMatrix(a.data(), 3, 2), out, "a is [3, 2]; need [any, 3]");
  refuse(in, DenseMatrix(c.data(), 1, 4), "c is [1, 4]; need [2, 4]");
  refuse(in, DenseMatrix(constant.data(), 2, 4), "c is read-only");
  refuse(in, DenseMatrix(a.data(), 2, 4), "c overlaps a");
  refuse(in, MatrixView<BF>(c.data(), {2, 4}, {3, 1}), "c has stride 3");
  refuse(MatrixView<BF>(nullptr, {2, 3}, {3, 1}), out, "a is null");
}

}  // namespace
}  // namespace quern
