// Deterministic fuzzing of a model's whole way: a hostile file becomes a
// Decoder, a DecoderState and the logits of one Forward, or it is refused, by
// name and before it has taken more than the options allow.
//
// Memory and time are limited as decoder_fuzz_testutil.h says.
//
// QUERN_TEST_SEED=n gives other files; QUERN_FUZZ_CASES=n sets how many.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/models/testing/decoder_fuzz_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

SmallDecoder Tiny(const std::string& architecture, GgufTensorType type) {
  SmallDecoder shape;
  shape.architecture = architecture;
  shape.type = type;
  shape.vocab = 7;
  shape.hidden = shape.head_dim = 32;
  shape.rope_dim = 8;
  shape.q_heads = 2;
  shape.kv_heads = 1;
  shape.layers = 2;
  shape.ffn = 32;
  shape.rope_factors = shape.architecture == "llama";
  if (shape.is_latent()) {
    shape.value_dim = 32;
    shape.yarn = shape.router_bias = true;
  }
  return shape;
}

// Changes bytes of small legal files, most of them in the metadata.
TEST_F(DecoderFuzzTest, MutatedFilesRunOrAreRefused) {
  TestRng rng;
  std::vector<std::string> corpus;
  std::vector<size_t> headers;  // bytes before the tensors' data
  const auto add = [&](const SmallDecoder& shape) {
    corpus.push_back(SmallDecoderFile(rng, shape));
    ASSERT_TRUE(Exercise(corpus.back(), -2));
    ASSERT_TRUE(Exercise(corpus.back(), -1));
    const GgufFile file = ParseOrDie(corpus.back());
    int64_t data = file.file_bytes();
    for (const GgufTensor& tensor : file.tensors()) {
      data = std::min(data, tensor.offset);
    }
    ASSERT_LT(data, file.file_bytes());
    headers.push_back(static_cast<size_t>(data));
  };
  for (const std::string& architecture : ArchitecturesWithout({})) {
    for (const GgufTensorType type :
         {GgufTensorType::kF32, GgufTensorType::kF16, GgufTensorType::kBF16,
          GgufTensorType::kQ8_0, GgufTensorType::kQ4_0,
          GgufTensorType::kMXFP4}) {
      ASSERT_NO_FATAL_FAILURE(add(Tiny(architecture, type)));
    }
  }
  for (const GgufTensorType type :
       {GgufTensorType::kQ4_1, GgufTensorType::kQ5_0, GgufTensorType::kQ5_1,
        GgufTensorType::kIQ4_NL}) {
    ASSERT_NO_FATAL_FAILURE(add(Tiny("llama", type)));
  }
  for (const GgufTensorType type :
       {GgufTensorType::kQ2_K, GgufTensorType::kQ3_K, GgufTensorType::kQ4_K,
        GgufTensorType::kQ5_K, GgufTensorType::kQ6_K, GgufTensorType::kIQ4_XS,
        GgufTensorType::kTQ2_0}) {
    SmallDecoder shape = Tiny("llama", type);
    shape.hidden = shape.ffn = 256;
    shape.q_heads = 8;
    ASSERT_NO_FATAL_FAILURE(add(shape));
  }
  const int64_t cases = Cases(200, kSanitized ? 1000 : 4000);
  int64_t ran = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    const size_t which = At(rng, corpus.size());
    const std::string& from = corpus[which];
    // A quarter of the files may change anywhere, so that weights become
    // infinite, NaN or huge.
    const size_t front = rng.Integer(0, 3) == 0 ? from.size() : headers[which];
    ran += Exercise(Mutate(rng, from, corpus, front), i) ? 1 : 0;
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
  EXPECT_GT(ran, cases / 100);
  EXPECT_LT(ran, cases * 9 / 10);
}

// Numbers beside the sizes, some of them out of range.
void MakeKeysHostile(Rng& rng, SmallDecoder& m) {
  constexpr float kNumbers[] = {0, 1e-30f, 0.5f, 1, 1.3f, 40, 3e38f, -1};
  const auto number = [&](float usual) {
    return rng.Integer(0, 3) > 0 ? usual : kNumbers[At(rng, 8)];
  };
  m.yarn = rng.Integer(0, 1) == 1;
  m.yarn_factor = number(8);
  m.yarn_log_mul = number(0.07f);
  m.yarn_original = int64_t{1} << rng.Integer(0, 28);
  m.expert_scale = number(1.3f);
  m.gating = rng.Integer(0, 7) == 0 ? 3 : rng.Integer(1, 2);
  m.router_bias = m.gating == 2 || rng.Integer(0, 1) == 1;
  m.experts_sum_to_one = rng.Integer(0, 1) == 1;
  m.attention_interval = rng.Integer(1, m.layers);
}

// Files whose keys and tensors agree, of any shape that few bytes can have.
// Only the limits on memory stand against these.
TEST_F(DecoderFuzzTest, HostileShapesRunOrAreRefused) {
  TestRng rng;
  const auto power = [&](int64_t most) {
    return int64_t{1} << rng.Integer(0, most);
  };
  const std::vector<std::string> architectures = ArchitecturesWithout({});
  const int64_t cases = Cases(60, kSanitized ? 200 : 600);
  int64_t ran = 0, built = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    constexpr GgufTensorType kTypes[] = {
        GgufTensorType::kF32,  GgufTensorType::kF16,  GgufTensorType::kBF16,
        GgufTensorType::kQ8_0, GgufTensorType::kQ4_0, GgufTensorType::kQ5_1,
        GgufTensorType::kMXFP4};
    SmallDecoder m = Tiny(architectures[At(rng, architectures.size())],
                          kTypes[At(rng, std::size(kTypes))]);
    const bool blocks = m.type != GgufTensorType::kF32 &&
                        m.type != GgufTensorType::kF16 &&
                        m.type != GgufTensorType::kBF16;
    const int64_t block = blocks ? 32 : 1;
    m.context = power(28);
    m.layers = power(3);
    m.hidden = block * power(6);
    m.ffn = block * power(12);
    m.vocab = power(13);
    m.kv_heads = power(6);
    m.q_heads = m.kv_heads * power(3);
    m.head_dim = block * 2 * power(14);
    m.rope_dim = rng.Integer(0, 1) == 0 ? m.head_dim : 2;
    m.window = power(28);
    m.mixture = rng.Integer(0, 1) == 1;
    m.experts = power(8);
    m.experts_used = power(4);
    m.expert_ffn = block * power(6);
    m.shared_ffn = rng.Integer(0, 1) * block * power(6);
    m.conv_width = rng.Integer(1, 4);
    m.ssm_groups = power(2);
    m.ssm_heads = m.ssm_groups * power(2);
    m.ssm_inner = block * m.ssm_heads * power(4);
    m.ssm_state = power(10);
    m.kv_lora = block * 4 * power(6);
    m.q_lora = rng.Integer(0, 1) * block * power(6);
    m.value_dim = block * power(6);
    m.split_kv_b = rng.Integer(0, 1) == 1;
    m.leading_dense = rng.Integer(0, 2);
    m.shared_experts = rng.Integer(0, 2);
    MakeKeysHostile(rng, m);
    const bool mixture = SmallDecoderConfig(m).Has(ModelPart::kExperts);
    const int64_t ffn = mixture ? m.experts * m.expert_ffn + m.shared_ffn +
                                      m.shared_experts * m.expert_ffn + m.ffn
                                : m.ffn;
    if (m.is_latent() && m.q_heads * (m.head_dim + m.value_dim) *
                                 (m.kv_lora + m.q_lora) * m.layers >
                             1 << 18) {
      continue;
    }
    const int64_t columns =
        m.layers *
        (m.q_heads * m.head_dim * 3 + 3 * ffn + 2 * m.kv_heads * m.head_dim +
         4 * m.hidden + 4 * m.ssm_inner + 2 * m.ssm_groups * m.ssm_state);
    if (m.hidden * (columns + 2 * m.vocab) > 1 << 18) continue;
    ++built;
    const bool no_interval =
        m.architecture == "qwen3next" && rng.Integer(0, 7) == 0;
    if (no_interval) m.dropped_key = "qwen3next.full_attention_interval";
    GgufWriter w = SmallDecoderKeys(m);
    if (no_interval) w.Key(m.dropped_key, 0u);
    AddSmallDecoderTensors(rng, m, w);
    ran += Exercise(w.Finish(), i) ? 1 : 0;
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
  EXPECT_GT(ran, built / 20);
  EXPECT_LT(ran, built * 19 / 20);
}

// Files that claim thousands of layers, or a vocabulary, without the tensors.
TEST_F(DecoderFuzzTest, CountsWithoutTensorsAreRefused) {
  TestRng rng;
  const auto refuse = [&](auto&& change, const std::string& words) {
    const SmallDecoder shape = Tiny("llama", GgufTensorType::kF32);
    SmallDecoder claimed = shape;
    change(claimed);
    GgufWriter writer = SmallDecoderKeys(claimed);
    AddSmallDecoderTensors(rng, shape, writer);
    InlineExecutor executor;
    const auto model =
        Decoder::Create(ParseOrDie(writer.Finish()), {}, executor);
    EXPECT_THAT(std::string(model.status().message()), HasSubstr(words));
  };
  refuse([](SmallDecoder& m) { m.layers = 4096; },
         "decoder: no tensor 'blk.2.attn_norm.weight'; the file is GGUF 3 of "
         "architecture 'llama', name 'small', tensors F32; supported are " +
             ArchitectureNames("and") +
             " in F32, F16, BF16, Q2_K to Q8_0, IQ4_NL, IQ4_XS, TQ2_0 and "
             "MXFP4");
  refuse([](SmallDecoder& m) { m.layers = 4097; },
         "llama.block_count=4097; need 1 <= ");
  refuse(
      [](SmallDecoder& m) {
        m.mixture = true;
        m.experts = 1024;
      },
      "decoder: no tensor 'blk.0.ffn_gate_inp.weight'");
  refuse([](SmallDecoder& m) { m.vocab = 1 << 28; },
         "decoder: llama.vocab_size=268435456; need 7, as token_embd");
}

}  // namespace
}  // namespace quern
