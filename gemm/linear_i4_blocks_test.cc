// LinearPlan on int4 weights in groups, by rows of int8 in blocks.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
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
#include "quern/testing/reference_gemm.h"

namespace quern {
namespace {

// Any codes and zero points of four bits. scale(rng) is an f32.
template <typename Scale>
KnownWeights I4Weights(Rng& rng, Shape s, int64_t group_size, bool zeros,
                       const Scale& scale) {
  s.group_size = group_size;
  s.padding = 3;
  KnownWeights w = CodedWeights(
      rng, {WeightFormat::kI4Group, WeightLayout::kNK, zeros}, s, -8, 7, scale);
  w.bias = SmallIntegers<float>(rng, s.k % 64 == 0 ? s.n : 0, -99, 99);
  return w;
}
const auto kPowerOfTwo = PowersOfTwo(-2, 1);
double Real(Rng& rng) {
  return ToDouble(FromDouble<float>(rng.Uniform(0.001, 0.1)));
}

// Rows of which each block has a scale of 1, or of 127, in whatever order k is.
template <typename A>
std::vector<A> RowsOfExtremes(Rng& rng, int64_t count) {
  std::vector<A> a(static_cast<size_t>(count));
  for (A& x : a) {
    const int64_t of_seven = rng.Integer(-3, 3);
    if (std::abs(of_seven) == 3) {
      x = FromDouble<A>(of_seven < 0 ? -127.0 : 127.0);
    }
  }
  return a;
}

class LinearI4BlocksTest : public LinearTest {
 protected:
  template <typename A, typename C>
  void ExpectExact(const Shape& s, int64_t group_size, bool zeros,
                   Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << s << " group_size=" << group_size << " zeros=" << zeros);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const auto w = I4Weights(rng, s, group_size, zeros, kPowerOfTwo);
    const auto plan = Plan(Int8Spec<A, C>(), w);
    const auto a = IntegerRows<A>(rng, s.m * s.k);
    LinearTest::ExpectExact<A, C>(plan, w, s, a, executor);
  }

  // The bound of gemm/linear.h, with a bias.
  template <typename A, typename C>
  void ExpectWithinBound(const Shape& s, int64_t group_size, bool zeros,
                         Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << s << " group_size=" << group_size << " zeros=" << zeros);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    auto w = I4Weights(rng, s, group_size, zeros, Real);
    const auto plan = Plan(Int8Spec<A, C>(), w);
    const auto a = UniformReals<A>(rng, s.m * s.k);
    const auto rows = QuantisedInBlocks(a);
    const double roundings = static_cast<double>(s.k) / 16 + 3;
    EXPECT_TRUE(IsWithin(RunLinear<A, C>(plan, s, a, executor),
                         ProductOf(w, s.m, rows),
                         SumBounds(w, s.m, rows, Magnitudes(w.Values()),
                                   std::ldexp(roundings, -24))))
        << plan.Explain(s.m);
  }
};
QUERN_INSTANTIATE_INT8_ISA_TEST(LinearI4BlocksTest);

// Every number of rows of a tile, of columns in a panel, of blocks in a record;
// groups that end within records, with them, and beyond several.
TEST_P(LinearI4BlocksTest, IsExactOnIntegers) {
  ManyWorkers many(3);
  for (const bool zeros : {false, true}) {
    for (const int64_t k : {32, 64, 256, 288, 480, 1120}) {
      for (const int64_t group_size : {int64_t{32}, int64_t{64}, int64_t{96},
                                       int64_t{128}, int64_t{352}, k}) {
        for (const int64_t n : {1, 16, 40}) {
          const int64_t m = 1 + (k / 32 + group_size / 32 + n) % 13;
          ExpectExact<float, float>({m, n, k, 3}, group_size, zeros, many);
          if (HasFailure()) return;
        }
      }
    }
    for (const int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 31}) {
      ExpectExact<BFloat16, float>({m, 33, 416}, 128, zeros, inline_);
    }
    ExpectExact<Float16, BFloat16>({3, 17, 256}, 128, zeros, inline_);
  }
}

// More rows than are multiplied at once, and more columns than a worker's.
TEST_P(LinearI4BlocksTest, TakesManyRows) {
  ManyWorkers many(2);
  for (const bool zeros : {false, true}) {
    ExpectExact<BFloat16, float>({300, 150, 544}, 128, zeros, many);
  }
}

// Signs of element k of a row: none or all, any, or those of one bit of k, so
// that some 16 bits sum up the largest numbers whichever k they have.
bool IsNegative(Rng& rng, int64_t pattern, int64_t k) {
  if (pattern < 2) return pattern == 1;
  if (pattern == 2) return rng.Next() % 2 == 0;
  return (k >> (pattern - 3) & 1) != 0;
}

// The largest codes, zero points and numbers of a row, of either sign: integer
// sums of 16 bits neither saturate nor wrap. GPTQ's zero points are 1 to 16.
TEST_P(LinearI4BlocksTest, ReachesTheExtremesExactly) {
  TestRng rng;
  constexpr int64_t kN = 16, kK = 64;
  LinearWeightsSpec spec;
  spec.n = kN;
  spec.k = kK;
  spec.format = WeightFormat::kI4Group;
  spec.group_size = 32;
  const std::vector<float> scales(2 * kN, 1.0f);
  // The zero point of column c is c + 1 in the first group, 16 - c in the
  // other.
  const std::vector<int32_t> zeros = {
      0x76543210, static_cast<int32_t>(0xFEDCBA98u),
      static_cast<int32_t>(0x89ABCDEFu), 0x01234567};
  for (const int code : {0, 15}) {
    for (const bool has_zeros : {false, true}) {
      SCOPED_TRACE(testing::Message() << code << " zeros " << has_zeros);
      const std::vector<int32_t> codes(kK / 8 * kN, code == 0 ? 0 : -1);
      LinearSource source;
      source.layout = WeightLayout::kGptq;
      source.codes = DenseMatrix(codes.data(), kK / 8, kN);
      source.scales = DenseMatrix(scales.data(), 2, kN);
      if (has_zeros) source.zeros = DenseMatrix(zeros.data(), 2, kN / 8);
      const auto packed = LinearWeights::Pack(spec, {source}, inline_);
      ASSERT_EQ(packed.status(), absl::OkStatus());
      const auto plan = Plan(Int8Spec<float, float>(), *packed);
      std::vector<double> values;
      for (int64_t i = 0; i < kN * kK; ++i) {
        const int64_t c = i / kK;
        const int64_t zero = i % kK < 32 ? c + 1 : 16 - c;
        values.push_back(static_cast<double>(code - (has_zeros ? zero : 8)));
      }
      for (const int64_t m : {6, 16}) {
        std::vector<float> a(static_cast<size_t>(m * kK));
        for (size_t i = 0; i < a.size(); ++i) {
          const auto at = static_cast<int64_t>(i);
          a[i] = IsNegative(rng, at / kK % 6, at % kK) ? -127 : 127;
        }
        EXPECT_TRUE(
            AllEqual(RunLinear<float, float>(plan, {m, kN, kK}, a, inline_),
                     RoundedTo<float>(
                         ReferenceLinear(m, kN, kK, ToDoubles(a), values))));
      }
    }
  }
}

TEST_P(LinearI4BlocksTest, StaysWithinTheBound) {
  ManyWorkers many(2);
  for (const bool zeros : {false, true}) {
    for (const int64_t m : {1, 3, 21}) {
      ExpectWithinBound<BFloat16, float>({m, 37, 1152}, 128, zeros, many);
    }
    ExpectWithinBound<float, BFloat16>({2, 16, 2304}, 32, zeros, inline_);
    ExpectWithinBound<Float16, float>({7, 16, 256}, 64, zeros, inline_);
    ExpectWithinBound<float, float>({1, 16, 64}, 64, zeros, inline_);
  }
}

// Rows that are not rounded have no kernels of their own for AVX-VNNI.
class LinearI4LayoutsTest : public LinearI4BlocksTest {};
QUERN_INSTANTIATE_ISA_TEST(LinearI4LayoutsTest);

// Rows with one number that is not 0, which int8 represents, meet each weight
// alone: both arithmetics round its product once, and have the same bits.
TEST_P(LinearI4LayoutsTest, AreReadAsExactRowsDo) {
  TestRng rng;
  for (const WeightCase& c : kWeightCases) {
    if (c.format != WeightFormat::kI4Group) continue;
    for (const int64_t n : {24, 72}) {
      SCOPED_TRACE(testing::Message() << c << " n=" << n);
      const int64_t k = 320;
      const WeightSources random = RealSources(rng, c, n, k, 64);
      for (const bool gated : {false, true}) {
        const auto packed = random.Pack(random.CutAt({8, 24}), inline_, gated);
        auto spec = Int8Spec<BFloat16, float>(
            gated ? LinearActivation::kSiluAndMul : LinearActivation::kNone);
        const auto plan = Plan(spec, packed);
        spec.activations = LinearActivations::kExact;
        const auto exact = Plan(spec, packed);
        EXPECT_EQ(plan.packed_bytes(), exact.packed_bytes());
        for (const int64_t m : {3, 20}) {
          std::vector<BFloat16> a(static_cast<size_t>(m * k));
          for (int64_t r = 0; r < m; ++r) {
            a[static_cast<size_t>(r * k + rng.Integer(0, k - 1))] =
                FromDouble<BFloat16>(r % 2 == 0 ? 127 : -127);
          }
          EXPECT_TRUE(AllEqual(
              RunLinear<BFloat16, float>(plan, {m, n, k, 3}, a, inline_),
              RunLinear<BFloat16, float>(exact, {m}, a, inline_)));
        }
      }
    }
  }
}

TEST_P(LinearI4BlocksTest, FollowsTheGroupsOfActOrder) {
  TestRng rng;
  ManyWorkers many(5);
  for (const bool zeros : {false, true}) {
    const Shape s{9, 24, 352};
    auto w = I4Weights(rng, s, 128, zeros, kPowerOfTwo);
    w.ShuffleGroups(rng);
    const auto expect = [&](auto type) {
      using A = decltype(type);
      const auto plan = Plan(Int8Spec<A, float>(), w);
      for (const int64_t m : {1, 9, 40}) {
        const auto a = RowsOfExtremes<A>(rng, m * s.k);
        LinearTest::ExpectExact<A, float>(plan, w, {m, s.n, s.k, 2}, a, many);
      }
    };
    expect(float());
    expect(BFloat16());
    expect(Float16());
  }
}

TEST_P(LinearI4BlocksTest, RowsDoNotDependOnOthersNorOnThreads) {
  TestRng rng;
  for (const bool zeros : {false, true}) {
    const Shape s{37, 50, 1056};
    auto w = I4Weights(rng, s, 96, zeros, Real);
    ExpectRowsAlone<BFloat16>(Plan(Int8Spec<BFloat16, float>(), w), s, rng);
    w.ShuffleGroups(rng);
    ExpectRowsAlone<BFloat16>(Plan(Int8Spec<BFloat16, float>(), w), s, rng);
  }
}

TEST_P(LinearI4BlocksTest, HasTheBitsOfOtherInstructionSets) {
  TestRng rng;
  for (const bool zeros : {false, true}) {
    const auto w = I4Weights(rng, {0, 40, 768}, 96, zeros, Real);
    ExpectBitsOfTheBest(w.Pack(inline_), rng);
  }
}

TEST_P(LinearI4BlocksTest, GroupsHaveTheBitsOfLayers) {
  TestRng rng;
  for (const bool zeros : {false, true}) {
    ExpectGroupsHaveTheBitsOfLayers(Int8Spec<float, float>(), rng, [&] {
      auto w = I4Weights(rng, {0, 40, 416}, 128, zeros, Real);
      w.ShuffleGroups(rng);
      return w;
    });
  }
}

TEST_P(LinearI4BlocksTest, ZeroPointsOf8HaveTheBitsOfNone) {
  TestRng rng;
  const Shape s{0, 37, 480};
  auto w = I4Weights(rng, s, 96, false, Real);
  const auto none = Plan(Int8Spec<float, float>(), w);
  w.zeros.assign(w.scales.size(), 8.0);
  const auto eight = Plan(Int8Spec<float, float>(), w);
  for (const int64_t m : {1, 3, 20}) {
    const auto a = UniformReals<float>(rng, m * s.k);
    EXPECT_TRUE(
        AllBitsEqual(RunLinear<float, float>(eight, {m, s.n, s.k}, a, inline_),
                     RunLinear<float, float>(none, {m, s.n, s.k}, a, inline_)));
  }
}

TEST_P(LinearI4BlocksTest, WhatIsNotFiniteStaysInItsRow) {
  TestRng rng;
  const Shape s{6, 18, 512};
  const auto w = I4Weights(rng, s, 128, true, kPowerOfTwo);
  const auto plan = Plan(Int8Spec<float, float>(), w);
  for (const int64_t m : {2, 6, 17}) {
    const auto a = IntegerRows<float>(rng, m * s.k);
    ExpectStaysInItsRow(plan, a, 300, NotFinite(),
                        [](float c, double) { return std::isnan(c); });
  }
}

// One scale that is not finite, the largest, the smallest, below zero or zero.
TEST_P(LinearI4BlocksTest, AScaleIsOfItsColumnAlone) {
  TestRng rng;
  const Shape s{9, 18, 384};
  constexpr size_t kColumn = 17;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const bool zeros : {false, true}) {
    auto w = I4Weights(rng, s, 128, zeros, kPowerOfTwo);
    w.bias.clear();
    // Where every code is 9 its sums are not 0, with or without zero points.
    std::fill(w.codes.begin(), w.codes.end(), 9.0);
    std::fill(w.zeros.begin(), w.zeros.end(), 8.0);
    std::vector<float> a(static_cast<size_t>(s.m * s.k));
    for (int64_t i = 0; i < s.m; ++i) {
      a[static_cast<size_t>(i * s.k + 140)] = 127;  // in the second group
    }
    for (const double scale :
         {infinity, -infinity, std::nan(""), 0x1p120, 0x1p-142, -0.5, 0.0}) {
      SCOPED_TRACE(testing::Message() << scale);
      w.scales[18 + kColumn] = scale;
      const auto plan = Plan(Int8Spec<float, float>(), w);
      for (const int64_t m : {1, 9}) {
        const std::vector<float> rows(a.begin(), a.begin() + m * s.k);
        const auto c =
            RunLinear<float, float>(plan, {m, s.n, s.k}, rows, inline_);
        for (size_t i = 0; i < c.size(); ++i) {
          const size_t col = i % 18;
          const double want = 127 * w.scales[18 + col];
          if (std::isfinite(want)) {
            // Blocks of zeros have a scale of 1, so that nothing overflows.
            EXPECT_EQ(c[i], want) << i;
          } else {
            EXPECT_TRUE(col == kColumn && !std::isfinite(c[i])) << i;
          }
        }
      }
    }
  }
}

TEST_P(LinearI4BlocksTest, NoRowsAreNoWork) {
  TestRng rng;
  const auto w = I4Weights(rng, {0, 4, 32}, 32, true, Real);
  ExpectNoRowsAreNoWork<float, float>(Plan(Int8Spec<float, float>(), w));
}

}  // namespace
}  // namespace quern
