#include "quern/gemm/linear_weights.h"

#include <malloc.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;

// Five panels, and halves of two and a half.
constexpr int64_t kN = 80;
constexpr int64_t kK = 96;

TEST(LinearWeightsTest, SourcesThatAreStackedHaveTheBytesOfOne) {
  TestRng rng;
  std::vector<int64_t> every;
  for (int64_t i = 1; i < kN; ++i) every.push_back(i);
  InlineExecutor executor;
  ManyWorkers many(7);
  for (const WeightCase& c : kWeightCases) {
    const WeightSources random = RealSources(rng, c, kN, kK);
    for (const bool gated : {false, true}) {
      const auto want = BytesOf(random.Pack(gated));
      // Where panels end, and where they do not; gate and up; one column each,
      // or as few as the layout has.
      for (const auto& cuts : std::vector<std::vector<int64_t>>{
               {16, 48}, {5, 22}, {kN / 2}, {3, kN / 2, 79}, every}) {
        const auto sources = random.CutAt(cuts);
        SCOPED_TRACE(testing::Message() << c << (gated ? ", gated, " : ", ")
                                        << sources.size() << " sources");
        EXPECT_TRUE(
            AllBitsEqual(BytesOf(random.Pack(sources, executor, gated)), want));
        EXPECT_TRUE(
            AllBitsEqual(BytesOf(random.Pack(sources, many, gated)), want));
      }
    }
  }
}

// What is no multiple of 16 has columns at its end that are no one's.
TEST(LinearWeightsTest, StackedColumnsMayEndInsideAPanel) {
  TestRng rng;
  InlineExecutor executor;
  for (const WeightCase& c : kWeightCases) {
    if (c.words_of_columns()) continue;
    SCOPED_TRACE(testing::Message() << c);
    for (const int64_t n : {1, 15, 17, 83}) {
      const WeightSources random = RealSources(rng, c, n, kK);
      EXPECT_TRUE(AllBitsEqual(
          BytesOf(random.Pack(random.CutAt({n / 3, n / 2}), executor)),
          BytesOf(random.Pack())))
          << n;
    }
  }
}

// The sums of a gated layer are those of the same columns without a gate. silu
// is off by 10 units and 140 * 2^-149 (gemm/epilogue.h), its product with up
// and the result by a unit each.
TEST(LinearWeightsTest, GatedWeightsAreGateThenUp) {
  TestRng rng;
  InlineExecutor executor;
  constexpr int64_t kM = 5, kHalf = kN / 2;
  for (const WeightCase& c : kWeightCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    const auto a = UniformReals<BF>(rng, kM * kK);
    const auto plain = RunPacked(random.Pack(), kM, a);
    std::vector<double> gate, up, want;
    for (int64_t i = 0; i < kM * kN; ++i) {
      (i % kN < kHalf ? gate : up).push_back(plain[static_cast<size_t>(i)]);
    }
    for (size_t i = 0; i < gate.size(); ++i) {
      want.push_back(ReferenceSilu(gate[i]) * up[i]);
    }
    const auto got =
        RunPacked(random.Pack(random.CutAt({kHalf}), executor, true), kM, a);
    EXPECT_TRUE(AllWithin(got, want, [&](double expected, int64_t i) {
      return std::ldexp(12.0, -24) * std::abs(expected) +
             std::ldexp(140.0, -149) *
                 (std::abs(up[static_cast<size_t>(i)]) + 1);
    }));
  }
}

TEST(LinearWeightsTest, SourcesWithoutABiasHaveOneOfZeros) {
  TestRng rng;
  InlineExecutor executor;
  for (const WeightCase& c : kFormatCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    auto sources = random.CutAt({5, 22});
    sources[1].bias = {};
    const auto some = random.Pack(sources, executor);
    EXPECT_TRUE(some.has_bias());

    const AnyTensorView bias = random.All().bias;
    const auto* from = static_cast<const float*>(bias.data());
    std::vector<float> zeroed(from, from + kN);
    const int64_t begin = sources[0].bias.extent(0);
    const int64_t end = kN - sources[2].bias.extent(0);
    for (int64_t i = begin; i < end; ++i) zeroed[static_cast<size_t>(i)] = 0;
    LinearSource all = random.All();
    all.bias = DenseVector(zeroed.data(), kN);
    EXPECT_TRUE(
        AllBitsEqual(BytesOf(some), BytesOf(random.Pack({all}, executor))));

    for (LinearSource& source : sources) source.bias = {};
    const auto none = random.Pack(sources, executor);
    EXPECT_FALSE(none.has_bias());
    EXPECT_EQ(none.bias(), nullptr);
    EXPECT_LT(none.bytes().size(), some.bytes().size());
  }
}

TEST(LinearWeightsTest, SourcesWithoutZeroPointsHaveEights) {
  TestRng rng;
  InlineExecutor executor;
  const WeightSources random = RealSources(
      rng, {WeightFormat::kI4Group, WeightLayout::kNK, true}, kN, kK);
  auto sources = random.CutAt({5, 22});
  auto eights = sources;
  const std::vector<uint8_t> eight(kN * kK, 8);
  sources[1].zeros = {};
  eights[1].zeros =
      DenseMatrix(eight.data(), kK / 32, eights[1].codes.extent(0));
  EXPECT_TRUE(AllBitsEqual(BytesOf(random.Pack(sources, executor)),
                           BytesOf(random.Pack(eights, executor))));
}

TEST(LinearWeightsTest, ScalesOfGroupsMayBeOfAnyFloatType) {
  TestRng rng;
  InlineExecutor executor;
  const WeightSources random = RealSources(
      rng, {WeightFormat::kI4Group, WeightLayout::kNK, true}, kN, kK);
  // Exact in each of the types.
  const auto f32 = SmallIntegers<float>(rng, kN * kK / 32, 1, 100);
  const auto bf16 = RoundedTo<BF>(ToDoubles(f32));
  const auto f16 = RoundedTo<Float16>(ToDoubles(f32));
  const auto pack = [&](const AnyTensorView& scales) {
    LinearSource source = random.All();
    source.scales = scales;
    return BytesOf(random.Pack({source}, executor));
  };
  const auto want = pack(DenseMatrix(f32.data(), kK / 32, kN));
  EXPECT_TRUE(AllBitsEqual(pack(DenseMatrix(bf16.data(), kK / 32, kN)), want));
  EXPECT_TRUE(AllBitsEqual(pack(DenseMatrix(f16.data(), kK / 32, kN)), want));
}

TEST(LinearWeightsTest, OneScaleOfInt8IsThatOfAllColumnsOfItsSource) {
  TestRng rng;
  InlineExecutor executor;
  const WeightSources random =
      RealSources(rng, {WeightFormat::kI8Channel, WeightLayout::kKN}, kN, kK);
  const float scales[] = {0.5f, 0.25f};
  std::vector<float> all(30, scales[0]);
  all.resize(kN, scales[1]);
  auto sources = random.CutAt({30});
  for (size_t i = 0; i < 2; ++i) sources[i].scales = DenseVector(scales + i, 1);
  LinearSource one = random.All();
  one.scales = DenseVector(all.data(), kN);
  EXPECT_TRUE(AllBitsEqual(BytesOf(random.Pack(sources, executor)),
                           BytesOf(random.Pack({one}, executor))));
}

TEST(LinearWeightsTest, GroupsInOrderAreNoActOrder) {
  TestRng rng;
  InlineExecutor executor;
  const WeightSources random =
      RealSources(rng, {WeightFormat::kI4Group, WeightLayout::kGptq}, kN, kK);
  std::vector<int32_t> g_idx;
  for (int32_t i = 0; i < kK; ++i) g_idx.push_back(i / 32);
  LinearSource source = random.All();
  source.g_idx = DenseVector(g_idx.data(), kK);
  EXPECT_TRUE(AllBitsEqual(BytesOf(random.Pack({source}, executor)),
                           BytesOf(random.Pack())));
}

// Memory that Pack is given holds what others left there. Sections of these
// columns do not end where the next ones begin.
TEST(LinearWeightsTest, BytesDependOnTheWeightsAlone) {
  TestRng rng;
  const auto threads = Workers(2);
  for (const WeightCase& c : kWeightCases) {
    const WeightSources random =
        RealSources(rng, c, c.words_of_columns() ? 88 : 83, 104);
    const auto sources = random.CutAt({5, 22});
    mallopt(M_PERTURB, 0x55);
    InlineExecutor executor;
    const auto want = BytesOf(random.Pack(sources, executor));
    mallopt(M_PERTURB, 0xAA);
    EXPECT_TRUE(AllBitsEqual(BytesOf(random.Pack(sources, *threads)), want))
        << c << " on threads";
    for (const int workers : {2, 5, 64}) {
      ManyWorkers many(workers);
      EXPECT_TRUE(AllBitsEqual(BytesOf(random.Pack(sources, many)), want))
          << c << " on " << workers << " workers";
    }
    mallopt(M_PERTURB, 0);
  }
}

TEST(LinearWeightsTest, SaysWhatItIs) {
  TestRng rng;
  const LinearWeights nothing;
  EXPECT_TRUE(nothing.bytes().empty());
  EXPECT_EQ(nothing.spec().n, 0);
  for (const WeightCase& c : kWeightCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    for (const bool gated : {false, true}) {
      const LinearWeights w = random.Pack(gated);
      const bool groups = c.format >= WeightFormat::kE4M3Block;
      EXPECT_EQ(w.spec().n, kN);
      EXPECT_EQ(w.spec().k, kK);
      EXPECT_EQ(w.spec().format, c.format);
      EXPECT_EQ(w.spec().group_size, groups ? 32 : 0);
      EXPECT_EQ(w.spec().gated, gated);
      EXPECT_TRUE(w.has_bias());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(w.bytes().data()) %
                    LinearWeights::kAlignment,
                0);
      EXPECT_NE(w.panels(), nullptr);
      const bool int8 = c.format == WeightFormat::kI8Channel;
      EXPECT_EQ(w.scales() != nullptr, groups || int8);
      EXPECT_EQ(w.column_sums() != nullptr, int8);
      EXPECT_EQ(w.zeros() != nullptr, c.zeros);
      EXPECT_EQ(w.order() != nullptr, c.act_order);
    }
  }
}

TEST(LinearWeightsTest, MaxPackedBytesIsForAllThatAFormatMayHave) {
  TestRng rng;
  for (const WeightCase& c : kWeightCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    for (const bool gated : {false, true}) {
      const auto size = static_cast<int64_t>(random.Pack(gated).bytes().size());
      const auto most = LinearWeights::MaxPackedBytes(random.Spec(gated));
      ASSERT_TRUE(most.ok()) << most.status();
      const bool has_all =
          c.format != WeightFormat::kI4Group || (c.zeros && c.act_order);
      if (has_all) {
        EXPECT_EQ(*most, size);
      } else {
        EXPECT_GT(*most, size);
      }
    }
  }
}

TEST(LinearWeightsTest, AGroupOfAllOfKHasTheSizeOfK) {
  TestRng rng;
  InlineExecutor executor;
  const WeightSources random =
      RealSources(rng, {WeightFormat::kI4Group, WeightLayout::kNK}, kN, kK, kK);
  for (const int64_t size : {LinearWeightsSpec::kWholeK, kK, kK + 1}) {
    LinearWeightsSpec spec = random.Spec();
    spec.group_size = size;
    const auto w = LinearWeights::Pack(spec, {random.All()}, executor);
    ASSERT_TRUE(w.ok()) << w.status();
    EXPECT_EQ(w->spec().group_size, kK);
    EXPECT_TRUE(AllBitsEqual(BytesOf(*w), BytesOf(random.Pack())));
  }
}

// The bytes live as long as the last copy, or plan, that reads them.
TEST(LinearWeightsTest, ACopySharesTheBytes) {
  TestRng rng;
  InlineExecutor executor;
  for (const WeightCase& c : kFormatCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, kN, kK);
    const auto a = UniformReals<BF>(rng, 3 * kK);
    LinearWeights first = random.Pack();
    const auto want = RunPacked(first, 3, a);
    LinearWeights copy = first;
    EXPECT_EQ(copy.bytes().data(), first.bytes().data());
    EXPECT_EQ(copy.bytes().size(), first.bytes().size());
    first = LinearWeights();
    const LinearWeights moved = std::move(copy);
    auto plan = PackedPlan(moved, SpecOf<BF, float>());
    EXPECT_TRUE(
        AllBitsEqual(RunLinear<BF, float>(plan, {3}, a, executor), want));
    const auto alone = PackedPlan(random.Pack(), SpecOf<BF, float>());
    EXPECT_TRUE(
        AllBitsEqual(RunLinear<BF, float>(alone, {3}, a, executor), want));
  }
}

}  // namespace
}  // namespace quern
