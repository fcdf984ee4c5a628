// What DeepSeek's files say, and which of them are refused.

#include <cstdint>
#include <string>
#include <tuple>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

SmallDecoder Latent() {
  SmallDecoder shape;
  shape.architecture = "deepseek2";
  return shape;
}

absl::StatusOr<DecoderConfig> Create(
    const SmallDecoder& shape,
    absl::FunctionRef<void(GgufWriter& w)> more = [](GgufWriter&) {}) {
  TestRng rng;
  GgufWriter w = SmallDecoderKeys(shape);
  more(w);
  AddSmallDecoderTensors(rng, shape, w);
  const std::string bytes = w.Finish();
  return DecoderConfig::Create(ParseOrDie(bytes));
}

TEST(DeepseekConfigTest, ReadsWhatTheFileSays) {
  SmallDecoder shape = Latent();
  shape.yarn = shape.split_kv_b = shape.router_bias = true;
  shape.q_lora = 24;
  shape.layers = 4;
  shape.leading_dense = 3;
  shape.gating = DecoderConfig::kSigmoid;
  const auto c = Create(shape);
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_EQ(c->head_dim, 32);
  EXPECT_EQ(c->value_dim, 16);
  EXPECT_EQ(c->nope(), 12);
  EXPECT_EQ(c->kv_lora, 32);
  EXPECT_EQ(c->q_lora, 24);
  EXPECT_EQ(c->leading_dense, 3);
  EXPECT_EQ(c->shared_ffn, 2 * 64);
  EXPECT_EQ(c->gating, 2);
  EXPECT_FALSE(c->experts_sum_to_one);
  EXPECT_EQ(c->expert_scale, 1.3f);
  EXPECT_EQ(c->yarn_factor, 8.0f);
  EXPECT_EQ(c->yarn_original, 64);
  EXPECT_EQ(c->yarn_log_mul, 0.07f);
  for (int64_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(c->LayerHas(layer, ModelPart::kDense), layer < 3);
    EXPECT_EQ(c->LayerHas(layer, ModelPart::kExperts), layer == 3);
    EXPECT_EQ(c->LayerHas(layer, ModelPart::kRouterBias), layer == 3);
    EXPECT_FALSE(c->LayerHas(layer, ModelPart::kAttention));
  }
  const auto plain = Create(Latent());
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(plain->Has(ModelPart::kYarn));
  EXPECT_FALSE(plain->Has(ModelPart::kQueryLora));
  EXPECT_FALSE(plain->Has(ModelPart::kRouterBias));
  EXPECT_TRUE(plain->Has(ModelPart::kJoinedKvB));
}

TEST(DeepseekConfigTest, RefusesShapes) {
  using Code = absl::StatusCode;
  const struct {
    void (*spoil)(SmallDecoder&);
    Code code;
    const char* words;
  } kCases[] = {
      {[](SmallDecoder& m) { m.rope_dim = 32; }, Code::kInvalidArgument,
       "deepseek2.rope.dimension_count=32; need less than the 32 elements"},
      {[](SmallDecoder& m) { m.rope_dim = 7; }, Code::kInvalidArgument,
       "rope.dimension_count=7; need an even number"},
      {[](SmallDecoder& m) { m.kv_lora = 30; }, Code::kUnimplemented,
       "deepseek2.attention.kv_lora_rank=30; need a multiple of 4"},
      {[](SmallDecoder& m) { m.kv_lora = 0; }, Code::kInvalidArgument,
       "attention.kv_lora_rank=0; need 1"},
      {[](SmallDecoder& m) { m.leading_dense = 2; }, Code::kInvalidArgument,
       "leading_dense_block_count=2; need 0 <= "},
      {[](SmallDecoder& m) { m.leading_dense = -1; }, Code::kInvalidArgument,
       "leading_dense_block_count="},
      {[](SmallDecoder& m) { m.gating = 3; }, Code::kInvalidArgument,
       "expert_gating_func=3; need 1 <= "},
      {[](SmallDecoder& m) { m.expert_scale = 0; }, Code::kInvalidArgument,
       "expert_weights_scale=0; need a number > 0"},
      {[](SmallDecoder& m) { m.yarn = true, m.yarn_factor = 0; },
       Code::kInvalidArgument, "rope.scaling.factor=0; need a number > 0"},
      {[](SmallDecoder& m) { m.yarn = true, m.yarn_original = 1; },
       Code::kInvalidArgument, "original_context_length=1; need 2 <= "},
      {[](SmallDecoder& m) { m.yarn = true, m.yarn_factor = 0.5f; },
       Code::kInvalidArgument,
       "deepseek2.rope.scaling.factor=0.5; need 1 <= factor <= 1e+06"},
      {[](SmallDecoder& m) { m.yarn = true, m.yarn_factor = 2e6f; },
       Code::kInvalidArgument, "deepseek2.rope.scaling.factor=2e+06; need 1"},
      {[](SmallDecoder& m) { m.yarn = true, m.yarn_log_mul = 3e38f; },
       Code::kInvalidArgument,
       "deepseek2.rope.scaling.yarn_log_multiplier=3e+38; need at most 1"},
      {[](SmallDecoder& m) {
         m.split_kv_b = true;
         m.dropped_key = "deepseek2.attention.value_length_mla";
       },
       Code::kInvalidArgument, "deepseek2.attention.value_length_mla"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.words);
    SmallDecoder shape = Latent();
    c.spoil(shape);
    // Keys are checked before tensors, of which there are none.
    const std::string bytes = SmallDecoderKeys(shape).Finish();
    const absl::Status status =
        DecoderConfig::Create(ParseOrDie(bytes)).status();
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.words));
  }
}

// What is checked is the number that is used, whatever another key says.
TEST(DeepseekConfigTest, TheColumnsOfSharedExpertsFollowFromTheirNumber) {
  constexpr char kKey[] = "deepseek2.expert_shared_feed_forward_length";
  const auto config = Create(Latent(), [&](GgufWriter& w) { w.Key(kKey, 1u); });
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->shared_ffn, 2 * 64);
  SmallDecoder huge = Latent();
  huge.expert_ffn = 1 << 27;
  huge.shared_experts = 4;
  GgufWriter w = SmallDecoderKeys(huge);
  w.Key(kKey, 1u);
  const std::string bytes = w.Finish();
  const absl::Status status = DecoderConfig::Create(ParseOrDie(bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("deepseek2.expert_feed_forward_length * shared "
                        "experts=536870912; need 0 <= "));
}

TEST(DeepseekConfigTest, RefusesWhatIsNotThere) {
  const auto refuse = [](const SmallDecoder& shape, const char* words,
                         absl::FunctionRef<void(GgufWriter & w)> more) {
    const absl::Status status = Create(shape, more).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  refuse(Latent(), "deepseek2.expert_group_count=8; need 1",
         [](GgufWriter& w) { w.Key("deepseek2.expert_group_count", 8u); });
  refuse(Latent(), "rope.scaling.type is 'linear'; need 'none'",
         [](GgufWriter& w) { w.Key("deepseek2.rope.scaling.type", "linear"); });
  SmallDecoder yarn = Latent();
  yarn.yarn = true;
  refuse(yarn, "rope.scaling.yarn_beta_fast=16; need 32", [](GgufWriter& w) {
    w.Key("deepseek2.rope.scaling.yarn_beta_fast", 16.0f);
  });
  refuse(Latent(), "deepseek2.attention.temperature_scale=0.1; need 0",
         [](GgufWriter& w) {
           w.Key("deepseek2.attention.temperature_scale", 0.1f);
         });
  refuse(Latent(), "deepseek2.attention.temperature_length=8192; need 0",
         [](GgufWriter& w) {
           w.Key("deepseek2.attention.temperature_length", 8192u);
         });
  refuse(
      yarn, "deepseek2.rope.scaling.attn_factor=0.5; need 1",
      [](GgufWriter& w) { w.Key("deepseek2.rope.scaling.attn_factor", 0.5f); });
  SmallDecoder llama;
  refuse(llama, "llama.rope.scaling.attn_factor=0.5; need 1",
         [](GgufWriter& w) {
           w.Key("llama.rope.scaling.type", "none");
           w.Key("llama.rope.scaling.attn_factor", 0.5f);
         });
  SmallDecoder gemma2;
  gemma2.architecture = "gemma2";
  refuse(gemma2, "gemma2.rope.scaling.type is 'yarn'; need 'none'",
         [](GgufWriter& w) { w.Key("gemma2.rope.scaling.type", "yarn"); });
}

TEST(DeepseekConfigTest, KeysThatChangeNothingAreAccepted) {
  const absl::Status status =
      Create(Latent(), [](GgufWriter& w) {
        w.Key("deepseek2.attention.temperature_scale", 0.0f);
        w.Key("deepseek2.attention.temperature_length", 0u);
        w.Key("deepseek2.rope.scaling.attn_factor", 1.0f);
      }).status();
  EXPECT_TRUE(status.ok()) << status;
}

// Softmax where no key says it, but for experts with biases.
TEST(DeepseekConfigTest, BiasesNeedAKeyThatSaysHowExpertsAreScored) {
  SmallDecoder shape = Latent();
  shape.dropped_key = "deepseek2.expert_gating_func";
  const auto plain = Create(shape);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->gating, DecoderConfig::kSoftmax);
  shape.router_bias = true;
  const absl::Status status = Create(shape).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("decoder: no key 'deepseek2.expert_gating_func'; need 1"));
}

// DeepSeek-V2 and V3 have 160 and 256 experts in 8 groups, and older files do
// not say so.
TEST(DeepseekConfigTest, GroupsOfExpertsMayBeUnnamedInSmallModelsAlone) {
  SmallDecoder shape = Latent();
  for (const auto& [experts, groups, ok] : {std::tuple{64, -1, true},
                                            {65, -1, false},
                                            {160, -1, false},
                                            {256, -1, false},
                                            {64, 0, true},
                                            {64, 1, true},
                                            {160, 0, true},
                                            {256, 1, true},
                                            {64, 2, false},
                                            {160, 8, false}}) {
    SCOPED_TRACE(experts);
    SCOPED_TRACE(groups);
    shape.experts = experts;
    const absl::Status status =
        Create(shape, [g = groups](GgufWriter& w) {
          if (g < 0) return;
          w.Key("deepseek2.expert_group_count", static_cast<uint32_t>(g));
        }).status();
    EXPECT_EQ(status.code(),
              ok ? absl::StatusCode::kOk : absl::StatusCode::kUnimplemented)
        << status;
    if (ok) continue;
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(groups < 0
                      ? absl::StrCat("deepseek2.expert_count=", experts,
                                     " without deepseek2.expert_group_count")
                      : absl::StrCat("deepseek2.expert_group_count=", groups,
                                     "; need 1")));
  }
}

// The first layer without a tensor that other layers have is named.
TEST(DeepseekConfigTest, NamesAMissingTensor) {
  SmallDecoder shape = Latent();
  shape.layers = 4;
  shape.router_bias = true;
  for (const char* tensor :
       {"exp_probs_b.bias", "ffn_gate_inp.weight", "ffn_up_exps.weight",
        "ffn_down_shexp.weight", "attn_kv_a_mqa.weight",
        "attn_kv_a_norm.weight", "attn_kv_b.weight"}) {
    for (const int layer : {1, 2, 3}) {
      shape.dropped = absl::StrCat("blk.", layer, ".", tensor);
      SCOPED_TRACE(shape.dropped);
      const absl::Status status = Create(shape).status();
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("'", shape.dropped, "'")));
    }
  }
}

// The bias of the only layer with experts is missed where scores are sigmoids.
TEST(DeepseekConfigTest, SigmoidsNeedABias) {
  SmallDecoder shape = Latent();
  shape.gating = DecoderConfig::kSigmoid;
  EXPECT_TRUE(Create(shape).ok());
  shape.dropped = "blk.1.exp_probs_b.bias";
  const absl::Status status = Create(shape).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no tensor 'blk.1.exp_probs_b.bias'"));
}

TEST(DeepseekConfigTest, RefusesRanks) {
  TestRng rng;
  const std::string bytes = SmallDecoderFile(rng, Latent());
  RunRanks(2, [&](ThreadCommunicator& ranks) {
    DecoderOptions options;
    options.communicator = &ranks;
    InlineExecutor executor;
    const absl::Status status =
        Decoder::Create(ParseOrDie(bytes), options, executor).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("ranks=2; need 1, because deepseek2 attends to"));
  });
}

}  // namespace
}  // namespace quern
