// What decoders and their states refuse, and that a refused step changes
// nothing.

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

class DecoderRefusalTest : public DecoderFixture {};

TEST_P(DecoderRefusalTest, RefusedStepsChangeNothing) {
  TestRng rng;
  const SmallDecoder shape;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kAsInFile);
  DecoderStateSpec spec;
  spec.max_sequences = 2;
  spec.max_step_tokens = 50;
  spec.page_size = 8;
  spec.cache_tokens = 64;
  auto state = DecoderState::Create(model, spec);
  ASSERT_TRUE(state.ok()) << state.status();
  const int32_t s = *state->NewSequence();
  const int32_t other = *state->NewSequence();
  EXPECT_EQ(state->NewSequence().status().code(),
            absl::StatusCode::kResourceExhausted);
  const std::vector<int32_t> ok(20, 1), low = {-1}, high = {37}, none;
  const std::vector<int32_t> long_step(51, 1);
  ASSERT_TRUE(state->Forward({{s, ok}}, LogitsOf::kLastTokens, inline_).ok());
  const auto expect = [&](const std::vector<DecoderBatchItem>& items,
                          absl::StatusCode code, absl::string_view words) {
    const auto logits = state->Forward(items, LogitsOf::kLastTokens, inline_);
    EXPECT_EQ(logits.status().code(), code) << logits.status();
    EXPECT_THAT(std::string(logits.status().message()),
                HasSubstr(std::string(words)));
    EXPECT_EQ(state->length(s), 20);
    EXPECT_EQ(state->length(other), 0);
  };
  using Code = absl::StatusCode;
  expect({{7, ok}}, Code::kInvalidArgument,
         "decoder: items[0].sequence=7 is not a sequence");
  expect({{-1, ok}}, Code::kInvalidArgument, "sequence=-1 is not");
  expect({{s, ok}, {s, ok}}, Code::kInvalidArgument,
         "items[1].sequence=0 occurs twice");
  expect({{s, none}}, Code::kInvalidArgument, "items[0] has no tokens");
  expect({{s, low}}, Code::kInvalidArgument,
         "items[0] has token -1; need 0 <= token < 37");
  expect({{s, high}}, Code::kInvalidArgument, "has token 37");
  expect({{s, long_step}}, Code::kInvalidArgument,
         "items[0] has 51 tokens after 20; the context is 64");
  expect({{other, long_step}}, Code::kInvalidArgument,
         "the step has 51 tokens; need <= 50");
  const std::vector<int32_t> fills(44, 1);
  expect({{other, fills}}, Code::kResourceExhausted,
         "decoder: the cache of 64 tokens is full: sequence 1 needs 44, 40 are "
         "free");
  // A refused step leaves the sequence usable.
  EXPECT_TRUE(state->Forward({{s, ok}}, LogitsOf::kLastTokens, inline_).ok());
  EXPECT_TRUE(state->EndSequence(s).ok());
  EXPECT_EQ(state->length(s), -1);
  EXPECT_EQ(state->EndSequence(s).code(), Code::kInvalidArgument);
}

// A batch of which only some sequences fit must be refused without keeping the
// pages that were already taken for the first ones.
TEST_P(DecoderRefusalTest, ARefusedStepKeepsNoPages) {
  TestRng rng;
  SmallDecoder shape;
  shape.context = 128;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kAsInFile);
  DecoderStateSpec spec;
  spec.max_sequences = 2;
  spec.page_size = 32;
  spec.cache_tokens = 128;
  auto state = DecoderState::Create(model, spec);
  ASSERT_TRUE(state.ok()) << state.status();
  const int32_t a = *state->NewSequence(), b = *state->NewSequence();
  const std::vector<int32_t> one(1, 1), some(64, 1), more(96, 1);
  ASSERT_TRUE(state->Forward({{a, one}}, LogitsOf::kLastTokens, inline_).ok());
  const auto both =
      state->Forward({{a, some}, {b, more}}, LogitsOf::kLastTokens, inline_);
  EXPECT_EQ(both.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(both.status().message()),
              HasSubstr("sequence 1 needs 96, 32 are free"));
  // Sequence a keeps its one page; sequence b may have the other three.
  const auto alone =
      state->Forward({{b, more}}, LogitsOf::kLastTokens, inline_);
  EXPECT_TRUE(alone.ok()) << alone.status();
  const std::vector<int32_t> rest(31, 1);
  EXPECT_TRUE(state->Forward({{a, rest}}, LogitsOf::kLastTokens, inline_).ok());
}

TEST_P(DecoderRefusalTest, RefusesBadOptions) {
  TestRng rng;
  const std::string bytes = SmallDecoderFile(rng, SmallDecoder());
  const auto status = [&](auto&& change) {
    DecoderOptions options;
    change(options);
    return Decoder::Create(ParseOrDie(bytes), options, inline_).status();
  };
  const auto message = [&](auto&& change) {
    return std::string(status(change).message());
  };
  EXPECT_THAT(message([](DecoderOptions& o) { o.max_context = 0; }),
              HasSubstr("decoder: max_context=0; need max_context >= 1"));
  EXPECT_THAT(message([](DecoderOptions& o) { o.max_bytes = -1; }),
              HasSubstr("decoder: max_bytes=-1; need max_bytes >= 0"));
  EXPECT_THAT(message([](DecoderOptions& o) { o.max_bytes = 1000; }),
              HasSubstr("; need at most max_bytes=1000"));
  // The bound that Create checks is within a factor of two of what it takes.
  const int64_t weights = Load(bytes, DecoderWeights::kAsInFile).weight_bytes();
  EXPECT_EQ(status([&](DecoderOptions& o) { o.max_bytes = weights; }).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      status([&](DecoderOptions& o) { o.max_bytes = 2 * weights; }).ok());
}

// Whenever the caller gives up, Create ends at once, and no packed file is
// left.
TEST(DecoderCancelTest, CreateEndsWhenItIsCancelled) {
  for (const char* architecture : {"llama", "qwen3moe", "olmo2", "phi3", "lfm2",
                                   "granitehybrid", "qwen3next", "deepseek2"}) {
    SCOPED_TRACE(architecture);
    SmallDecoder shape;
    shape.architecture = architecture;
    DecoderOptions options;
    // Blocks whose codes and scales are taken apart first.
    if (shape.architecture == "llama") {
      shape.type = GgufTensorType::kQ4_0;
      options.activations = DecoderActivations::kExact;
    }
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    InlineExecutor executor;
    options.packed_path = ::testing::TempDir() + "/cancelled_" + architecture;
    int asked = 0, give_up = -1;
    options.cancelled = [&] { return asked++ == give_up; };
    ASSERT_TRUE(Decoder::Create(file, options, executor).ok());
    const int all = asked;
    EXPECT_GT(all, 10);
    std::remove(options.packed_path.c_str());
    for (give_up = 0; give_up < all; ++give_up) {
      asked = 0;
      const absl::Status status =
          Decoder::Create(file, options, executor).status();
      // Fewer are asked where time has not passed.
      if (asked <= give_up) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
      EXPECT_EQ(asked, give_up + 1);
      EXPECT_NE(std::remove(options.packed_path.c_str()), 0);
    }
  }
}

// The default of max_bytes must hold what the narrowest format takes as f32,
// three times where the embedding is the output matrix too.
TEST(DecoderBytesTest, TheDefaultHoldsATiedEmbeddingInEveryFormat) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    EXPECT_LE(3 * 4 * info.values,
              DecoderOptions::kBytesOfFileByte * info.bytes)
        << info.name;
  }
  TestRng rng;
  SmallDecoder shape;
  shape.type = GgufTensorType::kTQ2_0;
  shape.output = false;
  shape.vocab = 4096;
  shape.layers = 1;
  shape.hidden = shape.ffn = 256;
  shape.q_heads = 2;
  shape.kv_heads = 1;
  shape.head_dim = shape.rope_dim = 128;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const GgufFile file = ParseOrDie(bytes);
  const int64_t embedding = (*file.FindTensor("token_embd.weight"))->bytes;
  DecoderOptions options;
  options.weights = DecoderWeights::kF32;
  options.max_bytes = 1;  // so that the refusal says what loading takes
  InlineExecutor executor;
  const std::string refusal(
      Decoder::Create(file, options, executor).status().message());
  long long takes = 0;
  ASSERT_EQ(std::sscanf(refusal.c_str(),
                        "decoder: loading takes up to %lld bytes", &takes),
            1)
      << refusal;
  EXPECT_GT(takes, 36 * embedding);
  // Besides the matrices, 128 KiB hold the rotary table, norms and plans.
  EXPECT_LE(takes, DecoderOptions::kBytesOfFileByte * file.file_bytes() +
                       (int64_t{128} << 10));
}

TEST_P(DecoderRefusalTest, RefusesBadStates) {
  TestRng rng;
  const Decoder model =
      Load(SmallDecoderFile(rng, SmallDecoder()), DecoderWeights::kAsInFile);
  const auto message = [&](auto&& change) {
    DecoderStateSpec spec;
    change(spec);
    return std::string(DecoderState::Create(model, spec).status().message());
  };
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.max_sequences = 0; }),
              HasSubstr("decoder: max_sequences=0; need 1 <= max_sequences"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.max_step_tokens = 0; }),
              HasSubstr("decoder: max_step_tokens=0"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.cache_tokens = -1; }),
              HasSubstr("decoder: cache_tokens=-1"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.max_bytes = -1; }),
              HasSubstr("decoder: max_bytes=-1; need max_bytes >= 0"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.max_bytes = 1000; }),
              HasSubstr("; need at most max_bytes=1000"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.page_size = 0; }),
              HasSubstr("page_size=0"));
  EXPECT_THAT(message([](DecoderStateSpec& s) { s.cache_dtype = DType::kI32; }),
              HasSubstr("i32"));
}

QUERN_INSTANTIATE_ISA_TEST(DecoderRefusalTest);

}  // namespace
}  // namespace quern
