// LinearPlan on weights in the block formats of GGUF files, by rows that are
// not rounded: the bits of a layer on the decoded weights.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights_testutil.h"
#include "quern/gemm/testing/linear_blocks_testutil.h"
#include "quern/gemm/testing/linear_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {
namespace {

// The same weights as f32, of quant/block_format.h.
LinearWeights Decoded(const BlockWeights& w, bool gated) {
  std::vector<float> values(static_cast<size_t>(w.n * w.k));
  DecodeBlocks(w.format, w.blocks, absl::MakeSpan(values));
  LinearWeightsSpec spec;
  spec.n = w.n;
  spec.k = w.k;
  spec.format = WeightFormat::kF32;
  spec.gated = gated;
  LinearSource source;
  source.codes = DenseMatrix(values.data(), w.n, w.k);
  if (!w.bias.empty()) source.bias = DenseVector(w.bias.data(), w.n);
  InlineExecutor executor;
  auto weights = LinearWeights::Pack(spec, {source}, executor);
  EXPECT_EQ(weights.status(), absl::OkStatus());
  return weights.ok() ? *weights : LinearWeights();
}

class LinearExactBlocksTest : public BlockPlansTest {
 protected:
  LinearPlan DecodedPlan(const BlockWeights& w, LinearSpec spec) {
    spec.kernels = "packed";
    auto plan =
        LinearPlan::Create(spec, Decoded(w, IsGated(spec.activation)), inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    return *std::move(plan);
  }

  template <typename A, typename C>
  void ExpectBitsOfDecoded(BlockFormat format, const Shape& s,
                           Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const BlockWeights w = RandomBlockWeights(rng, format, s.n, s.k, 1.0);
    LinearSpec spec = SpecOf<A, C>(s.act);
    spec.residual = s.residual != Residual::kNone;
    const auto plan = Plan(w, spec);
    const auto a = UniformReals<A>(rng, s.m * s.k);
    const auto residual =
        UniformReals<C>(rng, spec.residual ? s.m * s.cols() : 0);
    EXPECT_TRUE(AllBitsEqual(
        RunLinear<A, C>(plan, s, a, executor, {}, residual),
        RunLinear<A, C>(DecodedPlan(w, spec), s, a, inline_, {}, residual)))
        << plan.Explain(s.m);
  }

  template <typename A, typename C>
  void ExpectExact(BlockFormat format, const Shape& s, Executor& executor) {
    BlockPlansTest::ExpectExact<A, C>(SpecOf<A, C>(), format, s, executor);
  }

  // The bound of gemm/linear.h, and one addition more for the bias.
  template <typename A>
  void ExpectWithinBound(BlockFormat format, const Shape& s,
                         Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const BlockWeights w = RandomBlockWeights(rng, format, s.n, s.k, 1.0);
    const auto plan = Plan(w, SpecOf<A, float>());
    const auto a = UniformReals<A>(rng, s.m * s.k);
    const auto bias = w.bias.empty()
                          ? std::vector<double>(static_cast<size_t>(s.n))
                          : ToDoubles(w.bias);
    const auto want =
        ReferenceLinear(s.m, s.n, s.k, ToDoubles(a), w.Values(), bias);
    const auto magnitude =
        ReferenceLinear(s.m, s.n, s.k, Magnitudes(ToDoubles(a)),
                        Magnitudes(w.Values()), Magnitudes(bias));
    const auto roundings = 1.001 * static_cast<double>(s.k + s.k / 256 + 3 + 1);
    EXPECT_TRUE(AllWithin(RunLinear<A, float>(plan, s, a, executor), want,
                          [&](double, int64_t flat) {
                            return std::ldexp(roundings, -24) *
                                   magnitude[static_cast<size_t>(flat)];
                          }))
        << plan.Explain(s.m);
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearExactBlocksTest);

// Every number of rows and of panels of a tile, of columns in a panel, of
// blocks in a record and of records, in rows that lie apart.
TEST_P(LinearExactBlocksTest, HasTheBitsOfDecodedWeights) {
  ManyWorkers many(3);
  for (const BlockFormatInfo& info : BlockFormats()) {
    const std::vector<int64_t> ks =
        info.values == 32 ? std::vector<int64_t>{32, 64, 256, 288, 480, 736}
                          : std::vector<int64_t>{256, 512, 768};
    for (const int64_t k : ks) {
      for (const int64_t n : {1, 15, 16, 17, 33, 144}) {
        const int64_t m = 1 + (k / 32 + n) % 13;
        ExpectBitsOfDecoded<float, float>(info.format, {m, n, k, 3}, many);
      }
    }
    for (int64_t m = 1; m <= 17; ++m) {
      ExpectBitsOfDecoded<BFloat16, float>(info.format, {m, 33, 512, 1},
                                           inline_);
    }
    for (const int64_t m : {25, 31}) {
      ExpectBitsOfDecoded<Float16, BFloat16>(info.format, {m, 40, 256}, many);
    }
    // Seven panels are tiles of four, two and one where codes become f32 in
    // registers. The last record has one block of eight.
    for (const int64_t m : {1, 2}) {
      ExpectBitsOfDecoded<float, float>(
          info.format, {m, 112, info.values == 32 ? 288 : 512}, inline_);
    }
  }
}

TEST_P(LinearExactBlocksTest, AreExactOnIntegers) {
  ManyWorkers many(2);
  for (const BlockFormatInfo& info : BlockFormats()) {
    for (const int64_t m : {1, 2, 3, 4, 9, 13}) {
      ExpectExact<float, float>(info.format, {m, 37, 512, 2}, many);
    }
    ExpectExact<Float16, BFloat16>(info.format, {3, 17, 256}, inline_);
  }
}

TEST_P(LinearExactBlocksTest, StayWithinTheBound) {
  ManyWorkers many(2);
  for (const BlockFormatInfo& info : BlockFormats()) {
    const int64_t k = info.values == 32 ? 1024 + 96 : 1024 + 256;
    for (const int64_t m : {1, 5, 21}) {
      ExpectWithinBound<BFloat16>(info.format, {m, 37, k}, many);
    }
    ExpectWithinBound<float>(info.format, {2, 16, 512}, inline_);
  }
}

// Rows that bf16 and int8 would round: every bit of them counts.
TEST_P(LinearExactBlocksTest, DoesNotRoundRows) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const BlockWeights w = IntegerBlockWeights(rng, info.format, 16, 256);
    const auto plan = Plan(w, SpecOf<float, float>());
    const auto values = w.Values();
    for (const int64_t m : {2, 12}) {
      std::vector<float> a(static_cast<size_t>(m * 256));
      std::vector<float> want;
      for (int64_t r = 0; r < m; ++r) {
        const int64_t at = rng.Integer(0, 255);
        // 24 bits, one of them in the last place.
        const float x = 1.0f + 0x1p-23f * static_cast<float>(r + 1);
        a[static_cast<size_t>(r * 256 + at)] = x;
        for (int64_t c = 0; c < 16; ++c) {
          const double product =
              double{x} * values[static_cast<size_t>(c * 256 + at)];
          want.push_back(
              static_cast<float>(product) +
              (w.bias.empty() ? 0.0f : w.bias[static_cast<size_t>(c)]));
        }
      }
      EXPECT_TRUE(AllEqual(
          RunLinear<float, float>(plan, {m, 16, 256}, a, inline_), want));
    }
  }
}

TEST_P(LinearExactBlocksTest, RowsDoNotDependOnOthersNorOnThreads) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const int64_t k = info.values == 32 ? 1024 + 32 : 1280;
    const BlockWeights w = RandomBlockWeights(rng, info.format, 50, k, 1.0);
    const auto plan = Plan(w, SpecOf<BFloat16, float>());
    ExpectRowsAlone<BFloat16>(plan, {37, 50, k}, rng);
  }
}

// More rows than are multiplied at once.
TEST_P(LinearExactBlocksTest, TakeManyRows) {
  ManyWorkers many(2);
  for (const auto format : {BlockFormat::kQ4_0, BlockFormat::kQ6_K}) {
    ExpectBitsOfDecoded<BFloat16, float>(format, {300, 150, 512}, many);
  }
}

TEST_P(LinearExactBlocksTest, AreGatedAndAddAResidual) {
  for (const auto format : {BlockFormat::kQ4_K, BlockFormat::kQ5_0}) {
    for (const int64_t m : {1, 2, 9, 20}) {
      Shape s{m, 2 * 24, 512};
      s.act = LinearActivation::kSiluAndMul;
      s.residual = Residual::kApart;
      ExpectBitsOfDecoded<float, float>(format, s, inline_);
      s.act = LinearActivation::kGelu;
      s.residual = Residual::kInPlace;
      ExpectBitsOfDecoded<BFloat16, BFloat16>(format, s, inline_);
    }
  }
}

TEST_P(LinearExactBlocksTest, GroupsHaveTheBitsOfLayers) {
  TestRng rng;
  ExpectGroupsHaveTheBitsOfLayers(SpecOf<float, float>(), rng, [&] {
    return RandomBlockWeights(rng, BlockFormat::kQ5_K, 40, 512, 1.0)
        .Pack(false);
  });
}

TEST_P(LinearExactBlocksTest, WhatIsNotFiniteStaysInItsRow) {
  TestRng rng;
  for (const auto format : {BlockFormat::kQ4_K, BlockFormat::kQ8_0}) {
    const BlockWeights w = RandomBlockWeights(rng, format, 16, 512, 1.0);
    const auto plan = Plan(w, SpecOf<float, float>());
    for (const int64_t m : {2, 6, 17}) {
      const Shape s{m, 16, 512};
      const auto a = UniformReals<float>(rng, m * s.k);
      const auto want = RunLinear<float, float>(plan, s, a, inline_);
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
        auto spoilt = a;
        spoilt[static_cast<size_t>(s.k + 300)] = bad;
        const auto c = RunLinear<float, float>(plan, s, spoilt, inline_);
        for (int64_t i = 0; i < m * s.n; ++i) {
          const auto at = static_cast<size_t>(i);
          if (i / s.n == 1) {
            EXPECT_FALSE(std::isfinite(c[at]));
            EXPECT_TRUE(std::isnan(c[at]) || !std::isnan(bad));
          } else {
            EXPECT_EQ(c[at], want[at]) << i;
          }
        }
      }
    }
  }
}

// A scale that is infinite or NaN is in its column alone, as IEEE 754 has it:
// nothing is subtracted from an infinity.
TEST_P(LinearExactBlocksTest, ScalesThatAreNotFiniteFollowIeee) {
  constexpr uint32_t kInfinity = 0x7C00, kNaN = 0x7E00;
  for (const BlockFormatInfo& info : BlockFormats()) {
    if (info.format == BlockFormat::kMXFP4) continue;  // every scale is finite
    TestRng rng;
    BlockWeights w = RandomBlockWeights(rng, info.format, 17, 256, 1.0);
    std::fill(w.blocks.begin(), w.blocks.end(), uint8_t{0x11});
    SetScales(w);
    const auto column = static_cast<size_t>(w.row_bytes());
    const size_t half = HalvesOf(info.format)[0].byte;
    for (const uint32_t bits : {kInfinity, kNaN}) {
      SCOPED_TRACE(testing::Message() << info.name << " " << bits);
      w.blocks[3 * column + half] = static_cast<uint8_t>(bits);
      w.blocks[3 * column + half + 1] = static_cast<uint8_t>(bits >> 8);
      const auto plan = Plan(w, SpecOf<float, float>());
      const auto decoded = DecodedPlan(w, SpecOf<float, float>());
      for (const int64_t m : {1, 16}) {
        const Shape s{m, 17, 256};
        const std::vector<float> a(static_cast<size_t>(m * 256), 0.5f);
        const auto c = RunLinear<float, float>(plan, s, a, inline_);
        const auto want = RunLinear<float, float>(decoded, s, a, inline_);
        for (size_t i = 0; i < c.size(); ++i) {
          if (std::isnan(want[i])) {
            EXPECT_TRUE(i % 17 == 3 && std::isnan(c[i])) << i;
          } else {
            EXPECT_EQ(c[i], want[i]) << i;
          }
          if (info.format == BlockFormat::kQ4_0 && bits == kInfinity) {
            EXPECT_EQ(std::isinf(c[i]), i % 17 == 3) << i;
          }
        }
      }
    }
  }
}

// From subnormal numbers on to the largest that are not infinite.
TEST_P(LinearExactBlocksTest, TakeEveryPowerOfTwoOfMXFP4) {
  TestRng rng;
  for (const int e : {0, 1, 2, 3, 126, 252}) {
    BlockWeights w = RandomBlockWeights(rng, BlockFormat::kMXFP4, 16, 32, 1.0);
    w.bias.clear();
    for (size_t at = 0; at < w.blocks.size(); at += 17) {
      w.blocks[at] = static_cast<uint8_t>(e);
    }
    const auto plan = Plan(w, SpecOf<float, float>());
    for (const int64_t m : {1, 6, 16}) {
      std::vector<float> a(static_cast<size_t>(m * 32));
      const float unit = std::ldexp(1.0f, e < 100 ? 60 : -60);
      for (float& x : a) x = unit * static_cast<float>(rng.Integer(-2, 2));
      const auto want = RoundedTo<float>(
          ReferenceLinear(m, 16, 32, ToDoubles(a), w.Values()));
      EXPECT_TRUE(AllEqual(
          RunLinear<float, float>(plan, {m, 16, 32}, a, inline_), want))
          << e;
    }
  }
}

}  // namespace
}  // namespace quern
