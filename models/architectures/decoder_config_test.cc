// Files that DecoderConfig accepts and refuses.

#include "quern/models/architectures/decoder_config.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

// Applies `change` to the shape that the keys describe, and to the file. The
// tensors are those of a small Llama.
TEST(DecoderConfigTest, RefusesKeysAndTensorsThatDoNotAgree) {
  const SmallDecoder shape;
  const auto refuse = [&](auto&& change, absl::StatusCode code,
                          absl::string_view words) {
    TestRng rng;
    SmallDecoder changed = shape;
    GgufWriter unused;
    change(changed, unused);
    GgufWriter file = SmallDecoderKeys(changed);
    change(changed, file);
    AddSmallDecoderTensors(rng, shape, file);
    const std::string bytes = file.Finish();
    const auto config = DecoderConfig::Create(ParseOrDie(bytes));
    EXPECT_EQ(config.status().code(), code) << config.status();
    EXPECT_THAT(std::string(config.status().message()),
                HasSubstr(std::string(words)));
  };
  using Code = absl::StatusCode;
  refuse([](SmallDecoder& m, GgufWriter&) { m.context = 0; },
         Code::kInvalidArgument,
         "decoder: llama.context_length=0; need 1 <= llama.context_length");
  refuse([](SmallDecoder& m, GgufWriter&) { m.layers = 3; },
         Code::kInvalidArgument, "no tensor 'blk.2.attn_norm.weight'");
  refuse([](SmallDecoder& m, GgufWriter&) { m.layers = 1; },
         Code::kUnimplemented,
         "tensor 'blk.1.attn_norm.weight' is not part of a plain llama of 1");
  refuse([](SmallDecoder& m, GgufWriter&) { m.hidden = 33; },
         Code::kInvalidArgument,
         "token_embd.weight has dimensions [32, 37]; need [33, 37]");
  refuse([](SmallDecoder& m, GgufWriter&) { m.ffn = 95; },
         Code::kInvalidArgument,
         "blk.0.ffn_gate.weight has dimensions [32, 96]; need [32, 95]");
  refuse([](SmallDecoder& m, GgufWriter&) { m.kv_heads = 4; },
         Code::kInvalidArgument,
         "llama.attention.head_count=6; need a multiple of head_count_kv=4");
  refuse([](SmallDecoder& m, GgufWriter&) { m.vocab = 38; },
         Code::kInvalidArgument, "llama.vocab_size=38; need 37");
  refuse([](SmallDecoder& m, GgufWriter&) { m.rope_dim = 21; },
         Code::kInvalidArgument,
         "llama.rope.dimension_count=21; need an even number");
  refuse([](SmallDecoder& m, GgufWriter&) { m.rope_dim = 34; },
         Code::kInvalidArgument, "llama.rope.dimension_count=34; need 1 <=");
  refuse(
      [](SmallDecoder& m, GgufWriter& w) {
        m.architecture = "qwen3";
        w.Key("qwen3.expert_count", 8u);
      },
      Code::kUnimplemented, "qwen3.expert_count=8; need 0");
  refuse(
      [](SmallDecoder& m, GgufWriter&) {
        m.mixture = true;
        m.experts_used = 4;
      },
      Code::kInvalidArgument, "llama.expert_used_count=4; need 1 <= ");
  refuse(
      [](SmallDecoder& m, GgufWriter&) {
        m.mixture = true;
        m.experts = 1025;
      },
      Code::kInvalidArgument, "llama.expert_count=1025; need 1 <= ");
  refuse([](SmallDecoder& m, GgufWriter&) { m.mixture = true; },
         Code::kInvalidArgument, "no tensor 'blk.0.ffn_gate_inp.weight'");
  refuse([](SmallDecoder&,
            GgufWriter& w) { w.Key("llama.rope.scaling.type", "linear"); },
         Code::kUnimplemented, "llama.rope.scaling.type is 'linear'");
  refuse([](SmallDecoder&,
            GgufWriter& w) { w.Key("llama.rope.scale_linear", 2.0f); },
         Code::kUnimplemented, "llama.rope.scale_linear=2; need 1");
  refuse([](SmallDecoder&,
            GgufWriter& w) { w.Key("llama.rope.scaling.factor", 8.0f); },
         Code::kUnimplemented, "llama.rope.scaling.factor=8; need 1");
  refuse([](SmallDecoder&,
            GgufWriter& w) { w.Key("llama.rope.scale_linear", 2u); },
         Code::kInvalidArgument, "is of type u32; need f32");
  refuse(
      [](SmallDecoder&, GgufWriter& w) {
        w.Tensor("blk.0.attn_q.bias", {1}, GgufTensorType::kF32, Raw(0.0f));
      },
      Code::kUnimplemented, "tensor 'blk.0.attn_q.bias' is not part");
  refuse(
      [](SmallDecoder& m, GgufWriter&) {
        m.q_heads = m.kv_heads = 1 << 20;
        m.head_dim = 1 << 9;
      },
      Code::kInvalidArgument,
      "decoder: llama.attention.head_count * key_length=536870912; need 1 <= ");
  // Tensors of other architectures: surplus, missing, and of another shape.
  const auto zeros = [](GgufWriter& w, absl::string_view name, int64_t size) {
    w.Tensor(name, {static_cast<uint64_t>(size)}, GgufTensorType::kF32,
             std::string(static_cast<size_t>(4 * size), '\0'));
  };
  refuse([&](SmallDecoder&,
             GgufWriter& w) { zeros(w, "blk.0.attn_q_norm.weight", 32); },
         Code::kUnimplemented,
         "tensor 'blk.0.attn_q_norm.weight' is not part of a plain llama of 2");
  refuse([](SmallDecoder& m, GgufWriter&) { m.architecture = "qwen2"; },
         Code::kInvalidArgument, "no tensor 'blk.0.attn_q.bias'");
  refuse(
      [&](SmallDecoder& m, GgufWriter& w) {
        m.architecture = "qwen2";
        zeros(w, "blk.0.attn_q.bias", 31);
      },
      Code::kInvalidArgument,
      "blk.0.attn_q.bias has dimensions [31]; need [192]");
  refuse([](SmallDecoder& m, GgufWriter&) { m.architecture = "qwen3"; },
         Code::kInvalidArgument, "no tensor 'blk.0.attn_q_norm.weight'");
  refuse(
      [&](SmallDecoder& m, GgufWriter& w) {
        m.architecture = "qwen3";
        zeros(w, "blk.0.attn_q_norm.weight", 6 * 32);
      },
      Code::kInvalidArgument,
      "blk.0.attn_q_norm.weight has dimensions [192]; need [32]");
  refuse([](SmallDecoder& m, GgufWriter&) { m.architecture = "gemma2"; },
         Code::kInvalidArgument,
         "no tensor 'blk.0.post_attention_norm.weight'");
  refuse(
      [&](SmallDecoder& m, GgufWriter& w) {
        m.architecture = "gemma2";
        zeros(w, "blk.0.post_attention_norm.weight", 32);
        zeros(w, "blk.0.post_ffw_norm.weight", 31);
      },
      Code::kInvalidArgument,
      "blk.0.post_ffw_norm.weight has dimensions [31]; need [32]");
  refuse(
      [&](SmallDecoder& m, GgufWriter& w) {
        m.architecture = "gemma2";
        for (const char* name :
             {"blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight",
              "blk.1.post_attention_norm.weight",
              "blk.1.post_ffw_norm.weight"}) {
          zeros(w, name, 32);
        }
      },
      Code::kUnimplemented,
      "tensor 'output.weight' is not part of a plain gemma2 of 2 layers");
}

// The refusal of a wrong or missing tensor describes the file.
TEST(DecoderConfigTest, RefusalsOfTensorsSayWhatTheFileIs) {
  TestRng rng;
  SmallDecoder shape;
  shape.type = GgufTensorType::kQ8_0;
  const auto message = [&](auto&& change) {
    GgufWriter file = SmallDecoderKeys(shape);
    AddSmallDecoderTensors(rng, shape, file);
    change(file);
    const std::string bytes = file.Finish();
    return std::string(
        DecoderConfig::Create(ParseOrDie(bytes)).status().message());
  };
  // The names that a refusal lists are pinned below, in
  // RefusesOtherArchitecturesAndBadNumbers.
  const std::string file =
      "; the file is GGUF 3 of architecture 'llama', name 'small', tensors "
      "Q8_0 and F32; supported are " +
      ArchitectureNames("and") +
      " in F32, F16, BF16, Q2_K to Q8_0, IQ4_NL, IQ4_XS, TQ2_0 and "
      "MXFP4";
  EXPECT_EQ(
      message([](GgufWriter& w) {
        w.Tensor("blk.0.ffn_gate_inp.weight", {1}, GgufTensorType::kF32,
                 Raw(0.0f));
      }),
      "decoder: tensor 'blk.0.ffn_gate_inp.weight' is not part of a plain "
      "llama of 2 layers" +
          file);
  shape.layers = 3;
  GgufWriter claims = SmallDecoderKeys(shape);
  shape.layers = 2;
  AddSmallDecoderTensors(rng, shape, claims);
  const std::string bytes = claims.Finish();
  EXPECT_EQ(DecoderConfig::Create(ParseOrDie(bytes)).status().message(),
            "decoder: no tensor 'blk.2.attn_norm.weight'" + file);
}

TEST(DecoderConfigTest, ReadsFactorsOfRotaryFrequencies) {
  const auto create = [](const char* architecture, GgufTensorType type,
                         const std::vector<float>& factors) {
    TestRng rng;
    SmallDecoder shape;
    shape.architecture = architecture;
    GgufWriter file = SmallDecoderKeys(shape);
    AddSmallDecoderTensors(rng, shape, file);
    file.Tensor("rope_freqs.weight", {factors.size()}, type, BytesOf(factors));
    const std::string bytes = file.Finish();
    return DecoderConfig::Create(ParseOrDie(bytes));
  };
  constexpr auto kF32 = GgufTensorType::kF32;
  std::vector<float> factors(10, 2);  // rope_dim is 20
  factors[9] = 8;
  const auto config = create("llama", kF32, factors);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope_factors,
            std::vector<double>(factors.begin(), factors.end()));
  const auto message = [&](const char* architecture, GgufTensorType type) {
    return std::string(create(architecture, type, factors).status().message());
  };
  for (const float bad : {0.0f, -1.0f, std::nanf(""), HUGE_VALF}) {
    factors[3] = bad;
    EXPECT_THAT(message("llama", kF32), HasSubstr("rope_freqs.weight[3]="));
    EXPECT_THAT(message("llama", kF32), HasSubstr("need a finite number > 0"));
  }
  factors[3] = 1;
  EXPECT_EQ(message("llama", GgufTensorType::kF16),
            "decoder: rope_freqs.weight has type F16; need F32");
  EXPECT_THAT(message("qwen2", kF32),
              HasSubstr("tensor 'rope_freqs.weight' is not part of a plain "
                        "qwen2 of 2 layers"));
  factors.push_back(1);
  EXPECT_EQ(message("llama", kF32),
            "decoder: rope_freqs.weight has dimensions [11]; need [10]");
}

TEST(DecoderConfigTest, RefusesBadNumbersOfGemma2) {
  const auto expect = [](auto&& change, absl::string_view words) {
    SmallDecoder shape;
    shape.architecture = "gemma2";
    change(shape);
    const std::string bytes = SmallDecoderKeys(shape).Finish();
    const absl::Status status =
        DecoderConfig::Create(ParseOrDie(bytes)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(words)));
  };
  for (const float cap : {0.0f, -50.0f, std::nanf(""), HUGE_VALF}) {
    SCOPED_TRACE(cap);
    expect([&](SmallDecoder& m) { m.attention_cap = cap; },
           "decoder: gemma2.attn_logit_softcapping=");
    expect([&](SmallDecoder& m) { m.logit_cap = cap; },
           "decoder: gemma2.final_logit_softcapping=");
    expect([&](SmallDecoder& m) { m.logit_cap = cap; }, "; need a number > 0");
  }
  expect([](SmallDecoder& m) { m.window = 0; },
         "decoder: gemma2.attention.sliding_window=0; need 1 <= ");
  expect([](SmallDecoder& m) { m.window = (1 << 28) + 1; },
         "gemma2.attention.sliding_window=268435457; need 1 <= ");
}

// Only the keys of the file's own architecture count.
TEST(DecoderConfigTest, RefusesMissingKeys) {
  for (const char* missing :
       {"context_length", "embedding_length", "block_count",
        "feed_forward_length", "attention.head_count",
        "attention.layer_norm_rms_epsilon", "attn_logit_softcapping",
        "final_logit_softcapping", "attention.sliding_window"}) {
    GgufWriter w;
    w.Key("general.architecture", "gemma2");
    const auto key = [&](absl::string_view name, auto value) {
      w.Key(absl::StrCat(name == missing ? "llama." : "gemma2.", name), value);
    };
    key("context_length", 8u);
    key("embedding_length", 8u);
    key("block_count", 1u);
    key("feed_forward_length", 8u);
    key("attention.head_count", 1u);
    key("attention.layer_norm_rms_epsilon", 1e-6f);
    key("attn_logit_softcapping", 50.0f);
    key("final_logit_softcapping", 30.0f);
    key("attention.sliding_window", 4u);
    const std::string bytes = w.Finish();
    const absl::Status status =
        DecoderConfig::Create(ParseOrDie(bytes)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(status.message(),
              absl::StrCat("gguf: no key 'gemma2.", missing, "'"));
  }
}

TEST(DecoderConfigTest, TakesRotaryKeysThatScaleNothing) {
  const auto status = [](auto&& add_keys) {
    TestRng rng;
    GgufWriter file = SmallDecoderKeys(SmallDecoder());
    add_keys(file);
    AddSmallDecoderTensors(rng, SmallDecoder(), file);
    const std::string bytes = file.Finish();
    return DecoderConfig::Create(ParseOrDie(bytes)).status();
  };
  EXPECT_EQ(status([](GgufWriter& w) {
              w.Key("llama.rope.scale_linear", 1.0f)
                  .Key("llama.rope.scaling.factor", 0.0f);
            }),
            absl::OkStatus());
  EXPECT_EQ(status([](GgufWriter& w) {
              w.Key("llama.rope.scaling.type", "none")
                  .Key("llama.rope.scaling.factor", 8.0f);
            }),
            absl::OkStatus());
}

// The layers that predict more tokens at once are left out, whatever tensors
// they have.
TEST(DecoderConfigTest, LayersThatPredictAreNotRead) {
  for (const char* architecture : {"llama", "qwen3next", "deepseek2"}) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.predicting_layers = 2;
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const auto config = DecoderConfig::Create(ParseOrDie(bytes));
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->layers, shape.layers);
    EXPECT_EQ(config->predicting_layers, 2);
  }
  SmallDecoder shape;
  const auto message = [&](uint32_t count, const std::string& tensor) {
    TestRng rng;
    GgufWriter w = SmallDecoderKeys(shape);
    w.Key("llama.nextn_predict_layers", count);
    AddSmallDecoderTensors(rng, shape, w);
    w.Tensor(tensor, {1}, GgufTensorType::kF32, BytesOf<float>({1}));
    const std::string bytes = w.Finish();
    return std::string(
        DecoderConfig::Create(ParseOrDie(bytes)).status().message());
  };
  EXPECT_THAT(message(2, "x"),
              HasSubstr("decoder: llama.nextn_predict_layers=2; need 0 <= "
                        "llama.nextn_predict_layers <= 1"));
  // One of two layers is left out; the others' numbers do not exist.
  EXPECT_EQ(message(1, "blk.1.nextn.x"), "");
  for (const char* name :
       {"blk.0.x", "blk.2.x", "blk.1x", "blk.", "blk.01.x"}) {
    EXPECT_EQ(message(1, name).empty(), std::string(name) == "blk.01.x")
        << name;
  }
}

// Keys that change what a model computes are refused, not ignored.
TEST(DecoderConfigTest, RefusesKeysOfWhatItDoesNotCompute) {
  const auto status = [](const char* architecture, auto&& add_key) {
    SmallDecoder shape;
    shape.architecture = architecture;
    TestRng rng;
    GgufWriter w = SmallDecoderKeys(shape);
    add_key(w);
    AddSmallDecoderTensors(rng, shape, w);
    const std::string bytes = w.Finish();
    return DecoderConfig::Create(ParseOrDie(bytes)).status();
  };
  const auto refuse = [&](const char* architecture, const char* words,
                          auto&& add_key) {
    const absl::Status refused = status(architecture, add_key);
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(words));
  };
  for (const char* architecture : {"llama", "qwen2", "qwen3next"}) {
    const std::string causal = absl::StrCat(architecture, ".attention.causal");
    refuse(architecture,
           "attention.causal is false; need true, because a token sees no",
           [&](GgufWriter& w) { w.Key(causal, false); });
    EXPECT_TRUE(
        status(architecture, [&](GgufWriter& w) { w.Key(causal, true); }).ok());
  }
  refuse("lfm2",
         "lfm2.attention.sliding_window=128; need 0, because every layer",
         [](GgufWriter& w) { w.Key("lfm2.attention.sliding_window", 128u); });
  EXPECT_TRUE(status("lfm2", [](GgufWriter& w) {
                w.Key("lfm2.attention.sliding_window", 0u);
              }).ok());
  refuse("gemma3", "gemma3.attention.sliding_window_pattern=4; need 6",
         [](GgufWriter& w) {
           w.Key("gemma3.attention.sliding_window_pattern", 4u);
         });
  refuse("gemma3", "gemma3.final_logit_softcapping=30; need 0, because logits",
         [](GgufWriter& w) { w.Key("gemma3.final_logit_softcapping", 30.0f); });
  refuse("gemma3", "gemma3.attn_logit_softcapping=50; need 0, because scores",
         [](GgufWriter& w) { w.Key("gemma3.attn_logit_softcapping", 50.0f); });
  refuse("gemma3", "gemma3.rope.scaling.type is 'yarn'; need 'none'",
         [](GgufWriter& w) { w.Key("gemma3.rope.scaling.type", "yarn"); });
  refuse("phi3", "phi3.rope.scaling.type is 'longrope'; need 'none'",
         [](GgufWriter& w) { w.Key("phi3.rope.scaling.type", "longrope"); });
  refuse("phi3", "phi3.rope.scaling.attn_factor=1.19; need 1",
         [](GgufWriter& w) { w.Key("phi3.rope.scaling.attn_factor", 1.19f); });
  refuse("phi3",
         "tensor 'rope_factors_long.weight' is not part of a plain phi3",
         [](GgufWriter& w) {
           w.Tensor("rope_factors_long.weight", {1}, GgufTensorType::kF32,
                    BytesOf<float>({1}));
         });
  refuse(
      "exaone4", "exaone4.attention.sliding_window=4096; need 0, because",
      [](GgufWriter& w) { w.Key("exaone4.attention.sliding_window", 4096u); });
  refuse("olmo2", "olmo2.attention.sliding_window=4096; need 0, because every",
         [](GgufWriter& w) { w.Key("olmo2.attention.sliding_window", 4096u); });
  refuse("gemma2", "gemma2.attention.sliding_window_pattern=6; need 2",
         [](GgufWriter& w) {
           w.Key("gemma2.attention.sliding_window_pattern", 6u);
         });
}

TEST(DecoderConfigTest, WeightsOfExpertsSumToOneInLfm2Moe) {
  SmallDecoder shape;
  shape.architecture = "lfm2moe";
  TestRng rng;
  std::string bytes = SmallDecoderFile(rng, shape);
  const auto config = DecoderConfig::Create(ParseOrDie(bytes));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->experts_sum_to_one);
  const std::string key = "lfm2moe.expert_weights_norm";
  // The key's name is followed by its type (u32), then by the value.
  bytes[bytes.find(key) + key.size() + 4] = 0;
  EXPECT_THAT(
      std::string(DecoderConfig::Create(ParseOrDie(bytes)).status().message()),
      HasSubstr("lfm2moe.expert_weights_norm is false; need true, because"));
}

TEST(DecoderConfigTest, RefusesOtherArchitecturesAndBadNumbers) {
  const auto message = [](GgufWriter& writer) {
    const std::string bytes = writer.Finish();
    return std::string(
        DecoderConfig::Create(ParseOrDie(bytes)).status().message());
  };
  GgufWriter none;
  EXPECT_EQ(message(none), "gguf: no key 'general.architecture'");
  GgufWriter other;
  other.Key("general.architecture", "gpt2");
  const std::vector<std::string> names = {
      "'llama'",         "'qwen2'",         "'qwen2vl'",  "'qwen2moe'",
      "'qwen3'",         "'qwen3moe'",      "'qwen3vl'",  "'qwen3vlmoe'",
      "'gemma2'",        "'gemma3'",        "'olmo2'",    "'olmoe'",
      "'exaone4'",       "'smollm3'",       "'phi3'",     "'glm4'",
      "'glm4moe'",       "'hunyuan-dense'", "'ernie4_5'", "'seed_oss'",
      "'lfm2'",          "'lfm2moe'",       "'granite'",  "'granitemoe'",
      "'granitehybrid'", "'deepseek2'",     "'gpt-oss'"};
  EXPECT_EQ(message(other),
            absl::StrCat("decoder: general.architecture is 'gpt2'; need ",
                         absl::StrJoin(names, ", "), " or 'qwen3next'"));
  for (const float eps : {0.0f, -1.0f, std::nanf(""), HUGE_VALF}) {
    GgufWriter writer;
    writer.Key("general.architecture", "llama")
        .Key("llama.context_length", 8u)
        .Key("llama.embedding_length", 8u)
        .Key("llama.block_count", 1u)
        .Key("llama.feed_forward_length", 8u)
        .Key("llama.attention.head_count", 1u)
        .Key("llama.attention.layer_norm_rms_epsilon", eps);
    EXPECT_THAT(message(writer), HasSubstr("need a number > 0")) << eps;
  }
}

}  // namespace
}  // namespace quern
