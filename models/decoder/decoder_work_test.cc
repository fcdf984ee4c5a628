// The bytes and operations of steps, counted by hand for shapes that fill their
// panels, so that nothing is padded.

#include "quern/models/decoder/decoder_work.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

constexpr int64_t kHidden = 64, kVocab = 64, kFfn = 128, kHeadDim = 32;
// Header of a packed matrix (gemm/weights/packed_form.h).
constexpr int64_t kHeader = 256;
// Elements of a layer's matrices: q, k and v of 2 + 1 + 1 heads, and the one
// behind attention; gate and up, and down.
constexpr int64_t kAttention = 4 * kHeadDim * kHidden + kHidden * 2 * kHeadDim;
constexpr int64_t kFeedForward = 2 * kFfn * kHidden + kHidden * kFfn;
constexpr int64_t kOutput = kVocab * kHidden;
// Operations of a query and a key that it sees: two products of two heads.
constexpr int64_t kPair = 2 * 2 * (kHeadDim + kHeadDim);

// Pairs of a prompt's queries and keys in one layer.
constexpr int64_t PromptPairs(int64_t tokens) {
  return tokens * (tokens + 1) / 2;
}

SmallDecoder Shape(const std::string& architecture) {
  SmallDecoder shape;
  shape.architecture = architecture;
  shape.vocab = kVocab;
  shape.hidden = kHidden;
  shape.ffn = kFfn;
  shape.q_heads = 2;
  shape.kv_heads = 1;
  shape.head_dim = kHeadDim;
  return shape;
}

class DecoderWorkTest : public DecoderFixture {
 protected:
  Decoder LoadShape(const SmallDecoder& shape,
                    DecoderWeights weights = DecoderWeights::kF32) {
    TestRng rng;
    return Load(SmallDecoderFile(rng, shape), weights);
  }

  // The work of a step of `count` more tokens.
  DecoderWork Step(DecoderState& state, int32_t sequence, int64_t count,
                   LogitsOf logits_of = LogitsOf::kLastTokens) {
    TestRng rng;
    const std::vector<int32_t> tokens = RandomTokens(rng, count, kVocab);
    EXPECT_TRUE(state.Forward({{sequence, tokens}}, logits_of, inline_).ok());
    return state.last_work();
  }
};

TEST_P(DecoderWorkTest, CountsMatricesOnceAndTheirProductsForEachRow) {
  constexpr int64_t kLayers = 2 * (kAttention + kFeedForward);
  // Columns of all matrices; int8 has a scale and a sum for each.
  constexpr int64_t kColumns =
      2 * (4 * kHeadDim + kHidden + 2 * kFfn + kHidden) + kVocab;
  const Decoder f32 = LoadShape(Shape("llama"), DecoderWeights::kF32);
  const Decoder bf16 = LoadShape(Shape("llama"), DecoderWeights::kBF16);
  const Decoder int8 = LoadShape(Shape("llama"), DecoderWeights::kInt8);
  for (const int64_t tokens : {1, 5}) {
    for (const LogitsOf logits :
         {LogitsOf::kLastTokens, LogitsOf::kAllTokens}) {
      const int64_t rows = logits == LogitsOf::kAllTokens ? tokens : 1;
      const int64_t ops = 2 * (kLayers * tokens + kOutput * rows);
      const int64_t attention = 2 * PromptPairs(tokens) * kPair;
      const auto work = [&](const Decoder& model) {
        DecoderState state = State(model);
        return Step(state, *state.NewSequence(), tokens, logits);
      };
      DecoderWork w = work(f32);
      EXPECT_EQ(w.weight_bytes,
                9 * kHeader + 4 * (kLayers + kOutput) + 4 * kHidden * tokens);
      EXPECT_EQ(w.f32_ops, ops + attention);
      EXPECT_EQ(w.bf16_ops + w.int8_ops, 0);
      w = work(bf16);
      EXPECT_EQ(w.weight_bytes,
                9 * kHeader + 2 * (kLayers + kOutput) + 2 * kHidden * tokens);
      EXPECT_EQ(w.bf16_ops, ops);
      EXPECT_EQ(w.f32_ops, attention);
      EXPECT_EQ(w.int8_ops, 0);
      w = work(int8);
      EXPECT_EQ(w.weight_bytes, 9 * kHeader + kLayers + kOutput + 8 * kColumns +
                                    2 * kHidden * tokens);
      EXPECT_EQ(w.int8_ops, ops);
      EXPECT_EQ(w.f32_ops, attention);
      EXPECT_EQ(w.bf16_ops, 0);
    }
  }
}

// Blocks have the operations of the rows that they multiply.
TEST_P(DecoderWorkTest, CountsBlocksByTheirRows) {
  for (const auto& [type, activations, is_int8] :
       {std::tuple(GgufTensorType::kQ8_0, DecoderActivations::kInt8, true),
        {GgufTensorType::kQ5_0, DecoderActivations::kInt8, true},
        {GgufTensorType::kQ5_0, DecoderActivations::kExact, false}}) {
    SmallDecoder shape = Shape("llama");
    shape.type = type;
    TestRng rng;
    const Decoder model = Load(SmallDecoderFile(rng, shape),
                               DecoderWeights::kAsInFile, activations);
    DecoderState state = State(model);
    const DecoderWork w = Step(state, *state.NewSequence(), 3);
    const int64_t ops = 2 * (2 * (kAttention + kFeedForward) * 3 + kOutput);
    EXPECT_EQ(w.int8_ops, is_int8 ? ops : 0);
    EXPECT_EQ(w.f32_ops, (is_int8 ? 0 : ops) + 2 * PromptPairs(3) * kPair);
    EXPECT_EQ(w.bf16_ops, 0);
  }
}

TEST_P(DecoderWorkTest, KeepsTheWorkOfTheLastStepThatSucceeded) {
  const Decoder model = LoadShape(Shape("llama"));
  DecoderState state = State(model);
  EXPECT_EQ(state.last_work().bytes() + state.last_work().ops(), 0);
  const int32_t sequence = *state.NewSequence();
  const DecoderWork w = Step(state, sequence, 5);
  const std::vector<int32_t> unknown = {static_cast<int32_t>(kVocab)};
  EXPECT_FALSE(
      state.Forward({{sequence, unknown}}, LogitsOf::kLastTokens, inline_)
          .ok());
  EXPECT_EQ(state.last_work().bytes(), w.bytes());
  EXPECT_EQ(state.last_work().ops(), w.ops());
}

// A token has 2 of 32 experts, so 16 tokens may have all of them.
TEST_P(DecoderWorkTest, CountsTheExpertsThatTokensMayHave) {
  SmallDecoder shape = Shape("llama");
  shape.mixture = true;
  shape.experts = 32;
  shape.experts_used = 2;
  shape.expert_ffn = 64;
  constexpr int64_t kRouter = 32 * kHidden;
  constexpr int64_t kExpert = 2 * 64 * kHidden + kHidden * 64;
  const Decoder model = LoadShape(shape);
  for (const auto& [tokens, experts] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 2}, {3, 6}, {16, 32}, {20, 32}}) {
    DecoderState state = State(model);
    const DecoderWork w = Step(state, *state.NewSequence(), tokens);
    EXPECT_EQ(w.weight_bytes, 7 * kHeader +
                                  4 * (2 * (kAttention + kRouter) + kOutput) +
                                  2 * experts * (2 * kHeader + 4 * kExpert) +
                                  4 * kHidden * tokens);
    EXPECT_EQ(
        w.f32_ops,
        2 * (2 * (kAttention + kRouter + 2 * kExpert) * tokens + kOutput) +
            2 * PromptPairs(tokens) * kPair);
  }
}

TEST_P(DecoderWorkTest, CountsTheKeysAndValuesThatAStepSees) {
  const Decoder model = LoadShape(Shape("llama"));
  DecoderState state = State(model);
  // A key and a value of one head in each of two layers.
  constexpr int64_t kToken = 2 * 2 * kHeadDim * 4;
  const int32_t first = *state.NewSequence(), second = *state.NewSequence();
  EXPECT_EQ(Step(state, first, 5).cache_bytes, 5 * kToken);
  EXPECT_EQ(Step(state, first, 1).cache_bytes, 6 * kToken);
  EXPECT_EQ(Step(state, second, 3).cache_bytes, 3 * kToken);
  const std::vector<int32_t> token = {1};
  ASSERT_TRUE(state
                  .Forward({{first, token}, {second, token}},
                           LogitsOf::kLastTokens, inline_)
                  .ok());
  EXPECT_EQ(state.last_work().cache_bytes, (7 + 4) * kToken);
}

// With matrices of int8, f32_ops are attention's alone.
TEST_P(DecoderWorkTest, CountsTheProductsOfAttention) {
  const Decoder model = LoadShape(Shape("llama"), DecoderWeights::kInt8);
  DecoderState state = State(model);
  constexpr int64_t kLayers = 2;
  const int32_t first = *state.NewSequence(), second = *state.NewSequence();
  EXPECT_EQ(Step(state, first, 5).f32_ops,
            kLayers * (1 + 2 + 3 + 4 + 5) * kPair);
  EXPECT_EQ(Step(state, first, 1).f32_ops, kLayers * 6 * kPair);
  EXPECT_EQ(Step(state, first, 3).f32_ops, kLayers * (7 + 8 + 9) * kPair);
  EXPECT_EQ(Step(state, second, 2).f32_ops, kLayers * (1 + 2) * kPair);
  const std::vector<int32_t> token = {1};
  ASSERT_TRUE(state
                  .Forward({{first, token}, {second, token}},
                           LogitsOf::kLastTokens, inline_)
                  .ok());
  EXPECT_EQ(state.last_work().f32_ops, kLayers * (10 + 3) * kPair);
}

// Keys and values of one byte have an f32 scale for each token and head.
TEST_P(DecoderWorkTest, CountsAttentionByTheTypesOfRowsAndCache) {
  constexpr int64_t kTokens = 16, kPairs = 2 * PromptPairs(kTokens);
  for (const DecoderWeights weights :
       {DecoderWeights::kF32, DecoderWeights::kBF16}) {
    const Decoder model = LoadShape(Shape("llama"), weights);
    DecoderState f32_state = State(model, /*page_size=*/16);
    const DecoderWork f32 = Step(f32_state, *f32_state.NewSequence(), kTokens);
    for (const auto& [cache, element_bytes, scale_bytes, dot] :
         {std::tuple(DType::kF32, 4, 0, false),
          {DType::kF16, 2, 0, false},
          {DType::kBF16, 2, 0, true},
          {DType::kI8, 1, 4, true},
          {DType::kF8E4M3, 1, 4, true},
          {DType::kF8E5M2, 1, 4, true}}) {
      DecoderState state = State(model, /*page_size=*/16, cache);
      const DecoderWork w = Step(state, *state.NewSequence(), kTokens);
      const bool bf16 = dot && weights == DecoderWeights::kBF16;
      EXPECT_EQ(w.f32_ops, f32.f32_ops - (bf16 ? kPairs * kPair : 0));
      EXPECT_EQ(w.bf16_ops, f32.bf16_ops + (bf16 ? kPairs * kPair : 0));
      EXPECT_EQ(w.cache_bytes,
                2 * kTokens * 2 * (kHeadDim * element_bytes + scale_bytes));
      // What counts as bf16 is a bf16 dot product where there is one.
      const std::string explained = state.ExplainAttention();
      if (explained.find("bf16 dot") != std::string::npos) {
        EXPECT_TRUE(bf16) << explained;
      } else if (explained.find("AVX3_ZEN4") != std::string::npos) {
        EXPECT_FALSE(bf16) << explained;
      }
    }
  }
}

TEST_P(DecoderWorkTest, CountsKeysThatSequencesShareOnce) {
  SmallDecoder shape = Shape("llama");
  shape.context = 512;
  const Decoder model = LoadShape(shape);
  DecoderState state = State(model);
  constexpr int64_t kToken = 2 * 2 * kHeadDim * 4;
  const int32_t first = *state.NewSequence();
  Step(state, first, 300);
  const auto second = state.Fork(first);
  ASSERT_TRUE(second.ok()) << second.status();
  const std::vector<int32_t> token = {1};
  ASSERT_TRUE(state
                  .Forward({{first, token}, {*second, token}},
                           LogitsOf::kLastTokens, inline_)
                  .ok());
  ASSERT_GT(state.shared_tokens(), 0);
  EXPECT_EQ(state.last_work().cache_bytes,
            (301 + 301 - state.shared_tokens()) * kToken);
  // Each query meets all of its keys.
  EXPECT_EQ(state.last_work().f32_ops,
            2 * (2 * (kAttention + kFeedForward) + kOutput) * 2 +
                2 * (301 + 301) * kPair);
}

// Layer 0 of gemma2 sees 9 tokens, layer 1 all.
TEST_P(DecoderWorkTest, CountsNoKeysBeforeAWindow) {
  const Decoder model = LoadShape(Shape("gemma2"));
  DecoderState state = State(model);
  constexpr int64_t kToken = 2 * kHeadDim * 4;
  const int32_t sequence = *state.NewSequence();
  EXPECT_EQ(Step(state, sequence, 20).cache_bytes, (20 + 20) * kToken);
  EXPECT_EQ(Step(state, sequence, 1).cache_bytes, (21 + 9) * kToken);
  EXPECT_EQ(Step(state, sequence, 3).cache_bytes, (24 + 11) * kToken);
}

TEST_P(DecoderWorkTest, CountsNoProductsWithKeysBeforeAWindow) {
  const Decoder model = LoadShape(Shape("gemma2"), DecoderWeights::kInt8);
  DecoderState state = State(model);
  const int32_t sequence = *state.NewSequence();
  // 9 queries see 1 to 9 keys of layer 0, and 11 see 9.
  EXPECT_EQ(Step(state, sequence, 20).f32_ops,
            (PromptPairs(20) + PromptPairs(9) + 11 * 9) * kPair);
  EXPECT_EQ(Step(state, sequence, 1).f32_ops, (21 + 9) * kPair);
  EXPECT_EQ(Step(state, sequence, 3).f32_ops, (22 + 23 + 24 + 3 * 9) * kPair);
  const int32_t second = *state.NewSequence();
  EXPECT_EQ(Step(state, second, 8).f32_ops, 2 * PromptPairs(8) * kPair);
  // The window is full from the second of these on.
  EXPECT_EQ(Step(state, second, 3).f32_ops, (9 + 10 + 11 + 9 + 9 + 9) * kPair);
}

// Layer 0 of lfm2 remembers the last two rows of its convolution.
TEST_P(DecoderWorkTest, CountsWhatRecurrentLayersRemember) {
  const Decoder model = LoadShape(Shape("lfm2"));
  DecoderState state = State(model);
  constexpr int64_t kToken = 2 * kHeadDim * 4, kWindow = 2 * kHidden * 4;
  const int32_t sequence = *state.NewSequence();
  EXPECT_EQ(Step(state, sequence, 5).cache_bytes, 5 * kToken + kWindow);
  EXPECT_EQ(Step(state, sequence, 1).cache_bytes, 6 * kToken + kWindow);
}

// Each token meets the three weights of each channel, and each number of its
// state twice in Mamba-2 and three times in a gated delta net.
TEST_P(DecoderWorkTest, CountsTheProductsOfRecurrentLayers) {
  constexpr int64_t kTokens = 5, kTaps = 3;
  const auto ops = [&](const SmallDecoder& shape) {
    const Decoder model = LoadShape(shape);
    DecoderState state = State(model);
    return Step(state, *state.NewSequence(), kTokens).f32_ops;
  };
  const int64_t attention = PromptPairs(kTokens) * kPair;
  constexpr int64_t kShortConv = 3 * kHidden * kHidden + kHidden * kHidden;
  EXPECT_EQ(
      ops(Shape("lfm2")),
      2 * ((kShortConv + kAttention + 2 * kFeedForward) * kTokens + kOutput) +
          attention + 2 * kTokens * kTaps * kHidden);
  // z and x of 32 channels; B and C of 2 groups of 12; dt of 4 heads.
  constexpr int64_t kInner = 32, kHeads = 4, kGroups = 2, kState = 12;
  constexpr int64_t kChannels = kInner + 2 * kGroups * kState;
  constexpr int64_t kMamba =
      (kInner + kChannels + kHeads) * kHidden + kHidden * kInner;
  EXPECT_EQ(ops(Shape("granitehybrid")),
            2 * ((kMamba + kAttention + 2 * kFeedForward) * kTokens + kOutput) +
                attention +
                2 * kTokens * (kTaps * kChannels + 2 * kInner * kState));
  // Two of three experts. The queries of the layer that attends have gates.
  SmallDecoder shape = Shape("qwen3next");
  shape.experts_used = 2;
  constexpr int64_t kMixture = 3 * kHidden + 2 * 3 * 64 * kHidden;
  constexpr int64_t kDeltaNet =
      (kInner + kChannels + 2 * kHeads) * kHidden + kHidden * kInner;
  constexpr int64_t kGate = 2 * kHeadDim * kHidden;
  EXPECT_EQ(ops(shape),
            2 * ((kDeltaNet + kAttention + kGate + 2 * kMixture) * kTokens +
                 kOutput) +
                attention +
                2 * kTokens * (kTaps * kChannels + 3 * kInner * kState));
}

// A layer over latents multiplies by W_kvb once, though it is packed twice.
TEST_P(DecoderWorkTest, CountsTheMatricesOfLatents) {
  SmallDecoder shape = Shape("deepseek2");
  shape.experts = 4;
  shape.experts_used = 2;
  constexpr int64_t kLatent = 32, kRope = 20, kValue = 16, kInner = 64;
  constexpr int64_t kNope = kHeadDim - kRope;
  constexpr int64_t kMixer = (kLatent + kRope) * kHidden +
                             2 * kHeadDim * kHidden + kHidden * 2 * kValue +
                             2 * (kNope + kValue) * kLatent;
  // Two shared experts are one of twice their columns.
  constexpr int64_t kExpert = 3 * kInner * kHidden;
  constexpr int64_t kMixture = 4 * kHidden + (2 + 2) * kExpert;
  const Decoder model = LoadShape(shape);
  DecoderState state = State(model, /*page_size=*/16);
  // A pair costs a product of latents' rows and one of latents in the absorbed
  // form, and a key and a value in the direct form.
  constexpr int64_t kAbsorbed = 2 * 2 * (kLatent + kRope + kLatent);
  constexpr int64_t kDirect = 2 * 2 * (kHeadDim + kValue);
  const DecoderWork w = Step(state, *state.NewSequence(), 3);
  EXPECT_EQ(w.f32_ops,
            2 * ((2 * kMixer + kFeedForward + kMixture) * 3 + kOutput) +
                2 * PromptPairs(3) * kAbsorbed);
  EXPECT_EQ(w.cache_bytes, 3 * state.cache_bytes_per_token());
  const int32_t longer = *state.NewSequence();
  EXPECT_EQ(Step(state, longer, 40).f32_ops,
            2 * ((2 * kMixer + kFeedForward + kMixture) * 40 + kOutput) +
                2 * PromptPairs(40) * kDirect);
  EXPECT_EQ(Step(state, longer, 1).f32_ops,
            2 * (2 * kMixer + kFeedForward + kMixture + kOutput) +
                2 * 41 * kAbsorbed);

  // The direct form multiplies keys of the rows' type, the absorbed form
  // latents of the cache's.
  const Decoder bf16 = LoadShape(shape, DecoderWeights::kBF16);
  DecoderState halves = State(bf16, /*page_size=*/16, DType::kF16);
  const int32_t sequence = *halves.NewSequence();
  constexpr int64_t kRouter = 4 * kHidden;
  EXPECT_EQ(Step(halves, sequence, 40).f32_ops, 2 * kRouter * 40);
  EXPECT_EQ(Step(halves, sequence, 1).f32_ops,
            2 * kRouter + 2 * 41 * kAbsorbed);
}

QUERN_INSTANTIATE_ISA_TEST(DecoderWorkTest);

}  // namespace
}  // namespace quern
