// LinearPlan on weights in the block formats of GGUF files, by rows of int8 in
// blocks.

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
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

// The values where all codes are 0: -t, and nothing that is a code.
std::vector<double> MinimaOf(const KnownWeights& w) {
  const BlockFormatInfo& info = InfoOf(w.spec.block_format);
  size_t begin = 0, end = static_cast<size_t>(info.bytes);
  switch (info.format) {
    case BlockFormat::kQ4_1:
    case BlockFormat::kQ5_1:
      begin = 4;
      break;
    case BlockFormat::kQ4_K:
    case BlockFormat::kQ5_K:
      begin = 16;
      break;
    case BlockFormat::kQ2_K:
      begin = 16;
      end = 80;
      break;
    default:
      return std::vector<double>(static_cast<size_t>(w.spec.n * w.spec.k));
  }
  auto zeroed = w.blocks;
  for (size_t i = 0; i < zeroed.size(); ++i) {
    const size_t byte = i % static_cast<size_t>(info.bytes);
    if (byte >= begin && byte < end) zeroed[i] = 0;
  }
  return w.ValuesOf(zeroed);
}

class LinearBlocksTest : public LinearTest {
 protected:
  template <typename A, typename C>
  void ExpectExact(BlockFormat format, const Shape& s, Executor& executor) {
    ExpectExactBlocks<A, C>(Int8Spec<A, C>(), format, s, executor);
  }

  // Expects c within a derived bound of the same arithmetic in double. Of each
  // sub-block, a product with a scale and one of a row are rounded, and with
  // minima twice; and each addition, which without a fused multiply-add has a
  // product before it.
  template <typename A, typename C>
  void ExpectWithinBound(BlockFormat format, const Shape& s,
                         Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const KnownWeights w = BlockWeights(rng, format, s.n, s.k, 1.0);
    const auto plan = Plan(Int8Spec<A, C>(), w);
    const auto a = UniformReals<A>(rng, s.m * s.k);
    const auto rows = QuantisedInBlocks(a);
    auto magnitudes = w.Values();
    const auto minima = MinimaOf(w);
    for (size_t i = 0; i < magnitudes.size(); ++i) {
      magnitudes[i] = std::abs(magnitudes[i]) + 2 * std::abs(minima[i]);
    }
    const double roundings = static_cast<double>(2 * s.k / 16 + 4);
    EXPECT_TRUE(IsWithin(RunLinear<A, C>(plan, s, a, executor),
                         ProductOf(w, s.m, rows),
                         SumBounds(w, s.m, rows, magnitudes,
                                   1.001 * std::ldexp(roundings, -24))))
        << plan.Explain(s.m);
  }
};
QUERN_INSTANTIATE_INT8_ISA_TEST(LinearBlocksTest);

// Every number of rows of a tile, of columns in a panel, of blocks in a record
// and of records in a chunk.
TEST_P(LinearBlocksTest, AreExactOnIntegers) {
  ManyWorkers many(3);
  for (const BlockFormatInfo& info : BlockFormats()) {
    const int64_t unit = info.values;
    const std::vector<int64_t> ks =
        unit == 32 ? std::vector<int64_t>{32, 64, 256, 288, 480}
                   : std::vector<int64_t>{256, 512};
    for (const int64_t k : ks) {
      for (const int64_t n : {1, 16, 40}) {
        const int64_t m = 1 + (k / 32 + n) % 13;
        ExpectExact<float, float>(info.format, {m, n, k, 3}, many);
      }
    }
    for (const int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 31}) {
      ExpectExact<BFloat16, float>(info.format, {m, 33, 256}, inline_);
    }
    ExpectExact<Float16, BFloat16>(info.format, {3, 17, 256}, inline_);
  }
}

// The largest codes, scales and numbers of a row, of either sign: integer sums
// of 16 bits neither saturate nor wrap. Only one block of a row is not zero, so
// that f32 sums are exact.
TEST_P(LinearBlocksTest, ReachTheExtremesExactly) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    for (const int byte : {0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0}) {
      SCOPED_TRACE(testing::Message() << info.name << " of bytes " << byte);
      KnownWeights w = IntegerBlockWeights(rng, info.format, 16, 256);
      const auto all = static_cast<uint8_t>(byte);
      std::fill(w.blocks.begin(), w.blocks.end(), all);
      SetScales(w);
      const auto plan = Plan(Int8Spec<float, float>(), w);
      for (const int64_t m : {3, 16}) {
        std::vector<float> a(static_cast<size_t>(m * 256));
        for (int64_t r = 0; r < m; ++r) {
          const int64_t first = r * 256 + 32 * rng.Integer(0, 7);
          for (int64_t i = first; i < first + 32; ++i) {
            const bool negative = r % 3 == 2 ? rng.Next() % 2 == 0 : r % 3 == 1;
            a[static_cast<size_t>(i)] = negative ? -127 : 127;
          }
        }
        LinearTest::ExpectExact<float, float>(plan, w, {m}, a, inline_);
      }
    }
  }
}

TEST_P(LinearBlocksTest, StayWithinTheBound) {
  ManyWorkers many(2);
  for (const BlockFormatInfo& info : BlockFormats()) {
    const int64_t k = info.values == 32 ? 1024 + 96 : 1024 + 256;
    for (const int64_t m : {1, 3, 21}) {
      ExpectWithinBound<BFloat16, float>(info.format, {m, 37, k}, many);
    }
    ExpectWithinBound<float, BFloat16>(info.format, {2, 16, 2304}, inline_);
    ExpectWithinBound<Float16, float>(info.format, {7, 16, 256}, inline_);
  }
}

TEST_P(LinearBlocksTest, RowsDoNotDependOnOthersNorOnThreads) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const int64_t k = info.values == 32 ? 1024 + 32 : 1280;
    const KnownWeights w = BlockWeights(rng, info.format, 50, k, 1.0);
    const auto plan = Plan(Int8Spec<BFloat16, float>(), w);
    ExpectRowsAlone<BFloat16>(plan, {37, 50, k}, rng);
  }
}

TEST_P(LinearBlocksTest, HaveTheBitsOfOtherInstructionSets) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const auto w = BlockWeights(rng, info.format, 40, 768, 1.0);
    ExpectBitsOfTheBest(w.Pack(inline_), rng);
  }
}

// More rows than are multiplied at once, and more chunks than one.
TEST_P(LinearBlocksTest, TakeManyRows) {
  ManyWorkers many(2);
  for (const auto format : {BlockFormat::kQ4_0, BlockFormat::kQ6_K,
                            BlockFormat::kQ8_0, BlockFormat::kIQ4_XS}) {
    ExpectExact<BFloat16, float>(format, {300, 150, 512}, many);
  }
}

TEST_P(LinearBlocksTest, AreGatedAndStacked) {
  TestRng rng;
  for (const auto format : {BlockFormat::kQ4_K, BlockFormat::kQ5_0,
                            BlockFormat::kQ8_0, BlockFormat::kIQ4_XS}) {
    const int64_t n = 2 * 24, k = 512;
    const KnownWeights w = BlockWeights(rng, format, n, k, 0.1);
    const auto act = LinearActivation::kSiluAndMul;
    const WeightSources sources(w);
    const auto plan = Plan(Int8Spec<float, float>(act),
                           sources.Pack(sources.CutAt({24}), inline_, true));
    const auto both = Plan(Int8Spec<float, float>(), w);
    for (const int64_t m : {2, 9}) {
      Shape s{m, n, k};
      const auto a = UniformReals<float>(rng, m * k);
      const auto v = RunLinear<float, float>(both, s, a, inline_);
      s.act = act;
      std::vector<double> want;
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n / 2; ++c) {
          const double gate = v[static_cast<size_t>(r * n + c)];
          const double up = v[static_cast<size_t>(r * n + n / 2 + c)];
          want.push_back(gate / (1 + std::exp(-gate)) * up);
        }
      }
      EXPECT_TRUE(AllWithin(
          RunLinear<float, float>(plan, s, a, inline_), want,
          [](double x, int64_t) { return 0x1p-19 * std::abs(x) + 0x1p-60; }));
    }
  }
}

TEST_P(LinearBlocksTest, GroupsHaveTheBitsOfLayers) {
  TestRng rng;
  for (const auto format :
       {BlockFormat::kQ6_K, BlockFormat::kQ8_0, BlockFormat::kIQ4_XS}) {
    ExpectGroupsHaveTheBitsOfLayers(Int8Spec<float, float>(), rng, [&] {
      return BlockWeights(rng, format, 40, 512, 1.0);
    });
  }
}

// Codes and scales of Q4_0, taken apart, are int4 in groups of 32. The order of
// k within a block changes no sum.
TEST_P(LinearBlocksTest, Q4_0HasTheBitsOfInt4) {
  TestRng rng;
  const int64_t n = 37, k = 1056;
  const KnownWeights w = BlockWeights(rng, BlockFormat::kQ4_0, n, k, 1.0);
  KnownWeights i4 = EmptyWeights({WeightFormat::kI4Group}, {0, n, k});
  i4.scales_as = DType::kF16;
  i4.scales.resize(static_cast<size_t>(k / 32 * n));
  for (int64_t i = 0; i < n * k; ++i) {
    const auto value = ReferenceValue(BlockFormat::kQ4_0,
                                      w.blocks.data() + i / 32 * 18, i % 32);
    i4.codes.push_back(static_cast<double>(value.code));
    i4.scales[static_cast<size_t>(i % k / 32 * n + i / k)] = value.step;
  }
  const auto blocks = Plan(Int8Spec<float, float>(), w);
  const auto int4 = Plan(Int8Spec<float, float>(), i4);
  for (const int64_t m : {1, 4, 20}) {
    const auto a = UniformReals<float>(rng, m * k);
    EXPECT_TRUE(
        AllBitsEqual(RunLinear<float, float>(int4, {m, n, k}, a, inline_),
                     RunLinear<float, float>(blocks, {m, n, k}, a, inline_)));
  }
}

TEST_P(LinearBlocksTest, QuantiseZerosTinyRowsAndWhatIsNotFinite) {
  TestRng rng;
  for (const auto format :
       {BlockFormat::kQ4_K, BlockFormat::kQ8_0, BlockFormat::kIQ4_XS})
    for (const int64_t m : {2, 6, 15}) {
      const KnownWeights w = IntegerBlockWeights(rng, format, 16, 512);
      const auto plan = Plan(Int8Spec<float, float>(), w);
      const Shape s{m, 16, 512};
      auto a = IntegerRows<float>(rng, m * s.k);
      std::fill(a.begin() + 32, a.begin() + 64, 0.0f);
      std::fill(a.begin() + 64, a.begin() + 96, 0x1p-149f);  // of no step
      a[100] = -0.0f;
      auto exact = a;
      std::fill(exact.begin() + 64, exact.begin() + 96, 0.0f);
      EXPECT_TRUE(
          AllEqual(RunLinear<float, float>(plan, s, a, inline_),
                   RoundedTo<float>(ProductOf(w, m, ToDoubles(exact)))));
      ExpectStaysInItsRow(plan, a, 300, NotFinite(),
                          [](float c, double) { return std::isnan(c); });
    }
}

// 2^-128 and 2^127, which f32 has, the first as a subnormal number.
TEST_P(LinearBlocksTest, TakeEveryPowerOfTwoOfMXFP4) {
  TestRng rng;
  for (const int e : {0, 1, 2, 3, 126, 254, 255}) {
    KnownWeights w = BlockWeights(rng, BlockFormat::kMXFP4, 16, 32, 1.0);
    w.bias.clear();
    for (size_t at = 0; at < w.blocks.size(); at += 17) {
      w.blocks[at] = static_cast<uint8_t>(e);
    }
    const auto plan = Plan(Int8Spec<float, float>(), w);
    for (const int64_t m : {1, 6}) {
      std::vector<float> a(static_cast<size_t>(m * 32));
      const float unit = std::ldexp(1.0f, e < 100 ? 60 : -60);
      for (float& x : a) x = unit * static_cast<float>(rng.Integer(-2, 2));
      for (size_t i = 0; i < a.size(); i += 32) a[i] = 127 * unit;
      LinearTest::ExpectExact<float, float>(plan, w, {m}, a, inline_);
    }
  }
}

TEST(LinearBlocksRefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const KnownWeights w = BlockWeights(rng, BlockFormat::kQ4_K, 16, 256, 1.0);
  LinearWeightsSpec spec;
  spec.n = 16;
  spec.k = 256;
  spec.format = WeightFormat::kBlocks;
  spec.block_format = BlockFormat::kQ4_K;
  LinearSource source;
  source.layout = WeightLayout::kBlocks;
  source.codes =
      AnyTensorView(DType::kU8, w.blocks.data(), 2, {16, 144}, {144, 1});
  const auto pack = [&](const LinearWeightsSpec& s, const LinearSource& from) {
    return LinearWeights::Pack(s, {from}, executor).status();
  };
  EXPECT_EQ(pack(spec, source), absl::OkStatus());
  auto bad = spec;
  bad.k = 288;
  ExpectRefusal(pack(bad, source),
                "k=288; blocks of Q4_K need a multiple of 256");
  bad = spec;
  bad.block_format = static_cast<BlockFormat>(4);
  ExpectRefusal(pack(bad, source), "block_format=4");
  bad = spec;
  bad.block_format = BlockFormat::kQ5_K;
  ExpectRefusal(pack(bad, source), "sources[0].codes");
  auto other = source;
  other.layout = WeightLayout::kAwq;
  ExpectRefusal(pack(spec, other), "blocks has no such");
  other = source;
  other.scales = source.codes;
  ExpectRefusal(pack(spec, other), "scales is given");

  const auto weights = LinearWeights::Pack(spec, {source}, executor);
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(LinearPlan::Create({}, *weights, executor).status(),
            absl::OkStatus());
  spec.format = WeightFormat::kI8Group;
  spec.group_size = 32;
  const std::vector<int8_t> codes(16 * 256);
  const std::vector<float> scales(8 * 16);
  source.layout = WeightLayout::kNK;
  source.codes = DenseMatrix(codes.data(), 16, 256);
  source.scales = DenseMatrix(scales.data(), 8, 16);
  const auto exact = LinearWeights::Pack(spec, {source}, executor);
  ASSERT_TRUE(exact.ok()) << exact.status();
  ExpectRefusal(
      LinearPlan::Create(Int8Spec<BFloat16, BFloat16>(), *exact, executor)
          .status(),
      absl::StatusCode::kUnimplemented,
      "activations=int8_blocks with weights of i8_group; need exact");
}

}  // namespace
}  // namespace quern
