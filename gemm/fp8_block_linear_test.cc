#include "gemm/fp8_block_linear.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/block_linear_testutil.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/reference_convert.h"
#include "testing/refusal.h"
#include "testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using F8 = Float8E4M3;
using Spec = Fp8BlockLinearSpec;

Spec SpecOf(int64_t n, int64_t k, int64_t block_n = 128,
            int64_t block_k = 128) {
  Spec spec;
  spec.n = n;
  spec.k = k;
  spec.block_n = block_n;
  spec.block_k = block_k;
  return spec;
}

class Fp8BlockLinearTest : public BlockLinearTest {
 protected:
  template <typename A, typename C>
  Fp8BlockLinearPlan Plan(Spec spec, const std::vector<F8>& w,
                          const std::vector<float>& scales,
                          const std::vector<float>& bias = {}) {
    spec.a = DTypeOf<A>;
    spec.c = DTypeOf<C>;
    const int64_t blocks = DivCeil(spec.k, spec.block_k);
    const StridedMatrix<F8> weights(w, spec.n, spec.k, spec.k + spec.n % 3);
    const StridedMatrix<float> scale(scales, DivCeil(spec.n, spec.block_n),
                                     blocks, blocks + spec.k % 3);
    const GuardBuffer<float> b(bias);
    auto plan = Fp8BlockLinearPlan::Create(
        spec, weights.view(), scale.view(),
        bias.empty() ? AnyTensorView() : AnyTensorView(b.view()), inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  static BlockWeights Dequantised(const Spec& spec, const std::vector<F8>& w,
                                  const std::vector<float>& scales,
                                  const std::vector<float>& bias) {
    BlockWeights all;
    all.bias = bias;
    const int64_t blocks = DivCeil(spec.k, spec.block_k);
    for (int64_t n = 0; n < spec.n; ++n) {
      for (int64_t k = 0; k < spec.k; ++k) {
        const double scale = scales[static_cast<size_t>(
            n / spec.block_n * blocks + k / spec.block_k)];
        all.values.push_back(ToDouble(w[static_cast<size_t>(n * spec.k + k)]) *
                             scale);
      }
    }
    all.magnitudes = Magnitudes(all.values);
    return all;
  }

  static std::vector<float> PowersOfTwo(Rng& rng, const Spec& spec) {
    std::vector<float> scales;
    const int64_t count =
        DivCeil(spec.n, spec.block_n) * DivCeil(spec.k, spec.block_k);
    for (int64_t i = 0; i < count; ++i) {
      scales.push_back(std::ldexp(1.0f, static_cast<int>(rng.Integer(-2, 2))));
    }
    return scales;
  }

  template <typename A, typename C>
  void Exact(const Spec& spec, const std::vector<int64_t>& rows,
             Executor& executor, int64_t padding = 0) {
    TestRng rng;
    const auto w = SmallIntegers<F8>(rng, spec.n * spec.k);
    const auto scales = PowersOfTwo(rng, spec);
    const auto bias =
        SmallIntegers<float>(rng, spec.k % 2 == 0 ? spec.n : 0, -99, 99);
    const auto plan = Plan<A, C>(spec, w, scales, bias);
    const auto dequantised = Dequantised(spec, w, scales, bias);
    for (const int64_t m : rows) {
      ExpectExact<A, C>(plan, m, dequantised, rng, executor, padding);
    }
  }

  template <typename A, typename C>
  void Bounded(const Spec& spec) {
    TestRng rng;
    const auto workers = Workers(2);
    const auto w = UniformReals<F8>(rng, spec.n * spec.k, -2, 2);
    const int64_t blocks = DivCeil(spec.k, spec.block_k);
    const auto scales = UniformReals<float>(
        rng, DivCeil(spec.n, spec.block_n) * blocks, 0.1, 1.0);
    const auto bias = UniformReals<float>(rng, spec.n);
    const auto plan = Plan<A, C>(spec, w, scales, bias);
    const auto dequantised = Dequantised(spec, w, scales, bias);
    for (const int64_t m : {1, 3, 5, 33}) {
      ExpectWithinBound<A, C>(plan, m, blocks + spec.k / 512 + 1, dequantised,
                              rng, *workers);
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(Fp8BlockLinearTest);

TEST_P(Fp8BlockLinearTest, IsExactOnSmallIntegersAtEveryRemainder) {
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 3, 4, 5, 16, 31, 67}) {
      Exact<BF, float>(SpecOf(n, k, 16, 16),
                       {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 29}, inline_, n % 4);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Fp8BlockLinearTest, IsExactForAnyTypes) {
  const Spec spec = SpecOf(35, 150, 32, 48);
  Exact<BF, BF>(spec, {1, 9}, inline_, 1);
  Exact<BF, F16>(spec, {1, 9}, inline_, 1);
  Exact<F16, F16>(spec, {1, 9}, inline_, 1);
  Exact<F16, float>(spec, {1, 9}, inline_, 1);
  Exact<float, float>(spec, {1, 9}, inline_, 1);
  Exact<float, BF>(spec, {1, 9}, inline_, 1);
}

TEST_P(Fp8BlockLinearTest, IsExactAcrossBlocksAndChunksOfK) {
  const auto executor = Workers(2);
  for (const int64_t k : {127, 128, 129, 511, 512, 513, 1090}) {
    // 48 does not divide the 512 k of a chunk; 2000 is more than k.
    for (const int64_t block_k : {16, 48, 128, 640, 2000}) {
      Exact<BF, float>(SpecOf(150, k, 128, block_k), {1, 4, 17, 40}, *executor);
      if (HasFailure()) return;
    }
  }
  Exact<float, float>(SpecOf(150, 1090), {1, 17, 40}, *executor);
}

TEST_P(Fp8BlockLinearTest, IsExactAcrossBlocksOfRowsAndWorkers) {
  Exact<BF, BF>(SpecOf(72, 40), {255, 256, 257, 513}, inline_, 3);
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 400}) {
      Exact<BF, float>(SpecOf(n, 1500), {1, 16, 40}, executor);
    }
  }
}

TEST_P(Fp8BlockLinearTest, StaysWithinTheDerivedBound) {
  Bounded<BF, float>(SpecOf(200, 1100));
  Bounded<BF, BF>(SpecOf(131, 700, 64, 32));
  Bounded<float, float>(SpecOf(200, 1100));
  Bounded<F16, F16>(SpecOf(40, 300));
}

TEST_P(Fp8BlockLinearTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  const Spec spec = SpecOf(83, 1700);
  const auto w = UniformReals<F8>(rng, spec.n * spec.k, -4, 4);
  const auto scales = UniformReals<float>(rng, DivCeil(spec.k, int64_t{128}));
  ExpectRowsAlone<BF>(Plan<BF, float>(spec, w, scales), 67, rng);
  ExpectRowsAlone<float>(Plan<float, float>(spec, w, scales), 37, rng);
}

// Row m picks w[., m]; a NaN anywhere in a column is in every sum of it.
TEST_P(Fp8BlockLinearTest, DecodesAllCodesExactly) {
  constexpr int64_t kN = 256, kK = 7;
  const Spec spec = SpecOf(kN, kK);
  std::vector<F8> w;
  std::vector<bool> nan(kN);
  for (int64_t n = 0; n < kN; ++n) {
    for (int64_t k = 0; k < kK; ++k) {
      w.push_back({static_cast<uint8_t>(n + 51 * k)});
      if (std::isnan(ToDouble(w.back()))) nan[static_cast<size_t>(n)] = true;
    }
  }
  const auto plan = Plan<BF, float>(spec, w, {1.0f, 1.0f});
  for (const int64_t rows : {int64_t{1}, kK}) {
    for (int64_t first = 0; first + rows <= kK; ++first) {
      std::vector<double> a(static_cast<size_t>(rows * kK));
      for (int64_t r = 0; r < rows; ++r) {
        a[static_cast<size_t>(r * kK + first + r)] = 1;
      }
      const auto got = Run<BF, float>(plan, rows, RoundedTo<BF>(a), inline_);
      for (int64_t i = 0; i < rows * kN; ++i) {
        const auto n = static_cast<size_t>(i % kN);
        const int64_t k = first + i / kN;
        const float c = got[static_cast<size_t>(i)];
        if (nan[n]) {
          EXPECT_TRUE(std::isnan(c)) << n;
        } else {
          EXPECT_EQ(c, ToDouble(w[n * kK + static_cast<size_t>(k)]))
              << "code "
              << static_cast<int>((static_cast<int64_t>(n) + 51 * k) % 256);
        }
      }
    }
  }
}

TEST_P(Fp8BlockLinearTest, ANonFiniteRowStaysInItsRow) {
  TestRng rng;
  const Spec spec = SpecOf(40, 70);
  const auto w = SmallIntegers<F8>(rng, spec.n * spec.k, 1, 8);
  const auto plan = Plan<BF, float>(spec, w, {1.0f});
  for (const int64_t m : {3, 6}) {
    auto a = SmallIntegers<BF>(rng, m * spec.k);
    const auto clean = Run<BF, float>(plan, m, a, inline_);
    a[static_cast<size_t>(spec.k + 69)] =
        FromDouble<BF>(std::numeric_limits<double>::infinity());
    const auto got = Run<BF, float>(plan, m, a, inline_);
    for (int64_t i = 0; i < m * spec.n; ++i) {
      const float c = got[static_cast<size_t>(i)];
      EXPECT_EQ(c, i / spec.n == 1 ? std::numeric_limits<float>::infinity()
                                   : clean[static_cast<size_t>(i)])
          << i;
    }
  }
}

TEST_P(Fp8BlockLinearTest, NoRowsAreNoWork) {
  const auto plan = Plan<BF, float>(SpecOf(4, 3), std::vector<F8>(12), {1.0f});
  EXPECT_TRUE((Run<BF, float>(plan, 0, std::vector<BF>(), inline_)).empty());
}

TEST(Fp8BlockLinearPlanTest, RefusesABadSpec) {
  InlineExecutor executor;
  const std::vector<F8> w(160);
  const std::vector<float> f(8);
  const Spec good = SpecOf(4, 40, 2, 16);
  const AnyTensorView weights = DenseMatrix(w.data(), 4, 40);
  const AnyTensorView scales = DenseMatrix(f.data(), 2, 3);
  const AnyTensorView none;
  ASSERT_TRUE(
      Fp8BlockLinearPlan::Create(good, weights, scales, none, executor).ok());
  const auto refuse = [&](auto change, const std::string& words,
                          absl::StatusCode code =
                              absl::StatusCode::kInvalidArgument) {
    Spec spec = good;
    AnyTensorView x = weights, s = scales, bias;
    change(spec, x, s, bias);
    ExpectRefusal(
        Fp8BlockLinearPlan::Create(spec, x, s, bias, executor).status(), code,
        words);
  };
  using View = AnyTensorView;
  refuse([](Spec& s, View&, View&, View&) { s.n = 0; },
         "fp8_block_linear: n=0; need 1 <= n <= 2147483647");
  refuse([](Spec& s, View&, View&, View&) { s.k = -1; }, "k=-1");
  refuse([](Spec& s, View&, View&, View&) { s.block_n = 0; }, "block_n=0");
  refuse([](Spec& s, View&, View&, View&) { s.block_k = 0; }, "block_k=0");
  refuse([](Spec& s, View&, View&, View&) { s.block_k = 24; },
         "block_k=24; need a multiple of 16, or k=40 or more");
  refuse([](Spec& s, View&, View&, View&) { s.a = DType::kI8; },
         "a is i8; need f32 or bf16 or f16", absl::StatusCode::kUnimplemented);
  refuse([](Spec& s, View&, View&, View&) { s.c = DType::kF8E4M3; },
         "c is f8e4m3", absl::StatusCode::kUnimplemented);
  refuse([](Spec&, View& x, View&, View&) { x = View(); }, "weights");
  refuse(
      [&](Spec&, View& x, View&, View&) { x = DenseMatrix(w.data(), 4, 39); },
      "weights is [4, 39]; need [4, 40]");
  refuse([&](Spec&, View& x, View&, View&) { x = DenseMatrix(f.data(), 4, 2); },
         "weights is f32; need f8e4m3");
  refuse([&](Spec&, View&, View& s, View&) { s = DenseMatrix(f.data(), 2, 2); },
         "scales is [2, 2]; need [2, 3]");
  refuse([&](Spec&, View&, View&, View& b) { b = DenseVector(f.data(), 3); },
         "bias is [3]; need [4]");
}

TEST(Fp8BlockLinearPlanTest, RefusesBadArguments) {
  InlineExecutor executor;
  const std::vector<F8> w(12);
  std::vector<float> scales(1);
  std::vector<BF> a(6), c(8);
  const std::vector<BF> constant(8);
  const auto plan = Fp8BlockLinearPlan::Create(
      SpecOf(4, 3), DenseMatrix(w.data(), 4, 3),
      DenseMatrix(scales.data(), 1, 1), AnyTensorView(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  EXPECT_EQ(plan->CheckArgs(in, out), absl::OkStatus());
  const auto refuse = [&](const AnyTensorView& x, const AnyTensorView& y,
                          const std::string& words) {
    ExpectRefusal(plan->CheckArgs(x, y), words);
  };
  refuse(DenseMatrix(a.data(), 3, 2), out, "a is [3, 2]; need [any, 3]");
  refuse(in, DenseMatrix(c.data(), 1, 4), "c is [1, 4]; need [2, 4]");
  refuse(in, DenseMatrix(constant.data(), 2, 4), "c is read-only");
  refuse(in, DenseMatrix(a.data(), 1, 4), "c is [1, 4]");
  refuse(MatrixView<BF>(c.data(), {2, 3}, {3, 1}), out, "c overlaps a");
  refuse(MatrixView<BF>(nullptr, {2, 3}, {3, 1}), out, "a is null");
}

}  // namespace
}  // namespace quern
