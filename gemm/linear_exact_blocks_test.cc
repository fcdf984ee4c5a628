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
#include "quern/gemm/testing/known_weights.h"
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

namespace quern {
namespace {

// Weights in blocks as weights of f32, which quant/block_format.h decodes.
KnownWeights Decoded(const KnownWeights& w) {
  std::vector<float> values(static_cast<size_t>(w.spec.n * w.spec.k));
  DecodeBlocks(w.spec.block_format, w.blocks, absl::MakeSpan(values));
  KnownWeights f32 =
      EmptyWeights({WeightFormat::kF32}, {0, w.spec.n, w.spec.k});
  f32.codes = ToDoubles(values);
  f32.bias = w.bias;
  return f32;
}

class LinearExactBlocksTest : public LinearTest {
 protected:
  LinearPlan DecodedPlan(const KnownWeights& w, const LinearSpec& spec) {
    return Plan(spec, Decoded(w));
  }

  template <typename A, typename C>
  void ExpectBitsOfDecoded(BlockFormat format, const Shape& s,
                           Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const KnownWeights w = BlockWeights(rng, format, s.n, s.k, 1.0);
    LinearSpec spec = SpecOf<A, C>(s.act);
    spec.residual = s.residual != Residual::kNone;
    const auto plan = Plan(spec, w);
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
    ExpectExactBlocks<A, C>(SpecOf<A, C>(), format, s, executor);
  }

  // The bound of gemm/linear.h.
  template <typename A>
  void ExpectWithinBound(BlockFormat format, const Shape& s,
                         Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const KnownWeights w = BlockWeights(rng, format, s.n, s.k, 1.0);
    const auto plan = Plan(SpecOf<A, float>(), w);
    const auto a = UniformReals<A>(rng, s.m * s.k);
    const auto bounds = BoundsOf(w, s.m, ToDoubles(a));
    EXPECT_TRUE(AllWithin(RunLinear<A, float>(plan, s, a, executor),
                          ProductOf(w, s.m, ToDoubles(a)),
                          [&](double, int64_t flat) {
                            return bounds[static_cast<size_t>(flat)];
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
    const KnownWeights w = IntegerBlockWeights(rng, info.format, 16, 256);
    const auto plan = Plan(SpecOf<float, float>(), w);
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
    const KnownWeights w = BlockWeights(rng, info.format, 50, k, 1.0);
    const auto plan = Plan(SpecOf<BFloat16, float>(), w);
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
    return BlockWeights(rng, BlockFormat::kQ5_K, 40, 512, 1.0);
  });
}

TEST_P(LinearExactBlocksTest, WhatIsNotFiniteStaysInItsRow) {
  TestRng rng;
  for (const auto format : {BlockFormat::kQ4_K, BlockFormat::kQ8_0}) {
    const KnownWeights w = BlockWeights(rng, format, 16, 512, 1.0);
    const auto plan = Plan(SpecOf<float, float>(), w);
    for (const int64_t m : {2, 6, 17}) {
      const Shape s{m, 16, 512};
      const auto a = UniformReals<float>(rng, m * s.k);
      ExpectStaysInItsRow(plan, a, 300, NotFinite(), [](float c, double bad) {
        return !std::isfinite(c) && (std::isnan(c) || !std::isnan(bad));
      });
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
    KnownWeights w = BlockWeights(rng, info.format, 17, 256, 1.0);
    std::fill(w.blocks.begin(), w.blocks.end(), uint8_t{0x11});
    SetScales(w);
    const auto column = static_cast<size_t>(w.row_bytes());
    const size_t half = HalvesOf(info.format)[0].byte;
    for (const uint32_t bits : {kInfinity, kNaN}) {
      SCOPED_TRACE(testing::Message() << info.name << " " << bits);
      w.blocks[3 * column + half] = static_cast<uint8_t>(bits);
      w.blocks[3 * column + half + 1] = static_cast<uint8_t>(bits >> 8);
      const auto plan = Plan(SpecOf<float, float>(), w);
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
    KnownWeights w = BlockWeights(rng, BlockFormat::kMXFP4, 16, 32, 1.0);
    w.bias.clear();
    for (size_t at = 0; at < w.blocks.size(); at += 17) {
      w.blocks[at] = static_cast<uint8_t>(e);
    }
    const auto plan = Plan(SpecOf<float, float>(), w);
    for (const int64_t m : {1, 6, 16}) {
      std::vector<float> a(static_cast<size_t>(m * 32));
      const float unit = std::ldexp(1.0f, e < 100 ? 60 : -60);
      for (float& x : a) x = unit * static_cast<float>(rng.Integer(-2, 2));
      LinearTest::ExpectExact<float, float>(plan, w, {m}, a, inline_);
    }
  }
}

}  // namespace
}  // namespace quern
