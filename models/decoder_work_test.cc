// The bytes and operations of steps, counted by hand for shapes that fill their
// panels, so that nothing is padded.

#include "quern/models/decoder_work.h"

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/decoder.h"
#include "quern/models/decoder_fixture_testutil.h"
#include "quern/models/decoder_testutil.h"
#include "quern/models/gguf.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

constexpr int64_t kHidden = 64, kVocab = 64, kFfn = 128, kHeadDim = 32;
// Header of a packed matrix (gemm/packed_form.h).
constexpr int64_t kHeader = 256;
// Elements of a layer's matrices: q, k and v of 2 + 1 + 1 heads, and the one
// behind attention; gate and up, and down.
constexpr int64_t kAttention = 4 * kHeadDim * kHidden + kHidden * 2 * kHeadDim;
constexpr int64_t kFeedForward = 2 * kFfn * kHidden + kHidden * kFfn;
constexpr int64_t kOutput = kVocab * kHidden;

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
      const auto work = [&](const Decoder& model) {
        DecoderState state = State(model);
        return Step(state, *state.NewSequence(), tokens, logits);
      };
      DecoderWork w = work(f32);
      EXPECT_EQ(w.weight_bytes,
                9 * kHeader + 4 * (kLayers + kOutput) + 4 * kHidden * tokens);
      EXPECT_EQ(w.f32_ops, ops);
      EXPECT_EQ(w.bf16_ops + w.int8_ops, 0);
      w = work(bf16);
      EXPECT_EQ(w.weight_bytes,
                9 * kHeader + 2 * (kLayers + kOutput) + 2 * kHidden * tokens);
      EXPECT_EQ(w.bf16_ops, ops);
      EXPECT_EQ(w.f32_ops + w.int8_ops, 0);
      w = work(int8);
      EXPECT_EQ(w.weight_bytes, 9 * kHeader + kLayers + kOutput + 8 * kColumns +
                                    2 * kHidden * tokens);
      EXPECT_EQ(w.int8_ops, ops);
      EXPECT_EQ(w.f32_ops + w.bf16_ops, 0);
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
    EXPECT_EQ(w.f32_ops, is_int8 ? 0 : ops);
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
        2 * (2 * (kAttention + kRouter + 2 * kExpert) * tokens + kOutput));
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

// Layer 0 of lfm2 remembers the last two rows of its convolution.
TEST_P(DecoderWorkTest, CountsWhatRecurrentLayersRemember) {
  const Decoder model = LoadShape(Shape("lfm2"));
  DecoderState state = State(model);
  constexpr int64_t kToken = 2 * kHeadDim * 4, kWindow = 2 * kHidden * 4;
  const int32_t sequence = *state.NewSequence();
  EXPECT_EQ(Step(state, sequence, 5).cache_bytes, 5 * kToken + kWindow);
  EXPECT_EQ(Step(state, sequence, 1).cache_bytes, 6 * kToken + kWindow);
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
  const DecoderWork w = Step(state, *state.NewSequence(), 3);
  EXPECT_EQ(w.f32_ops,
            2 * ((2 * kMixer + kFeedForward + kMixture) * 3 + kOutput));
  EXPECT_EQ(w.cache_bytes, 3 * state.cache_bytes_per_token());
}

QUERN_INSTANTIATE_ISA_TEST(DecoderWorkTest);

}  // namespace
}  // namespace quern
