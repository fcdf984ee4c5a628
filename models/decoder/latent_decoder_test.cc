// DeepSeek's models against an oracle in double, and what must not change a
// bit.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_latent_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using DoubleRows = ReferenceLatentDecoder::Rows;

// The bounds of decoder_oracle_test.cc, which says where they come from.
constexpr double kF32Bound = 2e-4;
constexpr double kBF16Bound = 0.125;
constexpr double kInt8Bound = 0.4;

SmallDecoder Latent() {
  SmallDecoder shape;
  shape.architecture = "deepseek2";
  return shape;
}

// The forms that a file may have.
std::vector<std::pair<const char*, SmallDecoder>> Forms() {
  SmallDecoder lora = Latent(), split = Latent(), yarn = Latent();
  lora.q_lora = 32;
  split.split_kv_b = true;
  split.rope_dim = 8;
  split.head_dim = 40;  // blocks of Q8_0 divide what does not rotate
  split.kv_heads = 1;
  yarn.yarn = true;
  return {
      {"plain", Latent()}, {"lora", lora}, {"split", split}, {"yarn", yarn}};
}

class LatentDecoderTest : public DecoderFixture {
 protected:
  // The largest difference of the logits from the oracle, in steps of `step`
  // tokens.
  double Distance(const SmallDecoder& shape, DecoderWeights weights,
                  size_t step = 41, DType cache = DType::kF32,
                  DecoderActivations rows = DecoderActivations::kExact) {
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const auto tokens = RandomTokens(rng, 41, shape.vocab);
    const Decoder model = Load(bytes, weights, rows);
    return LargestDifferenceOf(
        InPieces(model, tokens, step, cache),
        ReferenceLatentDecoder(ParseOrDie(bytes)).Logits(tokens));
  }

  Rows InPieces(const Decoder& model, const std::vector<int32_t>& tokens,
                size_t step, DType cache = DType::kF32) {
    DecoderState state = State(model, /*page_size=*/16, cache);
    const int32_t sequence = *state.NewSequence();
    Rows all;
    for (size_t done = 0; done < tokens.size(); done += step) {
      const auto piece = absl::MakeConstSpan(tokens).subspan(done, step);
      for (std::vector<float>& row :
           Forward(state, {{sequence, piece}}, inline_)) {
        all.push_back(std::move(row));
      }
    }
    return all;
  }
};

TEST_P(LatentDecoderTest, EqualsTheOracleForEveryTensorType) {
  for (auto& [name, shape] : Forms()) {
    for (const GgufTensorType type :
         {GgufTensorType::kF32, GgufTensorType::kF16, GgufTensorType::kBF16,
          GgufTensorType::kQ8_0}) {
      SCOPED_TRACE(absl::StrCat(name, " ", GgufTensorTypeName(type)));
      shape.type = type;
      const bool f32_rows =
          type == GgufTensorType::kF32 || type == GgufTensorType::kF16;
      EXPECT_LE(Distance(shape, DecoderWeights::kAsInFile),
                f32_rows ? kF32Bound : kBF16Bound);
      EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
      EXPECT_LE(Distance(shape, DecoderWeights::kBF16), kBF16Bound);
      EXPECT_LE(Distance(shape, DecoderWeights::kInt8), kInt8Bound);
    }
    EXPECT_LE(Distance(shape, DecoderWeights::kAsInFile, 41, DType::kF32,
                       DecoderActivations::kInt8),
              kInt8Bound);
  }
}

// Blocks with other forms, so that rows are f32 and W_kvb is, too.
TEST_P(LatentDecoderTest, BlocksBecomeF32WhereRowsAreF32) {
  for (auto& [name, shape] : Forms()) {
    SCOPED_TRACE(name);
    shape.type = GgufTensorType::kQ8_0;
    shape.ffn_type = GgufTensorType::kF16;
    EXPECT_LE(Distance(shape, DecoderWeights::kAsInFile), kF32Bound);
  }
}

// A prompt of 32 tokens and more takes the direct form, a shorter one the
// absorbed form.
TEST_P(LatentDecoderTest, EqualsTheOracleInStepsOfEverySize) {
  for (const auto& [name, shape] : Forms()) {
    for (const size_t step : {1, 7, 31, 32, 40}) {
      EXPECT_LE(Distance(shape, DecoderWeights::kF32, step), kF32Bound)
          << name << " " << step;
    }
  }
}

TEST_P(LatentDecoderTest, EqualsTheOracleForEveryRouter) {
  SmallDecoder shape = Latent();
  shape.layers = 3;
  shape.experts = 7;
  for (const int64_t leading : {0, 1, 2}) {
    for (const int64_t gating : {1, 2}) {
      for (const bool with : {false, true}) {
        SCOPED_TRACE(absl::StrCat(leading, " ", gating, " ", with));
        shape.leading_dense = leading;
        shape.gating = gating;
        shape.router_bias = shape.experts_sum_to_one = with;
        shape.shared_experts = leading;
        shape.experts_used = 2 + leading;
        EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
      }
    }
  }
}

TEST_P(LatentDecoderTest, EqualsTheOracleForAwkwardShapes) {
  SmallDecoder odd = Latent();  // no dimension is a multiple of a vector
  odd.vocab = 19;
  odd.hidden = 10;
  odd.layers = 3;
  odd.ffn = 7;
  odd.expert_ffn = 5;
  odd.q_heads = odd.kv_heads = 3;
  odd.head_dim = 7;
  odd.rope_dim = 4;
  odd.value_dim = 5;
  odd.kv_lora = 12;
  odd.output = false;
  SmallDecoder one = Latent();  // the smallest model
  one.vocab = one.layers = one.ffn = one.expert_ffn = 1;
  one.q_heads = one.kv_heads = one.value_dim = 1;
  one.experts = one.experts_used = 1;
  one.leading_dense = 0;
  one.hidden = one.rope_dim = 2;
  one.head_dim = 3;
  one.kv_lora = 4;
  for (SmallDecoder shape : {odd, one}) {
    for (const bool split : {false, true}) {
      shape.split_kv_b = split;
      shape.q_lora = split ? 3 : 0;
      for (const size_t step : {5, 41}) {
        EXPECT_LE(Distance(shape, DecoderWeights::kAsInFile, step), kF32Bound)
            << shape.hidden << " " << split << " " << step;
      }
    }
  }
}

// A latent is rounded to the cache's type, by at most 2^-12 of it in f16, which
// is an eighth of what bf16 does. A model in bf16 or int8 rounds so often that
// its cache adds little. An f16 cache is the default of every model.
TEST_P(LatentDecoderTest, EqualsTheOracleWithEveryCache) {
  using Type = GgufTensorType;
  using Weights = DecoderWeights;
  SmallDecoder shape = Latent();
  for (const auto& [type, weights, bound] :
       {std::tuple{Type::kF32, Weights::kF32, 0.0},
        {Type::kBF16, Weights::kAsInFile, kBF16Bound},
        {Type::kQ8_0, Weights::kAsInFile, kBF16Bound},
        {Type::kF32, Weights::kBF16, kBF16Bound},
        {Type::kF32, Weights::kInt8, kInt8Bound}}) {
    shape.type = type;
    for (const DType cache : {DType::kF16, DType::kBF16}) {
      const double of_cache =
          cache == DType::kF16 ? kBF16Bound / 8 : kBF16Bound;
      for (const size_t step : {7, 41}) {
        EXPECT_LE(Distance(shape, weights, step, cache),
                  std::max(bound, of_cache))
            << GgufTensorTypeName(type) << " " << static_cast<int>(weights)
            << " " << DTypeName(cache) << " " << step;
      }
    }
  }
}

// In steps that the absorbed form takes, which reads all keys from the cache.
// Where a latent lies nearer to a tie than f32 rounds, its code is the
// neighbour of the oracle's: one such code has been seen to move a logit by
// 1.7 * kF32Bound, and all roundings to codes move one by 20 times it and more.
TEST_P(LatentDecoderTest, EqualsTheOracleWithLatentsInBlocks) {
  constexpr double kTieBound = 5 * kF32Bound;
  for (const auto& [name, shape] : Forms()) {
    SCOPED_TRACE(name);
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const auto tokens = RandomTokens(rng, 41, shape.vocab);
    const GgufFile file = ParseOrDie(bytes);
    ReferenceLatentForm form = ReferenceLatentForm::Of(file);
    form.blocks = true;
    const auto want = ReferenceLatentDecoder(file, form).Logits(tokens);
    const Decoder model = Load(bytes, DecoderWeights::kF32);
    for (const size_t step : {1, 7}) {
      const Rows got = InPieces(model, tokens, step, DType::kF8E4M3);
      EXPECT_LE(LargestDifferenceOf(got, want), kTieBound) << step;
    }
    EXPECT_GT(LargestDifferenceOf(InPieces(model, tokens, 7), want),
              20 * kF32Bound);
  }
}

TEST_P(LatentDecoderTest, ShortStepsHaveTheSameBits) {
  TestRng rng;
  const SmallDecoder shape = Latent();
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto tokens = RandomTokens(rng, 31, shape.vocab);
  for (const DecoderWeights weights :
       {DecoderWeights::kF32, DecoderWeights::kBF16, DecoderWeights::kInt8}) {
    const Decoder model = Load(bytes, weights);
    const Rows one = InPieces(model, tokens, 1);
    for (const size_t step : {2, 9, 31}) {
      EXPECT_EQ(InPieces(model, tokens, step), one) << step;
    }
  }
}

// Prompts in both forms and single tokens in one step.
TEST_P(LatentDecoderTest, BatchAndThreadsChangeNothing) {
  const auto two = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(two.ok()) << two.status();
  ExpectBatchAndThreadsChangeNothing(Latent(), /*page_size=*/16,
                                     /*page_size_alone=*/32, **two);
}

TEST_P(LatentDecoderTest, ForksContinueAsTheWhole) {
  TestRng rng;
  const SmallDecoder shape = Latent();
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  DecoderState state = State(model, /*page_size=*/16);
  const auto text = RandomTokens(rng, 28, shape.vocab);
  const auto all = absl::MakeConstSpan(text);
  const Rows want = InPieces(model, text, 28);
  const int32_t root = *state.NewSequence();
  Forward(state, {{root, all.first(19)}}, inline_);
  const auto branch = state.Fork(root);
  ASSERT_TRUE(branch.ok()) << branch.status();
  // The root goes another way in the same step, and its branch as the text.
  const auto other = RandomTokens(rng, 9, shape.vocab);
  const Rows both =
      Forward(state, {{root, other}, {*branch, all.subspan(19)}}, inline_);
  EXPECT_EQ(Rows(both.begin() + 9, both.end()),
            Rows(want.begin() + 19, want.end()));
  EXPECT_EQ(state.shared_tokens(), 0);
  // A row of 32 + 20 elements, in two layers.
  EXPECT_EQ(state.cache_bytes_per_token(), 2 * 4 * 52);
}

TEST_P(LatentDecoderTest, PackedFilesHaveTheSameBits) {
  TestRng rng;
  for (auto& [name, shape] : Forms()) {
    for (const auto type : {GgufTensorType::kF16, GgufTensorType::kQ8_0}) {
      SCOPED_TRACE(absl::StrCat(name, " ", GgufTensorTypeName(type)));
      shape.type = type;
      const std::string bytes = SmallDecoderFile(rng, shape);
      const auto tokens = RandomTokens(rng, 35, shape.vocab);
      DecoderOptions options;
      options.packed_path =
          absl::StrCat(testing::TempDir(), "/latent.", getpid(), ".packed");
      unlink(options.packed_path.c_str());
      Rows first;
      for (int run = 0; run < 2; ++run) {
        const auto model = Decoder::Create(ParseOrDie(bytes), options, inline_);
        ASSERT_TRUE(model.ok()) << model.status();
        EXPECT_RAN_ON(*model);
        const Rows rows = InPieces(*model, tokens, 34);
        if (run == 0) first = rows;
        EXPECT_EQ(rows, first);
      }
      unlink(options.packed_path.c_str());
    }
  }
}

TEST_P(LatentDecoderTest, RefusesSmallPagesNarrowCachesAndLittleMemory) {
  TestRng rng;
  const std::string bytes = SmallDecoderFile(rng, Latent());
  const Decoder model = Load(bytes, DecoderWeights::kF32);
  DecoderStateSpec spec;
  spec.page_size = 8;
  const absl::Status page = DecoderState::Create(model, spec).status();
  EXPECT_EQ(page.code(), absl::StatusCode::kInvalidArgument) << page;
  EXPECT_THAT(std::string(page.message()), HasSubstr("page_size=8"));
  spec = DecoderStateSpec();
  spec.cache_dtype = DType::kI8;
  const absl::Status cache = DecoderState::Create(model, spec).status();
  EXPECT_EQ(cache.code(), absl::StatusCode::kUnimplemented) << cache;
  EXPECT_THAT(std::string(cache.message()),
              HasSubstr("dtype is i8 and scaling per_token_head; need"));
  DecoderOptions options;
  options.max_bytes = 1000;
  EXPECT_EQ(
      Decoder::Create(ParseOrDie(bytes), options, inline_).status().code(),
      absl::StatusCode::kResourceExhausted);
}

// Proves that the models above are sensitive: an oracle without one of the
// differences is far off.
TEST(ReferenceLatentTest, EachDifferenceIsFelt) {
  const auto distance = [](auto&& change) {
    TestRng rng;
    SmallDecoder shape = Latent();
    shape.layers = 3;
    shape.q_lora = 32;
    shape.yarn = shape.router_bias = true;
    shape.experts = 7;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto tokens = RandomTokens(rng, 41, shape.vocab);
    ReferenceLatentForm form = ReferenceLatentForm::Of(file);
    change(form);
    const double difference =
        LargestDifferenceOf(ReferenceLatentDecoder(file, form).Logits(tokens),
                            ReferenceLatentDecoder(file).Logits(tokens));
    EXPECT_TRUE(std::isfinite(difference));
    return difference;
  };
  using Form = ReferenceLatentForm;
  constexpr double kFelt = 100 * kF32Bound;
  EXPECT_EQ(distance([](Form&) {}), 0);
  EXPECT_GT(distance([](Form& f) { f.rope_pairs = false; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.kv_norm = false; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.shared = false; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.sum_to_one = true; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.sigmoid = true; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.bias = false; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.expert_scale = 1; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.experts_used = 2; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.scale *= 1.5; }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.SetPositions(1, 0, 1); }), kFelt);
  EXPECT_GT(distance([](Form& f) { f.SetPositions(8, 0, 64); }), kFelt);
}

QUERN_INSTANTIATE_ISA_TEST(LatentDecoderTest);

}  // namespace
}  // namespace quern
