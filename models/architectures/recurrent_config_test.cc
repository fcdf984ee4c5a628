// Which layers of a file are recurrent.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

using HeadsKey =
    absl::FunctionRef<void(const std::string& name, GgufWriter& writer)>;

// The config of a file of this shape, whose head_count_kv `heads_key` writes.
absl::StatusOr<DecoderConfig> Create(const SmallDecoder& shape,
                                     HeadsKey heads_key) {
  TestRng rng;
  GgufWriter w;
  w.Key("general.architecture", shape.architecture.c_str());
  WriteModelKeys(
      SmallDecoderConfig(shape),
      [&](const std::string& name, int64_t value) {
        if (name == shape.architecture + ".block_count") {
          value += shape.predicting_layers;
        }
        w.Key(name, static_cast<uint32_t>(value));
      },
      [&w](const std::string& name, float value) { w.Key(name, value); },
      [&w](const std::string& name, bool value) { w.Key(name, value); },
      [&](const std::string& name, const std::vector<int32_t>&) {
        heads_key(name, w);
      });
  AddSmallDecoderTensors(rng, shape, w);
  const std::string bytes = w.Finish();
  return DecoderConfig::Create(ParseOrDie(bytes));
}

absl::StatusOr<DecoderConfig> Create(const SmallDecoder& shape,
                                     const std::vector<int32_t>& heads) {
  return Create(shape, [&](const std::string& name, GgufWriter& w) {
    EXPECT_EQ(name, "lfm2.attention.head_count_kv");
    w.Key(name, heads);
  });
}

SmallDecoder ThreeLayers() {
  SmallDecoder shape;
  shape.architecture = "lfm2";
  shape.layers = 3;
  shape.kinds = "rar";
  return shape;
}

TEST(RecurrentConfigTest, TheNumbersOfHeadsTellWhichLayersAreRecurrent) {
  const auto config = Create(ThreeLayers(), {0, 2, 0});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->HasRecurrent());
  EXPECT_EQ(config->recurrent, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(config->kv_heads, 2);
  EXPECT_EQ(config->conv_width, 3);
  SmallDecoder llama;
  EXPECT_FALSE(SmallDecoderConfig(llama).HasRecurrent());
  EXPECT_TRUE(SmallDecoderConfig(llama).recurrent.empty());
}

// The array has numbers for the layers that predict more tokens, too.
TEST(RecurrentConfigTest, LayersThatPredictAreLeftOut) {
  SmallDecoder shape = ThreeLayers();
  shape.predicting_layers = 1;
  const auto heads = [](const std::vector<int32_t>& values) {
    return [values](const std::string& name, GgufWriter& w) {
      w.Key(name, values);
      w.Key("lfm2.nextn_predict_layers", 1u);
    };
  };
  const auto config = Create(shape, heads({0, 2, 0, 2}));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layers, 3);
  EXPECT_EQ(config->recurrent, (std::vector<uint8_t>{1, 0, 1}));
  // The number of a layer that is not read may be any.
  EXPECT_TRUE(Create(shape, heads({0, 2, 0, 4})).ok());
  const absl::Status status = Create(shape, heads({0, 2, 0})).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("head_count_kv=3; need 4, as there are layers"));
}

TEST(RecurrentConfigTest, RefusesOtherNumbersOfHeads) {
  const auto refuse = [&](const std::vector<int32_t>& heads,
                          absl::StatusCode code, const char* words) {
    const absl::Status status = Create(ThreeLayers(), heads).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  using Code = absl::StatusCode;
  refuse({0, 2}, Code::kInvalidArgument,
         "decoder: numbers in lfm2.attention.head_count_kv=2; need 3, as there "
         "are layers");
  refuse({}, Code::kInvalidArgument,
         "decoder: numbers in lfm2.attention.head_count_kv=0; need 3");
  refuse({0, 2, -1}, Code::kInvalidArgument,
         "decoder: lfm2.attention.head_count_kv[2]=-1; need 0 <= ");
  refuse({1, 2, 0}, Code::kUnimplemented,
         "decoder: lfm2.attention.head_count_kv[0]=1; need 0, or the same "
         "number for all layers that attend, such as 2");
  refuse({0, 0, 0}, Code::kUnimplemented,
         "decoder: lfm2.attention.head_count_kv is 0 for all of 3 layers; need "
         "a layer that attends");
  refuse({0, 2, 2}, Code::kInvalidArgument, "no tensor 'blk.2.attn_q.weight'");
  refuse({0, 3, 0}, Code::kInvalidArgument,
         "blk.1.attn_k.weight has dimensions [32, 64]; need [32, 96]");
  const absl::Status scalar =
      Create(ThreeLayers(), [](const std::string& name, GgufWriter& w) {
        w.Key(name, 2u);
      }).status();
  EXPECT_EQ(scalar.code(), Code::kInvalidArgument) << scalar;
}

TEST(RecurrentConfigTest, ReadsWhatMamba2Has) {
  SmallDecoder shape = ThreeLayers();
  shape.architecture = "granitehybrid";
  const auto create = [&] {
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    return DecoderConfig::Create(ParseOrDie(bytes));
  };
  for (const bool rope : {true, false}) {
    shape.rope = rope;
    const auto config = create();
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->rope, rope);
    EXPECT_EQ(config->conv_channels(), 32 + 2 * 2 * 12);
    EXPECT_EQ(config->residual_scale, 0.6f);
    EXPECT_EQ(config->attention_scale, 0.3f);
  }
  const auto refuse = [&](const char* words) {
    const absl::Status status = create().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    shape = ThreeLayers();
    shape.architecture = "granitehybrid";
  };
  shape.ssm_inner = 34;
  refuse(
      "decoder: granitehybrid.ssm.inner_size=34, time_step_rank=4, "
      "group_count=2; need each to be a multiple of the next");
  shape.ssm_groups = 3;
  refuse("group_count=3; need each to be a multiple");
  shape.ssm_state = 1025;
  refuse("granitehybrid.ssm.state_size=1025; need 1 <= ");
  shape.ssm_heads = 33;
  refuse("granitehybrid.ssm.time_step_rank=33; need 1 <= ");
  shape.residual_scale = 0;
  refuse("granitehybrid.residual_scale=0; need a number > 0");
  shape.conv_width = 1;
  refuse("granitehybrid.ssm.conv_kernel=1; need 2 <= ");
}

TEST(RecurrentConfigTest, RefusesMultipliersFarFrom1) {
  const struct {
    float SmallDecoder::*field;
    const char* key;
  } multipliers[] = {{&SmallDecoder::embedding_scale, "embedding_scale"},
                     {&SmallDecoder::residual_scale, "residual_scale"},
                     {&SmallDecoder::attention_scale, "attention.scale"},
                     {&SmallDecoder::logit_divisor, "logit_scale"}};
  const struct {
    float value;
    const char* refused;  // or null
  } cases[] = {{0x1p-20f, nullptr},         {0x1p20f, nullptr},
               {1e-20f, "1e-20"},           {1e20f, "1e+20"},
               {0x1.fp-21f, "9.23872e-07"}, {2097152, "2.09715e+06"}};
  for (const auto& m : multipliers) {
    for (const auto& c : cases) {
      SmallDecoder shape = ThreeLayers();
      shape.architecture = "granitehybrid";
      shape.*m.field = c.value;
      TestRng rng;
      const std::string bytes = SmallDecoderFile(rng, shape);
      const absl::Status status =
          DecoderConfig::Create(ParseOrDie(bytes)).status();
      if (c.refused == nullptr) {
        EXPECT_EQ(status, absl::OkStatus());
        continue;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat(
                      "decoder: granitehybrid.", m.key, "=", c.refused,
                      "; need a number from 2^-20 to 2^20")));
    }
  }
}

TEST(RecurrentConfigTest, ReadsWhetherThereIsASharedExpert) {
  SmallDecoder shape = ThreeLayers();
  shape.architecture = "granitehybrid";
  for (const bool mixture : {false, true}) {
    for (const int64_t ffn : {0, 48}) {
      TestRng rng;
      shape.mixture = mixture;
      shape.shared_ffn = ffn;
      const std::string bytes = SmallDecoderFile(rng, shape);
      const auto config = DecoderConfig::Create(ParseOrDie(bytes));
      ASSERT_TRUE(config.ok()) << config.status();
      EXPECT_EQ(config->Has(ModelPart::kExperts), mixture);
      EXPECT_EQ(config->Has(ModelPart::kSharedExpert), mixture && ffn > 0);
      EXPECT_EQ(config->shared_ffn, mixture ? ffn : 0);
    }
  }
}

TEST(RecurrentConfigTest, AnIntervalTellsWhichLayersAreRecurrent) {
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  shape.layers = 9;
  shape.shared_ffn = 48;
  shape.attention_interval = 4;
  const auto create = [&](bool writes_interval = true) {
    TestRng rng;
    GgufWriter w;
    w.Key("general.architecture", "qwen3next");
    WriteModelKeys(
        SmallDecoderConfig(shape),
        [&](const std::string& name, int64_t value) {
          if (name == "qwen3next.full_attention_interval" && !writes_interval) {
            return;
          }
          w.Key(name, static_cast<uint32_t>(value));
        },
        [&w](const std::string& name, float value) { w.Key(name, value); },
        [&w](const std::string& name, bool value) { w.Key(name, value); },
        [](const std::string& name, const std::vector<int32_t>&) {
          ADD_FAILURE() << name;
        });
    AddSmallDecoderTensors(rng, shape, w);
    const std::string bytes = w.Finish();
    return DecoderConfig::Create(ParseOrDie(bytes));
  };
  for (const bool writes_interval : {true, false}) {  // 4 unless told
    const auto config = create(writes_interval);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->recurrent,
              (std::vector<uint8_t>{1, 1, 1, 0, 1, 1, 1, 0, 1}));
    EXPECT_EQ(config->kv_heads, 2);
    EXPECT_EQ(config->conv_channels(), 32 + 2 * 2 * 12);
    EXPECT_EQ(config->query_rows(), 2 * 6 * 32);
    EXPECT_TRUE(config->Has(ModelPart::kSharedExpert));
    EXPECT_TRUE(config->rope);
  }
  const auto refuse = [&](absl::StatusCode code, const char* words) {
    const absl::Status status = create().status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    shape.layers = 9;
    shape.attention_interval = 4;
    shape.ssm_heads = 4;
    shape.ssm_groups = 2;
  };
  using Code = absl::StatusCode;
  shape.attention_interval = 10;
  refuse(Code::kUnimplemented,
         "decoder: qwen3next.full_attention_interval=10; need one of 9 layers "
         "that attends");
  shape.attention_interval = 4097;
  refuse(Code::kInvalidArgument,
         "qwen3next.full_attention_interval=4097; need 1 <= ");
  shape.dropped_key = "qwen3next.full_attention_interval";
  GgufWriter none = SmallDecoderKeys(shape);
  none.Key(shape.dropped_key, 0u);
  const std::string bytes = none.Finish();
  const absl::Status zero = DecoderConfig::Create(ParseOrDie(bytes)).status();
  EXPECT_EQ(zero.code(), Code::kInvalidArgument) << zero;
  EXPECT_THAT(std::string(zero.message()),
              HasSubstr("qwen3next.full_attention_interval=0; need 1 <= "));
  shape.ssm_groups = 3;
  refuse(Code::kInvalidArgument,
         "decoder: qwen3next.ssm.inner_size=32, time_step_rank=4, "
         "group_count=3; need each to be a multiple of the next");
}

TEST(RecurrentConfigTest, ASharedExpertsRouterMayHaveTwoDimensions) {
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  shape.shared_ffn = 64;
  shape.shared_router_is_matrix = true;
  for (const GgufTensorType type :
       {GgufTensorType::kF32, GgufTensorType::kBF16, GgufTensorType::kQ8_0}) {
    shape.type = type;
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto router = file.FindTensor("blk.0.ffn_gate_inp_shexp.weight");
    ASSERT_TRUE(router.ok()) << router.status();
    EXPECT_EQ((*router)->dims, (std::vector<int64_t>{32, 1}));
    EXPECT_EQ(DecoderConfig::Create(file).status(), absl::OkStatus());
  }
}

// Mamba-2's norm and scalars, and a mixture of one expert.
TEST(RecurrentConfigTest, TrailingDimensionsOfOneMayBeMissing) {
  SmallDecoder shape = ThreeLayers();
  shape.architecture = "granitehybrid";
  shape.ssm_groups = 1;
  shape.mixture = true;
  shape.experts = shape.experts_used = 1;
  for (const bool drops_ones : {false, true}) {
    shape.drops_ones = drops_ones;
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto dims = [&](const char* name) {
      const auto tensor = file.FindTensor(name);
      EXPECT_TRUE(tensor.ok()) << tensor.status();
      return (*tensor)->dims;
    };
    using Dims = std::vector<int64_t>;
    EXPECT_EQ(dims("blk.0.ssm_norm.weight"),
              drops_ones ? Dims{32} : (Dims{32, 1}));
    EXPECT_EQ(dims("blk.0.ffn_up_exps.weight"),
              drops_ones ? (Dims{32, 64}) : (Dims{32, 64, 1}));
    EXPECT_EQ(dims("blk.0.ssm_a"), (Dims{1, 4}));
    EXPECT_EQ(DecoderConfig::Create(file).status(), absl::OkStatus());
  }
  // Another number than 1 is refused as it is in the file.
  for (const auto& [rows, words] :
       {std::pair<uint64_t, const char*>{2, "[32, 2]; need [32, 1]"},
        {0, "[16]; need [32, 1]"}}) {
    TestRng rng;
    shape.dropped = "blk.0.ssm_norm.weight";
    GgufWriter w = SmallDecoderKeys(shape);
    AddSmallDecoderTensors(rng, shape, w);
    std::vector<uint64_t> dims = {rows == 0 ? 16u : 32u};
    if (rows > 0) dims.push_back(rows);
    w.Tensor(shape.dropped, dims, GgufTensorType::kF32,
             std::string(rows == 0 ? 64 : 256, '\0'));
    const std::string bytes = w.Finish();
    const absl::Status status =
        DecoderConfig::Create(ParseOrDie(bytes)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
}

// The older layout has q, k, v and z of each key head together.
TEST(RecurrentConfigTest, RefusesTheOlderLayoutOfDeltaNetsByItsTensor) {
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  GgufWriter w = SmallDecoderKeys(shape);
  const DecoderConfig c = SmallDecoderConfig(shape);
  const auto add = [&](const TensorEntry& entry, int64_t layer) {
    if (entry.id == TensorId::kDeltaGate) return absl::OkStatus();
    std::string name = TensorName(entry.id, layer);
    std::vector<int64_t> sizes = TensorDims(entry, c);
    if (entry.id == TensorId::kDeltaQkv) {
      name = TensorName(TensorId::kSsmIn, layer);
      sizes[1] += c.ssm_inner;
    }
    std::vector<uint64_t> dims;
    uint64_t bytes = sizeof(float);
    for (const int64_t size : sizes) {
      dims.push_back(static_cast<uint64_t>(size));
      bytes *= dims.back();
    }
    w.Tensor(name, dims, GgufTensorType::kF32, std::string(bytes, '\0'));
    return absl::OkStatus();
  };
  ASSERT_TRUE(ForEachTensor(c, add).ok());
  const std::string bytes = w.Finish();
  const absl::Status status = DecoderConfig::Create(ParseOrDie(bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_EQ(status.message(),
            "decoder: tensor 'blk.0.ssm_in.weight' has an older layout; need "
            "'blk.0.attn_qkv.weight': convert the model again");
}

TEST(RecurrentConfigTest, RefusesATensorThatADeltaNetLacks) {
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  GgufWriter w = SmallDecoderKeys(shape);
  AddSmallDecoderTensors(rng, shape, w);
  w.Tensor("blk.0.ssm_in.weight", {1}, GgufTensorType::kF32, Raw(0.0f));
  const std::string bytes = w.Finish();
  const absl::Status status = DecoderConfig::Create(ParseOrDie(bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tensor 'blk.0.ssm_in.weight' is not part of a plain "
                        "qwen3next of 2 layers"));
}

TEST(RecurrentConfigTest, RefusesConvolutionsOfOtherWidths) {
  SmallDecoder shape = ThreeLayers();
  for (const int64_t width : {0, 1, 5}) {
    shape.conv_width = width;
    // Keys are checked before tensors, of which there are none.
    const std::string bytes = SmallDecoderKeys(shape).Finish();
    EXPECT_THAT(
        std::string(
            DecoderConfig::Create(ParseOrDie(bytes)).status().message()),
        HasSubstr(absl::StrCat("decoder: lfm2.shortconv.l_cache=", width,
                               "; need 2 <= ")));
  }
}

}  // namespace
}  // namespace quern
