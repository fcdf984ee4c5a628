// Weights of kI4Group in every layout, and of kI8Group.

#include <cmath>
#include <cstdint>
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
using Layout = WeightLayout;

constexpr WeightCase kI4 = {WeightFormat::kI4Group};
constexpr WeightCase kI4Zeros = {WeightFormat::kI4Group, Layout::kNK, true};
constexpr WeightCase kI8 = {WeightFormat::kI8Group};

// Any codes and zero points, times scales that are powers of two or reals.
KnownWeights Random(Rng& rng, WeightCase c, int64_t n, int64_t k,
                    int64_t group_size, bool exact) {
  Shape s{0, n, k, 3};
  s.group_size = group_size;
  const bool int8 = c.format == WeightFormat::kI8Group;
  KnownWeights w =
      CodedWeights(rng, c, s, int8 ? -128 : -8, int8 ? 127 : 7, [&](Rng& r) {
        return exact ? PowersOfTwo(-2, 2)(r)
                     : ToDouble(FromDouble<F16>(r.Uniform(0.01, 1)));
      });
  w.scales_as = DType::kF16;
  w.bias = SmallIntegers<float>(rng, k % 2 == 0 ? n : 0, -99, 99);
  return w;
}
KnownWeights Exact(Rng& rng, WeightCase c, int64_t n, int64_t k,
                   int64_t group_size) {
  return Random(rng, c, n, k, group_size, true);
}
KnownWeights Real(Rng& rng, WeightCase c, int64_t n, int64_t k,
                  int64_t group_size) {
  return Random(rng, c, n, k, group_size, false);
}

class LinearI4Test : public LinearTest {
 protected:
  template <typename A, typename C>
  void ExpectExact(KnownWeights w, Layout layout,
                   const std::vector<int64_t>& rows, Executor& executor,
                   int64_t padding = 0) {
    SCOPED_TRACE(testing::Message()
                 << WeightLayoutName(layout) << " n=" << w.spec.n << " k="
                 << w.spec.k << " group_size=" << w.spec.group_size << " zeros "
                 << !w.zeros.empty() << " g_idx " << !w.g_idx.empty());
    TestRng rng;
    w.layout = layout;
    const auto plan = Plan(SpecOf<A, C>(), w);
    for (const int64_t m : rows) {
      Shape s{m};
      s.padding = padding;
      s.shift = padding % 3;
      LinearTest::ExpectExact<A, C>(
          plan, w, s, SmallIntegers<A>(rng, m * w.spec.k, -4, 4), executor);
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearI4Test);

TEST_P(LinearI4Test, IsExactOnSmallIntegersAtEveryRemainder) {
  TestRng rng;
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 5, 7, 8, 9, 16, 31, 67}) {
      const auto m = Exact(rng, k % 3 == 0 ? kI4Zeros : kI4, n, k, 16);
      ExpectExact<BF, float>(m, Layout::kNK,
                             {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 29}, inline_,
                             n % 4);
      if (HasFailure()) return;
    }
  }
}

TEST_P(LinearI4Test, ReadsEveryLayout) {
  TestRng rng;
  for (const int64_t group_size : {32, 64, 128, 320}) {
    for (const bool zeros : {false, true}) {
      auto m = Exact(rng, zeros ? kI4Zeros : kI4, 40, 320, group_size);
      for (const auto layout : {Layout::kNK, Layout::kAwq, Layout::kGptqV2}) {
        ExpectExact<BF, float>(m, layout, {1, 6}, inline_);
      }
      // Zeros that are stored less one are 1 .. 16.
      for (double& zero : m.zeros) ++zero;
      ExpectExact<BF, float>(m, Layout::kGptq, {1, 6}, inline_);
    }
  }
  for (const int64_t k : {67, 96}) {
    ExpectExact<BF, float>(Exact(rng, kI8, 37, k, 32), Layout::kNK, {1, 4, 6},
                           inline_);
  }
  for (const int64_t group_size : {16, 48, 96}) {
    ExpectExact<BF, float>(Exact(rng, kI8, 37, 96, group_size), Layout::kNK,
                           {1, 4, 6}, inline_);
  }
  // Without zeros n may be any.
  ExpectExact<BF, float>(Exact(rng, kI4, 37, 64, 32), Layout::kGptq, {1, 6},
                         inline_);
}

TEST_P(LinearI4Test, DecodesEveryCodeWithEveryZeroPoint) {
  Shape s{0, 256, 32, 3};
  auto m = EmptyWeights(kI8, s);
  m.scales.assign(256, 1.0);
  for (int i = 0; i < 256 * 32; ++i) {
    m.codes.push_back((i / 32 + 5 * (i % 32)) % 256 - 128);
  }
  ExpectExact<BF, float>(m, Layout::kNK, {1, 2, 5, 16}, inline_);
  m.spec.format = WeightFormat::kI4Group;
  for (double& code : m.codes) code = static_cast<int>(code) & 15;
  for (int col = 0; col < 256; ++col) m.zeros.push_back(col / 16);
  for (const auto layout : {Layout::kNK, Layout::kAwq, Layout::kGptqV2}) {
    ExpectExact<BF, float>(m, layout, {1, 2, 5, 16}, inline_);
  }
}

TEST_P(LinearI4Test, FollowsTheGroupsOfActOrder) {
  TestRng rng;
  ManyWorkers many(5);
  for (const bool zeros : {false, true}) {
    auto m = Exact(rng, zeros ? kI4Zeros : kI4, 24, 264, 64);  // the last has 8
    m.ShuffleGroups(rng);
    for (Executor* executor : std::vector<Executor*>{&inline_, &many}) {
      ExpectExact<BF, float>(m, Layout::kGptqV2, {1, 3, 6, 40}, *executor, 2);
      ExpectExact<float, F16>(m, Layout::kNK, {1, 6}, *executor, 2);
      ExpectExact<F16, BF>(m, Layout::kGptqV2, {1, 6}, *executor);
    }
  }
  // In order, it is as if there were none.
  auto m = Exact(rng, kI4, 24, 128, 32);
  for (int i = 0; i < 128; ++i) m.g_idx.push_back(i / 32);
  ExpectExact<BF, float>(m, Layout::kGptq, {1, 6}, inline_);
}

TEST_P(LinearI4Test, IsExactForAnyTypes) {
  TestRng rng;
  const auto m = Exact(rng, kI4Zeros, 35, 150, 48);
  ExpectExact<BF, BF>(m, Layout::kNK, {1, 9}, inline_, 1);
  ExpectExact<BF, F16>(m, Layout::kNK, {1, 9}, inline_, 1);
  ExpectExact<F16, F16>(m, Layout::kNK, {1, 9}, inline_, 1);
  ExpectExact<F16, float>(m, Layout::kNK, {1, 9}, inline_, 1);
  ExpectExact<float, float>(m, Layout::kNK, {1, 9}, inline_, 1);
  ExpectExact<float, BF>(m, Layout::kNK, {1, 9}, inline_, 1);
}

TEST_P(LinearI4Test, IsExactAcrossGroupsAndChunksOfK) {
  TestRng rng;
  const auto executor = Workers(2);
  for (const int64_t k : {127, 129, 511, 512, 513, 1090}) {
    // 48 does not divide the 512 k of a chunk.
    for (const int64_t group_size :
         {int64_t{16}, int64_t{48}, int64_t{128}, k}) {
      const auto m =
          Exact(rng, k % 2 == 1 ? kI4Zeros : kI4, 150, k, group_size);
      ExpectExact<BF, float>(m, Layout::kNK, {1, 4, 17, 40}, *executor);
      if (HasFailure()) return;
    }
  }
  ExpectExact<float, float>(Exact(rng, kI4Zeros, 150, 1090, 128), Layout::kNK,
                            {1, 17, 40}, *executor);
}

TEST_P(LinearI4Test, TakesMinusOneForAllOfK) {
  TestRng rng;
  const auto w = Exact(rng, kI4Zeros, 20, 600, 600);
  const WeightSources sources(w);
  LinearWeightsSpec spec = sources.Spec();
  spec.group_size = LinearWeightsSpec::kWholeK;
  const auto packed = LinearWeights::Pack(spec, {sources.All()}, inline_);
  ASSERT_EQ(packed.status(), absl::OkStatus());
  LinearTest::ExpectExact<BF, float>(Plan(SpecOf<BF, float>(), *packed), w, {2},
                                     SmallIntegers<BF>(rng, 2 * 600, -4, 4),
                                     inline_);
}

TEST_P(LinearI4Test, IsExactAcrossBlocksOfRowsAndWorkers) {
  TestRng rng;
  ExpectExact<BF, BF>(Exact(rng, kI4Zeros, 72, 40, 32), Layout::kNK,
                      {255, 256, 257, 513}, inline_, 3);
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 400}) {
      ExpectExact<BF, float>(Exact(rng, kI4Zeros, n, 1500, 128), Layout::kNK,
                             {1, 16, 40}, executor);
    }
  }
}

TEST_P(LinearI4Test, StaysWithinTheDerivedBound) {
  TestRng rng;
  const auto executor = Workers(2);
  const auto bounded = [&](auto type, auto result, KnownWeights w,
                           Layout layout) {
    using A = decltype(type);
    using C = decltype(result);
    w.layout = layout;
    const auto plan = Plan(SpecOf<A, C>(), w);
    for (const int64_t m : {1, 3, 5, 33}) {
      SCOPED_TRACE(testing::Message() << "m=" << m << " " << plan.Explain(m));
      const auto a = UniformReals<A>(rng, m * w.spec.k);
      EXPECT_TRUE(IsWithinBound(RunLinear<A, C>(plan, {m}, a, *executor), w, m,
                                ToDoubles(a)));
    }
  };
  bounded(BF(), float(), Real(rng, kI4Zeros, 200, 1100, 128), Layout::kNK);
  bounded(BF(), BF(), Real(rng, kI4Zeros, 136, 704, 32), Layout::kAwq);
  bounded(float(), float(), Real(rng, kI4Zeros, 200, 1100, 64), Layout::kNK);
  bounded(F16(), F16(), Real(rng, kI4, 40, 320, 32), Layout::kNK);
  bounded(BF(), float(), Real(rng, kI8, 40, 320, 32), Layout::kNK);
}

TEST_P(LinearI4Test, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  auto w = Real(rng, kI4Zeros, 83, 1700, 128);
  ExpectRowsAlone<BF>(Plan(SpecOf<BF, float>(), w), {67}, rng);
  w.ShuffleGroups(rng);
  ExpectRowsAlone<BF>(Plan(SpecOf<BF, float>(), w), {37}, rng);
  ExpectRowsAlone<float>(Plan(SpecOf<float, float>(), w), {37}, rng);
  ExpectRowsAlone<BF>(Plan(SpecOf<BF, float>(), Real(rng, kI8, 35, 640, 32)),
                      {37}, rng);
}

TEST_P(LinearI4Test, ANaNStaysInItsRow) {
  TestRng rng;
  const auto plan = Plan(SpecOf<BF, float>(), Exact(rng, kI4Zeros, 40, 72, 32));
  for (const int64_t m : {3, 6}) {
    ExpectStaysInItsRow(plan, SmallIntegers<BF>(rng, m * 72), 71,
                        {std::nan("")},
                        [](float c, double) { return std::isnan(c); });
  }
}

TEST_P(LinearI4Test, NoRowsAreNoWork) {
  TestRng rng;
  const auto plan = Plan(SpecOf<BF, float>(), Exact(rng, kI4Zeros, 4, 3, 32));
  EXPECT_TRUE(
      (RunLinear<BF, float>(plan, {0}, std::vector<BF>(), inline_)).empty());
}

}  // namespace
}  // namespace quern
