// The references against values worked out by hand.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_fp8_quantize.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/reference_int8_quantize.h"
#include "quern/testing/reference_logits.h"
#include "quern/testing/reference_norm.h"
#include "quern/testing/reference_rope.h"
#include "quern/testing/reference_softmax.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTiny = 1e-12;

TEST(ReferenceGemmTest, MultipliesByHand) {
  const Doubles a = {1, 2, 3, 4, 5, 6};   // 2 x 3
  const Doubles b = {1, 0, 0, 1, 2, -1};  // 3 x 2
  EXPECT_TRUE(AllEqual(ReferenceGemm(2, 2, 3, a, b), Doubles{7, -1, 16, -1}));
  const Doubles w = {1, 0, 2, 0, 1, -1};  // b transposed, 2 x 3
  EXPECT_TRUE(AllEqual(ReferenceLinear(2, 2, 3, a, w), Doubles{7, -1, 16, -1}));
  EXPECT_TRUE(AllEqual(ReferenceLinear(2, 2, 3, a, w, {10, 20}),
                       Doubles{17, 19, 26, 19}));
}
TEST(ReferenceGemmTest, OfNothingIsTheBias) {
  EXPECT_TRUE(ReferenceLinear(0, 2, 1, {}, {1, 2}).empty());
  EXPECT_TRUE(
      AllEqual(ReferenceLinear(1, 2, 0, {}, {}, {3, 4}), Doubles{3, 4}));
}
TEST(ReferenceGemmTest, PassesNanToItsRowOnly) {
  const Doubles c = ReferenceGemm(2, 1, 2, {NAN, 1, 2, 3}, {1, 1});
  EXPECT_TRUE(AllEqual(c, Doubles{NAN, 5}));
}

TEST(ReferenceSoftmaxTest, KnowsThreeToOne) {
  const Doubles x = {std::log(3.0) + 700, 700, -kInfinity};
  EXPECT_TRUE(AllClose(ReferenceSoftmax(x), Doubles{0.75, 0.25, 0}, kTiny));
  EXPECT_NEAR(LogSumExp(x), 700 + std::log(4.0), kTiny);
}
TEST(ReferenceSoftmaxTest, OfNothingIsZeros) {
  EXPECT_EQ(LogSumExp({}), -kInfinity);
  EXPECT_EQ(LogSumExp({-kInfinity, -kInfinity}), -kInfinity);
  EXPECT_TRUE(AllEqual(ReferenceSoftmax({-kInfinity}), Doubles{0}));
}
TEST(ReferenceSoftmaxTest, PassesNanOn) {
  EXPECT_TRUE(std::isnan(LogSumExp({1, NAN, 2})));
  EXPECT_TRUE(std::isnan(ReferenceSoftmax({1, NAN, 2})[0]));
}

// Two query heads share one KV head; scores of the second query are
// (0, log 3) and (0, 2 log 3) for its two heads.
TEST(ReferenceAttentionTest, WeighsByHand) {
  ReferenceAttentionSpec spec;
  spec.q_len = 2;
  spec.kv_len = 2;
  spec.q_heads = 2;
  spec.v_head_dim = 2;
  spec.scale = 0.5;
  const Doubles q = {5, 7, 1, 2};
  const Doubles k = {0, 2 * std::log(3.0)};
  const Doubles v = {1, 10, 5, 50};
  const auto result = ReferenceAttention(spec, q, k, v);
  EXPECT_TRUE(
      AllClose(result.out, Doubles{1, 10, 1, 10, 4, 40, 4.6, 46}, kTiny));
  EXPECT_TRUE(
      AllClose(result.lse, Doubles{0, 0, std::log(4), std::log(10)}, kTiny));
}
TEST(ReferenceAttentionTest, MapsQueryHeadsToKvHeads) {
  ReferenceAttentionSpec spec;
  spec.q_len = spec.kv_len = 1;
  spec.q_heads = 4;
  spec.kv_heads = 2;
  EXPECT_TRUE(
      AllEqual(ReferenceAttention(spec, {1, 1, 1, 1}, {1, 1}, {6, 7}).out,
               Doubles{6, 6, 7, 7}));
}
TEST(ReferenceAttentionTest, SeesOnlyTheWindow) {
  ReferenceAttentionSpec spec;
  spec.q_len = 3;
  spec.kv_len = 4;
  const Doubles q(3, 0.0), k(4, 0.0), v = {1, 2, 4, 8};
  EXPECT_TRUE(AllClose(ReferenceAttention(spec, q, k, v).out,
                       Doubles{1.5, 7.0 / 3, 3.75}, kTiny));
  spec.window = 2;
  EXPECT_TRUE(AllClose(ReferenceAttention(spec, q, k, v).out,
                       Doubles{1.5, 3, 6}, kTiny));
  spec.window = 0;
  spec.causal = false;
  EXPECT_TRUE(AllClose(ReferenceAttention(spec, q, k, v).out,
                       Doubles{3.75, 3.75, 3.75}, kTiny));
}
TEST(ReferenceAttentionTest, OfNothingIsZeros) {
  ReferenceAttentionSpec spec;
  spec.q_len = 1;
  const auto result = ReferenceAttention(spec, {1}, {}, {});
  EXPECT_TRUE(AllEqual(result.out, Doubles{0}));
  EXPECT_TRUE(AllEqual(result.lse, Doubles{-kInfinity}));
}
TEST(ReferenceAttentionTest, CapsScores) {
  ReferenceAttentionSpec spec;
  spec.q_len = spec.kv_len = 1;
  spec.soft_cap = 2;
  const auto result = ReferenceAttention(spec, {1e6}, {1}, {1});
  EXPECT_TRUE(AllClose(result.lse, Doubles{2}, kTiny));
}

TEST(ReferenceInt8QuantizeTest, QuantizesByHand) {
  const auto symmetric = ReferenceInt8Symmetric({-254, 3, 5});
  EXPECT_EQ(symmetric.scale, 2);
  EXPECT_EQ(symmetric.zero_point, 0);
  // 1.5 and 2.5 are ties.
  EXPECT_EQ(ReferenceInt8Code(-254, 2, 0), -127);
  EXPECT_EQ(ReferenceInt8Code(3, 2, 0), 2);
  EXPECT_EQ(ReferenceInt8Code(5, 2, 0), 2);
  EXPECT_EQ(Int8StepsOff(5, 2, 0, 2), 0.5);
  // [0, 510]: 255 steps of 2 from -128 up.
  const auto positive = ReferenceInt8Asymmetric({510, 7});
  EXPECT_EQ(positive.scale, 2);
  EXPECT_EQ(positive.zero_point, -128);
  EXPECT_EQ(ReferenceInt8Code(510, 2, -128), 127);
  const auto both = ReferenceInt8Asymmetric({-100, 155});
  EXPECT_EQ(both.scale, 1);
  EXPECT_EQ(both.zero_point, -28);
  EXPECT_EQ(ReferenceInt8Code(-1000, 1, -28), -128);
  EXPECT_EQ(Int8StepsOff(-1000, 1, -28, -128), 0);
  EXPECT_EQ(ReferenceInt8Code(NAN, 1, -28), -28);
  EXPECT_EQ(ReferenceInt8Asymmetric({0, 0}).scale, 1);
}

TEST(ReferenceRmsNormTest, DividesByTheRootMeanSquare) {
  // The mean of squares is 12.5; with epsilon 12.5 the root is 5.
  EXPECT_TRUE(AllClose(ReferenceRmsNorm(1, 2, {3, 4}, {2, 10}, 12.5),
                       Doubles{1.2, 8}, kTiny));
  const double r = std::sqrt(12.5);
  EXPECT_TRUE(AllClose(ReferenceRmsNorm(2, 2, {3, 4, -4, 3}, {}, 0),
                       Doubles{3 / r, 4 / r, -4 / r, 3 / r}, kTiny));
}

TEST(ReferenceRmsNormTest, GatesBeforeTheRoot) {
  // Gates of log 3 give 3/4 of log 3, so h is (3, 4) in that unit, as above.
  const double g = std::log(3.0), unit = g * 0.75;
  EXPECT_TRUE(AllClose(
      ReferenceGatedRmsNorm(1, 2, {3 / unit, 4 / unit}, {g, g}, {2, 10}, 12.5),
      Doubles{1.2, 8}, kTiny));
}

TEST(ReferenceFp8QuantizeTest, ScalesAndClampsByHand) {
  EXPECT_EQ(ReferenceFp8Scale({3, -896, 5}), 2);
  EXPECT_EQ(ReferenceFp8Scale({0, 0}), 1 / (448.0 * 512));
  EXPECT_EQ(ReferenceFp8Scale({}), 1 / (448.0 * 512));
  EXPECT_EQ(ReferenceFp8Value(-5, 2), -2.5);
  EXPECT_EQ(ReferenceFp8Value(1000, 2), 448);
  EXPECT_EQ(ReferenceFp8Value(-kInfinity, 2), -448);
  EXPECT_TRUE(std::isnan(ReferenceFp8Value(NAN, 2)));
}

TEST(ReferenceLogitsTest, CapsByHand) {
  // tanh(log 2) = (2 - 1/2) / (2 + 1/2)
  EXPECT_NEAR(ReferenceSoftCap(30 * std::log(2.0), 30), 18, kTiny);
  EXPECT_NEAR(ReferenceSoftCap(-1e4, 30), -30, kTiny);
  EXPECT_EQ(ReferenceSoftCap(0, 30), 0);
  // 40 / 30 is 1.3359375 in bf16, tanh of that 0.87109375, and 30 times it
  // 26.1328125, which lies between 26.125 and 26.25.
  EXPECT_EQ(ReferenceSteppedSoftCap<BFloat16>(40, 30), 26.125);
  EXPECT_NEAR(ReferenceSoftCap(40, 30), 26.11, 0.01);
}

TEST(ReferenceRopeTest, TurnsByWhatIsGiven) {
  // 2 tokens of 2 heads of one pair; cosine and sine of token 1 are 2 and 3.
  EXPECT_TRUE(AllEqual(
      ReferenceTurned(
          {1, 2, 3, 4, 1, 0, 0, 1}, 2, 2, 2, 2, ReferenceRopeStyle::kNeox,
          [](int64_t t, int64_t) { return t == 0 ? 1.0 : 2.0; },
          [](int64_t t, int64_t) { return t == 0 ? 0.0 : 3.0; }),
      Doubles{1, 2, 3, 4, 2, 3, -3, 2}));
}
TEST(ReferenceRopeTest, TurnsPairsByHand) {
  // base 1: every pair turns by the position itself.
  const double c = std::cos(1.0), s = std::sin(1.0);
  const Doubles x = {1, 0, 0, 1, 9};
  EXPECT_TRUE(
      AllClose(ReferenceRope(x, {1}, 1, 5, 4, 1.0, ReferenceRopeStyle::kNeox),
               Doubles{c, -s, s, c, 9}, kTiny));
  EXPECT_TRUE(AllClose(
      ReferenceRope(x, {1}, 1, 5, 4, 1.0, ReferenceRopeStyle::kInterleaved),
      Doubles{c, s, -s, c, 9}, kTiny));
}
TEST(ReferenceRopeTest, SlowsDownPairByPair) {
  // rotary_dim 4, base 10000: pair 0 turns by p, pair 1 by p / 100.
  const Doubles y = ReferenceRope({1, 1, 0, 0, 1, 1, 0, 0}, {0, 50}, 1, 4, 4,
                                  10000.0, ReferenceRopeStyle::kNeox);
  EXPECT_TRUE(AllClose(y,
                       Doubles{1, 1, 0, 0, std::cos(50), std::cos(0.5),
                               std::sin(50), std::sin(0.5)},
                       kTiny));
}

TEST(ReferenceActivationTest, GatesByHand) {
  const double x = std::log(3.0);  // sigmoid(x) = 3/4
  EXPECT_TRUE(AllClose(ReferenceSiluAndMul(2, 1, {x, 4, -x, 4}),
                       Doubles{3 * x, -x}, kTiny));
  EXPECT_EQ(ReferenceSilu(0), 0);
  EXPECT_NEAR(ReferenceSilu(-800), 0, kTiny);
  EXPECT_NEAR(ReferenceGelu(1), 0.8413447460685429, kTiny);
  EXPECT_NEAR(ReferenceGelu(-1), -0.15865525393145707, kTiny);
  EXPECT_NEAR(ReferenceGeluTanh(1), 0.8411919906082768, kTiny);
}

}  // namespace
}  // namespace quern
