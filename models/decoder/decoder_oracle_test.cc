// Small random models of every architecture and of awkward shapes against the
// oracle in double.

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_decoder_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

class DecoderOracleTest : public DecoderFixture {
 protected:
  // The largest difference of the logits from the oracle.
  double Distance(const SmallDecoder& shape, DecoderWeights weights,
                  int64_t num_tokens = 41) {
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto config = DecoderConfig::Create(file);
    EXPECT_TRUE(config.ok()) << config.status();
    const auto tokens = RandomTokens(rng, num_tokens, shape.vocab);
    const Decoder model = Load(bytes, weights);
    DecoderState state = State(model);
    return LargestDifferenceOf(
        Forward(state, {{*state.NewSequence(), tokens}}, inline_),
        ReferenceDecoder(file, *config).Logits(tokens));
  }
};

// Bounds for logits around 1. f32: sums of some hundred terms over two layers
// stay within a few thousand units of 2^-24. bf16: about twenty roundings of up
// to 2^-9. A worst-case bound would be useless, so this one separates measured
// errors (at most 0.08) from errors in the computation (1 and more).
constexpr double kF32Bound = 2e-4;
constexpr double kBF16Bound = 0.125;
// int8 rounds in steps of up to 2^-8 of a row's largest element. Measured: 0.2
// at most.
constexpr double kInt8Bound = 0.4;

// The model by which roundings to 16 and 8 bits are judged.
//
// A head of a gated delta net gives o / sqrt(mean(o^2) + eps), where o = S^T q
// / sqrt(dk) and q and the keys in S have length 1. Where q is nearly
// orthogonal to what S remembers, o is almost 0, but the roundings of q and k
// leave an error e of S^T q that does not depend on that angle. The quotient
// makes of it
//
//   e / sqrt(dk (mean(o^2) + eps)) <= e / sqrt(dk eps)
//
// With dk = 12 and eps = 1e-5 that is up to 91 e, for a few tokens. The formula
// magnifies, whoever computes it. With eps = 0.02 it is at most 2.1 e, so the
// bounds above hold for the reason for which they hold in other models. In 40
// random files of F32 and 40 of Q8_0 (AVX2), the largest errors in bf16 and in
// int8 were 0.62 and 0.79 with eps = 1e-5, but 0.09 and 0.27 with eps = 0.02;
// those of qwen3moe were 0.09 and 0.2. Models in f32 are judged with
// eps = 1e-5.
SmallDecoder ForRoundings(SmallDecoder shape) {
  if (shape.architecture == "qwen3next") shape.norm_eps = 0.02f;
  // Its recurrent layers are those of lfm2, where their roundings are judged.
  // They multiply three rounded numbers, and lfm2 is near the bound.
  if (shape.architecture == "lfm2moe") {
    shape.kinds.assign(static_cast<size_t>(shape.layers), 'a');
  }
  return shape;
}

TEST_P(DecoderOracleTest, EqualsTheOracleForEveryTensorType) {
  SmallDecoder shape;
  for (const std::string& architecture : TestArchitectures()) {
    shape.architecture = architecture;
    for (const GgufTensorType type :
         {GgufTensorType::kF32, GgufTensorType::kF16, GgufTensorType::kBF16,
          GgufTensorType::kQ8_0}) {
      SCOPED_TRACE(absl::StrCat(architecture, " ", GgufTensorTypeName(type)));
      shape.type = type;
      EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
      const SmallDecoder rounded = ForRoundings(shape);
      EXPECT_LE(Distance(rounded, DecoderWeights::kBF16), kBF16Bound);
      EXPECT_LE(Distance(rounded, DecoderWeights::kInt8), kInt8Bound);
    }
  }
}

// Each form of a file, and mixtures of forms, one of which differs between q, k
// and v. The oracle uses the file's exact weights, so models with f32 rows must
// be as close as f32 models.
TEST_P(DecoderOracleTest, EqualsTheOracleInTheFormsOfTheFile) {
  using Type = GgufTensorType;
  SmallDecoder shape;
  for (const std::string& architecture : TestArchitectures()) {
    shape.architecture = architecture;
    for (const auto& [type, k_type, ffn_type, bound] :
         {std::tuple{Type::kF16, Type::kF16, Type::kF16, kF32Bound},
          std::tuple{Type::kQ8_0, Type::kQ8_0, Type::kF16, kF32Bound},
          std::tuple{Type::kF16, Type::kQ8_0, Type::kQ8_0, kF32Bound},
          std::tuple{Type::kBF16, Type::kBF16, Type::kF32, kF32Bound},
          std::tuple{Type::kBF16, Type::kQ8_0, Type::kQ8_0, kBF16Bound},
          std::tuple{Type::kQ8_0, Type::kQ8_0, Type::kQ8_0, kBF16Bound},
          std::tuple{Type::kQ4_0, Type::kQ4_0, Type::kQ4_0, kBF16Bound},
          std::tuple{Type::kQ4_0, Type::kQ8_0, Type::kF32, kF32Bound},
          std::tuple{Type::kQ5_1, Type::kIQ4_NL, Type::kMXFP4, kF32Bound}}) {
      SCOPED_TRACE(absl::StrCat(architecture, " ", GgufTensorTypeName(type),
                                " ", GgufTensorTypeName(k_type), " ",
                                GgufTensorTypeName(ffn_type)));
      shape.type = type;
      shape.k_type = k_type;
      shape.ffn_type = ffn_type;
      EXPECT_LE(Distance(bound == kF32Bound ? shape : ForRoundings(shape),
                         DecoderWeights::kAsInFile),
                bound);
    }
  }
}

// Every block format, alone and beside another, as in files of Q4_K and Q6_K.
TEST_P(DecoderOracleTest, EqualsTheOracleInEveryBlockFormat) {
  SmallDecoder shape;
  shape.layers = 1;
  shape.hidden = shape.ffn = shape.expert_ffn = 256;
  shape.q_heads = 8;
  for (const BlockFormatInfo& info : BlockFormats()) {
    shape.architecture = info.values == 256 ? "qwen3moe" : "llama";
    shape.type = static_cast<GgufTensorType>(info.format);
    for (const GgufTensorType ffn_type : {shape.type, GgufTensorType::kQ6_K}) {
      SCOPED_TRACE(absl::StrCat(info.name, " ", GgufTensorTypeName(ffn_type)));
      shape.ffn_type = ffn_type;
      // Only a file of nothing but these two has rows of bf16.
      const bool bf16 = ffn_type == GgufTensorType::kQ4_0 ||
                        ffn_type == GgufTensorType::kQ8_0;
      EXPECT_LE(Distance(shape, DecoderWeights::kAsInFile, 9),
                bf16 ? kBF16Bound : kF32Bound);
    }
    // What is made of f32 does not depend on the format that it came from.
    if (info.format != BlockFormat::kQ4_K) continue;
    EXPECT_LE(Distance(shape, DecoderWeights::kBF16, 9), kBF16Bound);
    EXPECT_LE(Distance(shape, DecoderWeights::kInt8, 9), kInt8Bound);
  }
}

TEST_P(DecoderOracleTest, EqualsTheOracleWithFactorsOfRotaryFrequencies) {
  for (const char* architecture : {"llama", "exaone4"}) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.rope_factors = true;
    EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
    shape.rope_dim = shape.head_dim;
    EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
  }
}

// f32 alone: a rounding of 16 bits may change which experts are the largest.
TEST_P(DecoderOracleTest, EqualsTheOracleWithSomeOfTheExperts) {
  SmallDecoder shape;
  shape.experts = 7;
  shape.mixture = true;
  for (const char* architecture :
       {"llama", "qwen3moe", "granitehybrid", "granitemoe", "lfm2moe",
        "qwen3next", "gpt-oss", "qwen2moe", "olmoe"}) {
    shape.architecture = architecture;
    for (const int64_t used : {1, 2, 5}) {
      SCOPED_TRACE(absl::StrCat(architecture, " ", used));
      shape.shared_ffn = used == 2 ? 0 : 32 * used;
      shape.shared_router_is_matrix = used == 5;
      shape.experts_used = used;
      // In lfm2moe alone the last layer has experts with biases.
      shape.gating =
          used == 1 ? DecoderConfig::kSoftmax : DecoderConfig::kSigmoid;
      for (const auto type : {GgufTensorType::kF32, GgufTensorType::kQ8_0}) {
        shape.type = type;
        EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
      }
    }
  }
}

TEST_P(DecoderOracleTest, EqualsTheOracleWithYarn) {
  for (const char* architecture :
       {"llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss"}) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.yarn = true;
    // With this original context the scaled pairs begin in the middle, and do
    // not begin at a whole pair.
    shape.rope_dim = shape.head_dim;
    for (const int64_t original : {64, 700}) {
      shape.yarn_original = original;
      EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound)
          << architecture << " " << original;
    }
  }
}

// The sampled numbers of gpt-oss's activation are mostly within its limits.
TEST_P(DecoderOracleTest, EqualsTheOracleBeyondTheLimitsOfTheActivation) {
  SmallDecoder shape;
  shape.architecture = "gpt-oss";
  shape.layers = 1;
  shape.expert_reach = 12;
  EXPECT_LE(Distance(shape, DecoderWeights::kF32), 20 * kF32Bound);
}

TEST_P(DecoderOracleTest, EqualsTheOracleForAwkwardShapes) {
  SmallDecoder odd;  // no dimension is a multiple of a vector
  odd.vocab = 19;
  odd.hidden = 10;
  odd.layers = 3;
  odd.ffn = 7;
  odd.q_heads = 3;
  odd.kv_heads = 1;
  odd.head_dim = 6;
  odd.rope_dim = 6;
  odd.output = false;
  SmallDecoder one;  // the smallest model
  one.vocab = one.layers = one.ffn = one.q_heads = one.kv_heads = 1;
  one.hidden = one.head_dim = one.rope_dim = 2;
  one.leading_dense = 0;
  for (const std::string& architecture : TestArchitectures()) {
    SCOPED_TRACE(architecture);
    odd.architecture = one.architecture = architecture;
    EXPECT_LE(Distance(odd, DecoderWeights::kAsInFile), kF32Bound);
    EXPECT_LE(Distance(one, DecoderWeights::kAsInFile), kF32Bound);
  }
}

// Every width of the convolution, and every pattern of two kinds of layers.
TEST_P(DecoderOracleTest, EqualsTheOracleForEveryPatternOfRecurrentLayers) {
  SmallDecoder shape;
  for (const char* architecture : {"lfm2", "granitehybrid"}) {
    shape.architecture = architecture;
    for (const char* kinds : {"a", "ra", "ar", "rra", "arr", "raar", "rrrra"}) {
      SCOPED_TRACE(absl::StrCat(architecture, " ", kinds));
      shape.kinds = kinds;
      shape.layers = static_cast<int64_t>(shape.kinds.size());
      for (const int64_t width : {2, 3, 4}) {
        shape.conv_width = width;
        EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound) << width;
      }
    }
  }
}

// Every interval, heads of values for each head of keys, and widths of both.
TEST_P(DecoderOracleTest, EqualsTheOracleForEveryShapeOfDeltaNets) {
  struct Case {
    int64_t layers, interval, inner, heads, groups, state, width;
  };
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  shape.shared_ffn = 32;
  for (const Case& c : {Case{4, 4, 32, 4, 2, 12, 3},
                        {5, 3, 6, 6, 2, 5, 4},
                        {3, 2, 21, 3, 3, 7, 2},
                        {2, 2, 1, 1, 1, 1, 4},
                        {2, 1, 32, 4, 2, 12, 3},
                        {2, 2, 64, 4, 1, 32, 4}}) {
    SCOPED_TRACE(absl::StrCat(c.layers, " ", c.interval, " ", c.inner));
    shape.layers = c.layers;
    shape.attention_interval = c.interval;
    shape.ssm_inner = c.inner;
    shape.ssm_heads = c.heads;
    shape.ssm_groups = c.groups;
    shape.ssm_state = c.state;
    shape.conv_width = c.width;
    // Fewer tokens than a chunk, and more.
    for (const int64_t tokens : {7, 41}) {
      EXPECT_LE(Distance(shape, DecoderWeights::kF32, tokens), kF32Bound)
          << tokens;
    }
  }
}

TEST_P(DecoderOracleTest, EqualsTheOracleWithoutBiasesThatMayBe) {
  for (const char* architecture : {"glm4", "ernie4_5", "glm4moe"}) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.biases = false;
    EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
  }
}

// Layers 3 and 7 of 9 have no rotary positions. The bound is 4.5 times that of
// models of 2 layers.
TEST_P(DecoderOracleTest, EqualsTheOracleWithLayersWithoutPositions) {
  SmallDecoder shape;
  shape.architecture = "smollm3";
  shape.layers = 9;
  for (const auto type : {GgufTensorType::kF32, GgufTensorType::kQ8_0}) {
    shape.type = type;
    EXPECT_LE(Distance(shape, DecoderWeights::kF32), 4.5 * kF32Bound);
  }
}

// Windows shorter than, as long as and longer than the text, and a window that
// leaves a chunk of keys behind.
TEST_P(DecoderOracleTest, EqualsTheOracleForEveryWindow) {
  SmallDecoder shape;
  for (const char* architecture : {"phi3", "gemma2"}) {
    shape.architecture = architecture;
    for (const int64_t window : {1, 2, 8, 40, 41, 1000}) {
      shape.window = window;
      EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound) << window;
    }
  }
  shape.architecture = "phi3";
  shape.window = 0;
  EXPECT_LE(Distance(shape, DecoderWeights::kF32), kF32Bound);
  shape.architecture = "gemma2";
  shape.context = 300;
  shape.window = 20;
  shape.layers = 3;  // local, full, local
  EXPECT_LE(Distance(shape, DecoderWeights::kF32, 300), kF32Bound);
}

TEST_P(DecoderOracleTest, DividesByTheWidthOverHeadsInGemma2Of27B) {
  SmallDecoder shape;
  shape.architecture = "gemma2";
  shape.layers = 46;
  shape.hidden = 12;
  shape.q_heads = 3;
  shape.kv_heads = 1;
  shape.head_dim = shape.rope_dim = 8;
  shape.ffn = 10;
  // The bound is 23 times as large, because the model has 46 layers instead of
  // 2.
  EXPECT_LE(Distance(shape, DecoderWeights::kF32), 23 * kF32Bound);
}

// Layer 5 of 7 sees the whole text, with another rotary base and with scaled
// positions. The bound is 3.5 times that of models of 2 layers.
TEST_P(DecoderOracleTest, EqualsTheOracleWithGemma3sPatternOfLayers) {
  SmallDecoder shape;
  shape.architecture = "gemma3";
  shape.layers = 7;
  for (const float divisor : {1.0f, 8.0f}) {
    shape.rope_divisor = divisor;
    EXPECT_LE(Distance(shape, DecoderWeights::kF32), 3.5 * kF32Bound);
  }
  shape.layers = 62;  // the model of 27 billion weights
  shape.hidden = 12;
  shape.q_heads = 3;
  shape.kv_heads = 1;
  shape.head_dim = shape.rope_dim = 8;
  shape.ffn = 10;
  EXPECT_LE(Distance(shape, DecoderWeights::kF32), 31 * kF32Bound);
}

// For queries that a window hides nothing from, it must not change a bit.
TEST_P(DecoderOracleTest, AWindowHidesWhatIsBeforeIt) {
  const auto logits = [this](int64_t window) {
    TestRng rng;
    SmallDecoder shape;
    shape.architecture = "gemma2";
    shape.vocab = 41;
    shape.window = window;
    const Decoder model =
        Load(SmallDecoderFile(rng, shape), DecoderWeights::kBF16);
    DecoderState state = State(model, 16, DType::kBF16);
    // Every token differs from those before it, because a wrong window over
    // equal tokens would not show.
    std::vector<int32_t> tokens;
    for (int32_t t = 0; t < 41; ++t) tokens.push_back(t * 7 % 41);
    return Forward(state, {{*state.NewSequence(), tokens}}, inline_);
  };
  const Rows want = logits(1000);
  EXPECT_EQ(logits(41), want);
  for (const size_t window : {1, 9, 40}) {
    const Rows got = logits(static_cast<int64_t>(window));
    for (size_t t = 0; t < window; ++t) {
      EXPECT_EQ(got[t], want[t]) << window << " " << t;
    }
    for (size_t t = window; t < want.size(); ++t) {
      EXPECT_NE(got[t], want[t]) << window << " " << t;
    }
  }
}

QUERN_INSTANTIATE_ISA_TEST(DecoderOracleTest);

}  // namespace
}  // namespace quern
