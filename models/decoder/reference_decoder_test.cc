// Proves that the models of decoder_oracle_test.cc are sensitive: an oracle
// without one of an architecture's differences is far off.

#include <cmath>
#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_decoder_testutil.h"
#include "quern/models/testing/reference_form_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"

namespace quern {
namespace {

// Twice the bound of rows of bf16 there.
constexpr double kFelt = 0.25;

TEST(ReferenceDecoderTest, EachDifferenceIsFelt) {
  const auto distance = [](const char* architecture, auto&& change,
                           int64_t layers = 2) {
    TestRng rng;
    SmallDecoder shape;
    shape.rope_factors = std::string(architecture) == "llama";
    shape.architecture = architecture;
    shape.layers = layers;
    shape.mixture = shape.architecture == "granitehybrid";
    shape.shared_ffn = 96;
    shape.yarn = shape.architecture == "gpt-oss";
    if (shape.architecture == "qwen2moe" || shape.architecture == "olmoe") {
      shape.experts = 7;
    }
    if (shape.architecture == "lfm2moe" || shape.architecture == "glm4moe") {
      shape.experts = 7;
      shape.experts_used = 2;
      shape.gating = DecoderConfig::kSigmoid;
    }
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto c = DecoderConfig::Create(file);
    EXPECT_TRUE(c.ok()) << c.status();
    const auto tokens = RandomTokens(rng, 41, shape.vocab);
    ReferenceForm form = ReferenceForm::Of(file, *c);
    change(form);
    const double difference =
        LargestDifferenceOf(ReferenceDecoder(file, *c, form).Logits(tokens),
                            ReferenceDecoder(file, *c).Logits(tokens));
    EXPECT_TRUE(std::isfinite(difference)) << architecture;
    return difference;
  };
  using Form = ReferenceForm;
  EXPECT_GT(distance("qwen2", [](Form& f) { f.q_bias = false; }), kFelt);
  EXPECT_GT(distance("qwen2", [](Form& f) { f.k_bias = false; }), kFelt);
  EXPECT_GT(distance("qwen2", [](Form& f) { f.v_bias = false; }), kFelt);
  EXPECT_GT(distance("qwen2", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("seed_oss", [](Form& f) { f.q_bias = false; }), kFelt);
  EXPECT_GT(distance("seed_oss", [](Form& f) { f.v_bias = false; }), kFelt);
  EXPECT_GT(distance("seed_oss", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("qwen2vl", [](Form& f) { f.k_bias = false; }), kFelt);
  EXPECT_GT(distance("qwen3vl", [](Form& f) { f.k_norm = false; }), kFelt);
  EXPECT_GT(distance("qwen3vlmoe", [](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(distance("qwen3", [](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(distance("qwen3", [](Form& f) { f.k_norm = false; }), kFelt);
  const auto mixture = [&](auto&& change) {
    EXPECT_GT(distance("lfm2moe", change), kFelt);
  };
  mixture([](Form& f) { f.sigmoid_scores = false; });
  mixture([](Form& f) { f.router_bias = false; });
  mixture([](Form& f) { f.expert_scale = 1; });
  mixture([](Form& f) { f.experts_used = 3; });
  mixture([](Form& f) { f.k_norm = false; });
  mixture([](Form& f) { f.conv_taps = 1; });
  EXPECT_GT(distance("lfm2", [](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(distance("lfm2", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("lfm2", [](Form& f) { f.conv_taps = 1; }), kFelt);
  EXPECT_GT(distance("lfm2", [](Form& f) { f.conv_taps = 2; }), kFelt);
  EXPECT_GT(distance("lfm2", [](Form& f) { f.gates = {1, 0, 2}; }), kFelt);
  EXPECT_GT(distance("lfm2", [](Form& f) { f.gates = {0, 2, 1}; }), kFelt);
  const auto hybrid = [&](auto&& change) {
    return distance("granitehybrid", change);
  };
  EXPECT_GT(hybrid([](Form& f) { f.shared_expert = false; }), kFelt);
  EXPECT_GT(hybrid([](Form& f) { f.conv_taps = 1; }), kFelt);
  EXPECT_GT(hybrid([](Form& f) { f.ssm_groups = 1; }), kFelt);
  EXPECT_GT(hybrid([](Form& f) { f.ssm_skip = false; }), kFelt);
  for (const char* granite : {"granite", "granitemoe", "granitehybrid"}) {
    SCOPED_TRACE(granite);
    const auto felt = [&](auto&& change) {
      EXPECT_GT(distance(granite, change), kFelt);
    };
    felt([](Form& f) { f.rope = false; });
    felt([](Form& f) { f.rope_pairs = false; });
    felt([](Form& f) { f.embedding_scale = 1; });
    felt([](Form& f) { f.residual_scale = 1; });
    felt([](Form& f) { f.divisor = std::sqrt(32.0); });
    felt([](Form& f) { f.logit_divisor = 1; });
  }
  EXPECT_GT(distance("granitemoe", [](Form& f) { f.shared_expert = false; }),
            kFelt);
  const auto next = [&](auto&& change) {
    return distance("qwen3next", change);
  };
  EXPECT_GT(next([](Form& f) { f.query_gates = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.gates_by_turns = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.betas_by_turns = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.key_heads = 1; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.shared_gate = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.shared_expert = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.conv_taps = 1; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.k_norm = false; }), kFelt);
  EXPECT_GT(next([](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("qwen3", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("qwen3moe", [](Form& f) { f.experts_used = 2; }), kFelt);
  EXPECT_GT(distance("qwen3moe", [](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(distance(
                "smollm3", [](Form& f) { f.rope_gap = 0; }, 4),
            kFelt);
  EXPECT_GT(distance(
                "smollm3", [](Form& f) { f.rope_gap = 3; }, 4),
            kFelt);
  EXPECT_GT(distance("smollm3", [](Form& f) { f.rope_pairs = false; }), kFelt);
  EXPECT_GT(distance("phi3", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("phi3", [](Form& f) { f.window = 0; }), kFelt);
  EXPECT_GT(distance("phi3", [](Form& f) { f.window_interval = 2; }), kFelt);
  const auto gemma3 = [&](auto&& change) {
    return distance("gemma3", change, 7);
  };
  EXPECT_GT(gemma3([](Form& f) { f.q_norm = false; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.k_norm = false; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.window = 0; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.window_interval = 0; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.window_interval = 5; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.local_base = 0; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.rope_divisor = 8; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.gelu = false; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.embedding_scale = 1; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.post_attention_norm = false; }), kFelt);
  EXPECT_GT(gemma3([](Form& f) { f.post_ffw_norm = false; }), kFelt);
  EXPECT_GT(distance(
                "gemma3", [](Form& f) { f.divisor = std::sqrt(32.0); }, 62),
            kFelt);
  EXPECT_GT(distance("ernie4_5", [](Form& f) { f.k_bias = false; }), kFelt);
  EXPECT_GT(distance("ernie4_5", [](Form& f) { f.rope_pairs = false; }), kFelt);
  const auto glm = [&](auto&& change) { return distance("glm4", change); };
  EXPECT_GT(glm([](Form& f) { f.q_bias = false; }), kFelt);
  EXPECT_GT(glm([](Form& f) { f.k_bias = false; }), kFelt);
  EXPECT_GT(glm([](Form& f) { f.v_bias = false; }), kFelt);
  EXPECT_GT(glm([](Form& f) { f.post_attention_norm = false; }), kFelt);
  EXPECT_GT(glm([](Form& f) { f.post_ffw_norm = false; }), kFelt);
  EXPECT_GT(glm([](Form& f) { f.rope_pairs = false; }), kFelt);
  for (const char* bare : {"olmo2", "exaone4"}) {
    SCOPED_TRACE(bare);
    const auto felt = [&](auto&& change) {
      EXPECT_GT(distance(bare, change), kFelt);
    };
    felt([](Form& f) { f.q_norm = false; });
    felt([](Form& f) { f.k_norm = false; });
    felt([](Form& f) { f.post_attention_norm = false; });
    felt([](Form& f) { f.post_ffw_norm = false; });
    felt([](Form& f) { f.rope_pairs = true; });
  }
  EXPECT_GT(distance("hunyuan-dense", [](Form& f) { f.late_norms = false; }),
            kFelt);
  EXPECT_GT(distance("hunyuan-dense", [](Form& f) { f.q_norm = false; }),
            kFelt);
  EXPECT_GT(distance("hunyuan-dense", [](Form& f) { f.rope_pairs = true; }),
            kFelt);
  for (const char* shares : {"qwen2moe", "olmoe"}) {
    SCOPED_TRACE(shares);
    EXPECT_GT(distance(shares, [](Form& f) { f.renormalize = true; }), kFelt);
    EXPECT_GT(distance(shares, [](Form& f) { f.experts_used = 1; }), kFelt);
    EXPECT_GT(distance(shares, [](Form& f) { f.rope_pairs = true; }), kFelt);
  }
  EXPECT_GT(distance("olmoe", [](Form& f) { f.k_norm = false; }), kFelt);
  EXPECT_GT(distance("qwen2moe", [](Form& f) { f.q_bias = false; }), kFelt);
  EXPECT_GT(distance("qwen2moe", [](Form& f) { f.shared_gate = false; }),
            kFelt);
  EXPECT_GT(distance("qwen2moe", [](Form& f) { f.shared_expert = false; }),
            kFelt);
  const auto glm_moe = [&](auto&& change) {
    EXPECT_GT(distance("glm4moe", change), kFelt);
  };
  glm_moe([](Form& f) { f.sigmoid_scores = false; });
  glm_moe([](Form& f) { f.router_bias = false; });
  glm_moe([](Form& f) { f.expert_scale = 1; });
  glm_moe([](Form& f) { f.shared_expert = false; });
  glm_moe([](Form& f) { f.k_norm = false; });
  glm_moe([](Form& f) { f.v_bias = false; });
  glm_moe([](Form& f) { f.rope_pairs = true; });
  const auto oss = [&](auto&& change) {
    EXPECT_GT(distance("gpt-oss", change), kFelt);
  };
  oss([](Form& f) { f.sinks = false; });
  oss([](Form& f) { f.output_bias = false; });
  oss([](Form& f) { f.logit_bias = false; });
  oss([](Form& f) { f.expert_bias = false; });
  oss([](Form& f) { f.swiglu_oai = false; });
  oss([](Form& f) { f.window = 0; });
  oss([](Form& f) { f.window_interval = 0; });
  oss([](Form& f) { f.k_bias = false; });
  oss([](Form& f) { f.experts_used = 2; });
  oss([](Form& f) { f.yarn_factor = 0; });
  // Where YaRN's range ends changes the angles of few pairs.
  EXPECT_GT(distance("gpt-oss", [](Form& f) { f.yarn_truncates = true; }),
            kFelt / 10);
  oss([](Form& f) { f.rope_pairs = true; });
  EXPECT_GT(distance("llama", [](Form& f) { f.rope_pairs = false; }), kFelt);
  EXPECT_GT(distance("llama", [](Form& f) { f.rope_factors.clear(); }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.rope_pairs = true; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.post_attention_norm = false; }),
            kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.post_ffw_norm = false; }),
            kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.gelu = false; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.embedding_scale = 1; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.attention_cap = 0; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.logit_cap = 0; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.window = 0; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.window += 1; }), kFelt);
  EXPECT_GT(distance("gemma2", [](Form& f) { f.window_interval = 0; }), kFelt);
  EXPECT_GT(distance(
                "gemma2", [](Form& f) { f.divisor = std::sqrt(32.0); }, 46),
            kFelt);
}

}  // namespace
}  // namespace quern
