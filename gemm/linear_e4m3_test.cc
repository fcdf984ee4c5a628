// Weights of kE4M3Block: fp8 with a scale for each block of columns and of k.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/linear_codes_testutil.h"
#include "quern/gemm/testing/linear_weights_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using F8 = Float8E4M3;

struct Shape {
  int64_t n, k;
  int64_t block_n = 128, block_k = 128;

  int64_t blocks_n() const { return DivCeil(n, block_n); }
  int64_t blocks_k() const { return DivCeil(k, block_k); }
};

class LinearE4M3Test : public LinearCodesTest {
 protected:
  template <typename A, typename C>
  LinearPlan Plan(const Shape& s, const std::vector<F8>& w,
                  const std::vector<float>& scales,
                  const std::vector<float>& bias = {}) {
    const StridedMatrix<F8> codes(w, s.n, s.k, s.k + s.n % 3);
    const StridedMatrix<float> scale(scales, s.blocks_n(), s.blocks_k(),
                                     s.blocks_k() + s.k % 3);
    const GuardBuffer<float> b(bias);
    LinearSource source;
    source.codes = codes.view();
    source.scales = scale.view();
    source.block_n = s.block_n;
    if (!bias.empty()) source.bias = b.view();
    LinearWeightsSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.format = WeightFormat::kE4M3Block;
    spec.group_size = s.block_k;
    const auto weights = LinearWeights::Pack(spec, {source}, inline_);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return PlanOf(*weights, SpecOf(DTypeOf<A>, DTypeOf<C>));
  }

  static DecodedWeights Decoded(const Shape& s, const std::vector<F8>& w,
                                const std::vector<float>& scales,
                                const std::vector<float>& bias) {
    DecodedWeights all;
    all.bias = bias;
    for (int64_t n = 0; n < s.n; ++n) {
      for (int64_t k = 0; k < s.k; ++k) {
        const double scale = scales[static_cast<size_t>(
            n / s.block_n * s.blocks_k() + k / s.block_k)];
        all.values.push_back(ToDouble(w[static_cast<size_t>(n * s.k + k)]) *
                             scale);
      }
    }
    all.magnitudes = Magnitudes(all.values);
    return all;
  }

  static std::vector<float> PowersOfTwo(Rng& rng, const Shape& s) {
    std::vector<float> scales;
    for (int64_t i = 0; i < s.blocks_n() * s.blocks_k(); ++i) {
      scales.push_back(std::ldexp(1.0f, static_cast<int>(rng.Integer(-2, 2))));
    }
    return scales;
  }

  template <typename A, typename C>
  void Exact(const Shape& s, const std::vector<int64_t>& rows,
             Executor& executor, int64_t padding = 0) {
    TestRng rng;
    const auto w = SmallIntegers<F8>(rng, s.n * s.k);
    const auto scales = PowersOfTwo(rng, s);
    const auto bias =
        SmallIntegers<float>(rng, s.k % 2 == 0 ? s.n : 0, -99, 99);
    const auto plan = Plan<A, C>(s, w, scales, bias);
    const auto decoded = Decoded(s, w, scales, bias);
    for (const int64_t m : rows) {
      ExpectExact<A, C>(plan, m, decoded, rng, executor, padding);
    }
  }

  template <typename A, typename C>
  void Bounded(const Shape& s) {
    TestRng rng;
    const auto workers = Workers(2);
    const auto w = UniformReals<F8>(rng, s.n * s.k, -2, 2);
    const auto scales =
        UniformReals<float>(rng, s.blocks_n() * s.blocks_k(), 0.1, 1.0);
    const auto bias = UniformReals<float>(rng, s.n);
    const auto plan = Plan<A, C>(s, w, scales, bias);
    const auto decoded = Decoded(s, w, scales, bias);
    for (const int64_t m : {1, 3, 5, 33}) {
      ExpectWithinBound<A, C>(plan, m, s.blocks_k() + s.k / 512 + 1, decoded,
                              rng, *workers);
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearE4M3Test);

TEST_P(LinearE4M3Test, IsExactOnSmallIntegersAtEveryRemainder) {
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 3, 4, 5, 16, 31, 67}) {
      Exact<BF, float>(Shape{n, k, 16, 16},
                       {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 29}, inline_, n % 4);
      if (HasFailure()) return;
    }
  }
}

TEST_P(LinearE4M3Test, IsExactForAnyTypes) {
  const Shape s{35, 150, 32, 48};
  Exact<BF, BF>(s, {1, 9}, inline_, 1);
  Exact<BF, F16>(s, {1, 9}, inline_, 1);
  Exact<F16, F16>(s, {1, 9}, inline_, 1);
  Exact<F16, float>(s, {1, 9}, inline_, 1);
  Exact<float, float>(s, {1, 9}, inline_, 1);
  Exact<float, BF>(s, {1, 9}, inline_, 1);
}

TEST_P(LinearE4M3Test, IsExactAcrossBlocksAndChunksOfK) {
  const auto executor = Workers(2);
  for (const int64_t k : {127, 128, 129, 511, 512, 513, 1090}) {
    // 48 does not divide the 512 k of a chunk; 2000 is more than k.
    for (const int64_t block_k : {16, 48, 128, 640, 2000}) {
      Exact<BF, float>(Shape{150, k, 128, block_k}, {1, 4, 17, 40}, *executor);
      if (HasFailure()) return;
    }
  }
  Exact<float, float>(Shape{150, 1090}, {1, 17, 40}, *executor);
}

TEST_P(LinearE4M3Test, IsExactAcrossBlocksOfRowsAndWorkers) {
  Exact<BF, BF>(Shape{72, 40}, {255, 256, 257, 513}, inline_, 3);
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 400}) {
      Exact<BF, float>(Shape{n, 1500}, {1, 16, 40}, executor);
    }
  }
}

TEST_P(LinearE4M3Test, StaysWithinTheDerivedBound) {
  Bounded<BF, float>(Shape{200, 1100});
  Bounded<BF, BF>(Shape{131, 700, 64, 32});
  Bounded<float, float>(Shape{200, 1100});
  Bounded<F16, F16>(Shape{40, 300});
}

TEST_P(LinearE4M3Test, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  const Shape s{83, 1700};
  const auto w = UniformReals<F8>(rng, s.n * s.k, -4, 4);
  const auto scales = UniformReals<float>(rng, DivCeil(s.k, int64_t{128}));
  ExpectRowsAlone<BF>(Plan<BF, float>(s, w, scales), 67, rng);
  ExpectRowsAlone<float>(Plan<float, float>(s, w, scales), 37, rng);
}

// Row m picks w[., m]; a NaN anywhere in a column is in every sum of it.
TEST_P(LinearE4M3Test, DecodesAllCodesExactly) {
  constexpr int64_t kN = 256, kK = 7;
  const Shape s{kN, kK};
  std::vector<F8> w;
  std::vector<bool> nan(kN);
  for (int64_t n = 0; n < kN; ++n) {
    for (int64_t k = 0; k < kK; ++k) {
      w.push_back({static_cast<uint8_t>(n + 51 * k)});
      if (std::isnan(ToDouble(w.back()))) nan[static_cast<size_t>(n)] = true;
    }
  }
  const auto plan = Plan<BF, float>(s, w, {1.0f, 1.0f});
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

TEST_P(LinearE4M3Test, ANonFiniteRowStaysInItsRow) {
  TestRng rng;
  const Shape s{40, 70};
  const auto plan =
      Plan<BF, float>(s, SmallIntegers<F8>(rng, s.n * s.k, 1, 8), {1.0f});
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ExpectStaysInItsRow(plan, kInfinity, rng,
                      [](float c) { return c == kInfinity; });
}

// Blocks of columns begin anew with each source.
TEST_P(LinearE4M3Test, EachSourceHasBlocksOfItsOwn) {
  TestRng rng;
  const Shape parts[] = {{45, 96, 32, 48}, {3, 96, 2, 48}, {52, 96, 128, 48}};
  DecodedWeights all;
  LinearWeightsSpec spec;
  spec.k = 96;
  spec.format = WeightFormat::kE4M3Block;
  spec.group_size = 48;
  std::vector<std::vector<F8>> codes;
  std::vector<std::vector<float>> scales;
  std::vector<LinearSource> sources;
  for (const Shape& s : parts) {
    codes.push_back(SmallIntegers<F8>(rng, s.n * s.k));
    scales.push_back(PowersOfTwo(rng, s));
    const auto decoded = Decoded(s, codes.back(), scales.back(), {});
    all.values.insert(all.values.end(), decoded.values.begin(),
                      decoded.values.end());
    LinearSource source;
    source.codes = DenseMatrix(codes.back().data(), s.n, s.k);
    source.scales =
        DenseMatrix(scales.back().data(), s.blocks_n(), s.blocks_k());
    source.block_n = s.block_n;
    sources.push_back(source);
    spec.n += s.n;
  }
  const auto weights = LinearWeights::Pack(spec, sources, inline_);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto plan = PlanOf(*weights, SpecOf(DType::kBF16, DType::kF32));
  for (const int64_t m : {1, 17}) {
    ExpectExact<BF, float>(plan, m, all, rng, inline_);
  }
}

TEST_P(LinearE4M3Test, NoRowsAreNoWork) {
  const auto plan = Plan<BF, float>(Shape{4, 3}, std::vector<F8>(12), {1.0f});
  EXPECT_TRUE((Run<BF, float>(plan, 0, std::vector<BF>(), inline_)).empty());
}

}  // namespace
}  // namespace quern
