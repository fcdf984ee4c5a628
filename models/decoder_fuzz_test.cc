// Deterministic fuzzing of a model's whole way: a hostile file becomes a
// Decoder, a DecoderState and the logits of one Forward, or it is refused, by
// name and before it has taken more than the options allow.
//
// RLIMIT_AS limits the process to its current size plus kSpareBytes. An
// allocation that fails should have been refused earlier, and fails the test.
// Under sanitizers, which map terabytes themselves, the limit is not set; the
// test then checks that the sizes which the model and the state report stay
// within max_bytes. Each case has kSecondsOfCase, after which the process
// prints the case and ends.
//
// QUERN_TEST_SEED=n gives other files; QUERN_FUZZ_CASES=n sets how many.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder.h"
#include "quern/models/decoder_config.h"
#include "quern/models/decoder_testutil.h"
#include "quern/models/gguf.h"
#include "quern/models/gguf_testutil.h"
#include "quern/models/mutate_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kModelBytes = int64_t{32} << 20;
constexpr int64_t kStateBytes = int64_t{32} << 20;
// Memory for model and state, their scratch and logits, copies of the file, and
// freed memory that the allocator keeps.
constexpr rlim_t kSpareBytes = rlim_t{256} << 20;
constexpr unsigned kSecondsOfCase = kSanitized ? 120 : 20;

// The line that OnAlarm prints.
char overtime[256];

void OnAlarm(int) {
  size_t size = 0;
  while (overtime[size] != '\0') ++size;
  (void)!write(STDERR_FILENO, overtime, size);
  _exit(1);
}

rlim_t MappedBytes() {
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

class DecoderFuzzTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(std::signal(SIGALRM, &OnAlarm), SIG_ERR);
    ASSERT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    if (kSanitized) return;
    rlimit limit = before_;
    limit.rlim_cur = MappedBytes() + kSpareBytes;
    ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  void TearDown() override {
    alarm(0);
    EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0);
  }

  // Fails for a refusal that came only from a failed allocation.
  static void ExpectRefusedByName(const absl::Status& status) {
    EXPECT_FALSE(absl::StrContains(status.message(), "cannot be allocated"))
        << status;
    EXPECT_GT(status.message().size(), 8u) << status;
  }

  // Loads `bytes` and runs three tokens. Returns whether the tokens ran.
  bool Exercise(const std::string& bytes, int64_t index) {
    std::snprintf(overtime, sizeof(overtime),
                  "%s: case %lld of QUERN_TEST_SEED=%llu took more than %u s\n",
                  TestName().c_str(), static_cast<long long>(index),
                  static_cast<unsigned long long>(BaseSeed()), kSecondsOfCase);
    alarm(kSecondsOfCase);
    const bool ran = Run(bytes);
    alarm(0);
    return ran;
  }

 private:
  bool Run(const std::string& bytes) {
    // The copy has the exact size, so that a sanitizer notices a read of one
    // byte too many.
    const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
    const auto file = GgufFile::Parse(exact);
    if (!file.ok()) {
      ExpectRefusedByName(file.status());
      return false;
    }
    DecoderOptions options;
    options.max_bytes = kModelBytes;
    const auto model = Decoder::Create(*file, options, executor_);
    if (!model.ok()) {
      ExpectRefusedByName(model.status());
      return false;
    }
    EXPECT_LE(model->weight_bytes(), kModelBytes);
    EXPECT_LE(model->context(), options.max_context);
    DecoderStateSpec spec;
    spec.max_step_tokens = 4;
    spec.max_bytes = kStateBytes;
    auto state = DecoderState::Create(*model, spec);
    if (!state.ok()) {
      ExpectRefusedByName(state.status());
      return false;
    }
    EXPECT_LE(state->cache_bytes() + state->scratch_bytes(), kStateBytes);
    return Forward(*model, *state);
  }

  bool Forward(const Decoder& model, DecoderState& state) {
    const auto last = static_cast<int32_t>(model.config().vocab - 1);
    std::vector<int32_t> tokens = {0, last, last / 2};
    if (model.context() < 3) tokens.resize(1);
    const auto logits = state.Forward({{*state.NewSequence(), tokens}},
                                      LogitsOf::kAllTokens, executor_);
    if (!logits.ok()) {
      ExpectRefusedByName(logits.status());
      return false;
    }
    EXPECT_EQ(logits->extent(0), static_cast<int64_t>(tokens.size()));
    EXPECT_EQ(logits->extent(1), model.config().vocab);
    return true;
  }

  rlimit before_{};
  InlineExecutor executor_;
};

// A file of 0.6 MB whose rotary table would take 17 GB: one element per row,
// one head of 65536, and a context that costs the file nothing to claim.
TEST_F(DecoderFuzzTest, ALongContextOfALongHeadIsRefusedBeforeItsTable) {
  TestRng rng;
  SmallDecoder shape;
  shape.vocab = shape.layers = shape.ffn = shape.hidden = 1;
  shape.q_heads = shape.kv_heads = 1;
  shape.head_dim = shape.rope_dim = 65536;
  shape.context = 1 << 28;
  shape.type = GgufTensorType::kBF16;
  const std::string bytes = SmallDecoderFile(rng, shape);
  EXPECT_LT(bytes.size(), 650000u);
  InlineExecutor executor;
  const GgufFile file = ParseOrDie(bytes);
  const auto model = Decoder::Create(file, {}, executor);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* words :
       {"decoder: loading takes up to 1718",
        "17179869184 of the rotary table for ",
        "context=32768, rope.dimension_count=65536; need at most max_bytes=28",
        ", which is 268435456 + 37 times the file's "}) {
    EXPECT_THAT(std::string(model.status().message()), HasSubstr(words));
  }
  DecoderOptions options;
  options.max_context = 16;
  EXPECT_TRUE(Decoder::Create(file, options, executor).ok());
}

// The default size of the cache follows from the context.
TEST_F(DecoderFuzzTest, ACacheOfManyWideLayersIsRefused) {
  TestRng rng;
  SmallDecoder shape;
  shape.vocab = shape.ffn = shape.hidden = 1;
  shape.layers = 4;
  shape.q_heads = shape.kv_heads = 1024;
  shape.head_dim = shape.rope_dim = 16;
  shape.context = 1 << 20;
  InlineExecutor executor;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const GgufFile file = ParseOrDie(bytes);
  const auto model = Decoder::Create(file, {}, executor);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto state = DecoderState::Create(*model, {});
  EXPECT_EQ(state.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* words :
       {"decoder: a cache of 32768 tokens takes 8589934592 bytes in 4 layers, ",
        "; need at most max_bytes=", ", which is 4294967296 + 64 times the "}) {
    EXPECT_THAT(std::string(state.status().message()), HasSubstr(words));
  }
  DecoderStateSpec spec;
  spec.cache_tokens = 64;
  spec.max_step_tokens = 4;
  EXPECT_TRUE(DecoderState::Create(*model, spec).ok());
}

SmallDecoder Tiny(const char* architecture, GgufTensorType type) {
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
    ASSERT_TRUE(Exercise(corpus.back(), -1));
    const GgufFile file = ParseOrDie(corpus.back());
    int64_t data = file.file_bytes();
    for (const GgufTensor& tensor : file.tensors()) {
      data = std::min(data, tensor.offset);
    }
    ASSERT_LT(data, file.file_bytes());
    headers.push_back(static_cast<size_t>(data));
  };
  for (const char* architecture :
       {"llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "lfm2",
        "granitehybrid", "deepseek2", "qwen3next"}) {
    for (const GgufTensorType type :
         {GgufTensorType::kF32, GgufTensorType::kF16, GgufTensorType::kBF16,
          GgufTensorType::kQ8_0, GgufTensorType::kQ4_0,
          GgufTensorType::kMXFP4}) {
      ASSERT_NO_FATAL_FAILURE(add(Tiny(architecture, type)));
    }
  }
  for (const GgufTensorType type :
       {GgufTensorType::kQ2_K, GgufTensorType::kQ3_K, GgufTensorType::kQ4_K,
        GgufTensorType::kQ6_K}) {
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
  const int64_t cases = Cases(60, kSanitized ? 200 : 600);
  int64_t ran = 0, built = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    constexpr const char* kArchitectures[] = {
        "llama", "qwen2",         "qwen3",     "qwen3moe", "gemma2",
        "lfm2",  "granitehybrid", "deepseek2", "qwen3next"};
    constexpr GgufTensorType kTypes[] = {
        GgufTensorType::kF32, GgufTensorType::kF16, GgufTensorType::kBF16,
        GgufTensorType::kQ8_0};
    SmallDecoder m = Tiny(kArchitectures[At(rng, std::size(kArchitectures))],
                          kTypes[At(rng, std::size(kTypes))]);
    const int64_t block = m.type == GgufTensorType::kQ8_0 ? 32 : 1;
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
    const bool mixture =
        m.architecture == "qwen3moe" || m.architecture == "qwen3next" ||
        m.is_latent() ||
        ((m.architecture == "llama" || m.architecture == "granitehybrid") &&
         m.mixture);
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
  const auto refuse = [&](auto&& change, const char* words) {
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
         "architecture 'llama', name 'small', tensors F32; supported are "
         "'llama', 'qwen2', 'qwen3', 'qwen3moe', 'gemma2', 'lfm2', "
         "'granitehybrid', 'deepseek2' and 'qwen3next' in F32, F16, BF16, Q2_K "
         "to Q8_0, IQ4_NL, IQ4_XS and MXFP4");
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
