// Runs the program as a user would, loads the file that it wrote, and generates
// from it.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/testing/files.h"
#include "quern/tools/random_model.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int code;
  std::string text;  // standard output and standard error
};

Outcome RunProgram(const std::string& program, const std::string& flags) {
  const std::string command = absl::StrCat(program, " ", flags, " 2>&1");
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  char piece[4096];
  size_t got;
  while ((got = std::fread(piece, 1, sizeof(piece), pipe)) > 0) {
    outcome.text.append(piece, got);
  }
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

Outcome Make(const std::string& flags) {
  return RunProgram("tools/make_random_gguf", flags);
}

std::string TempFile(const std::string& name) {
  return ::testing::TempDir() + "/" + name;
}

// Greedy continuation of "In the" by `count` tokens.
std::vector<int32_t> Generate(const GgufFile& file, int count) {
  InlineExecutor executor;
  const auto tokenizer = Tokenizer::Create(file);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto model = Decoder::Create(file, {}, executor);
  EXPECT_TRUE(model.ok()) << model.status();
  auto state = DecoderState::Create(*model, {});
  EXPECT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(tokenizer->vocab_size(), model->config().vocab);
  std::vector<int32_t> tokens = tokenizer->Encode("In the");
  if (tokenizer->add_bos()) {
    tokens.insert(tokens.begin(), tokenizer->bos_id());
    EXPECT_EQ(tokens.size(), 1u + 7u);  // <s>, a space in front, six bytes
  } else {
    EXPECT_EQ(tokens.size(), 5u);  // "I", "n", " t", "h", "e"
  }
  const auto sequence = state->NewSequence();
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  std::vector<int32_t> chosen;
  while (count-- > 0) {
    const auto logits =
        state->Forward({{*sequence, tokens}}, LogitsOf::kLastTokens, executor);
    EXPECT_TRUE(logits.ok()) << logits.status();
    const float* row = logits->Row(0);
    double squares = 0;
    for (int64_t i = 0; i < logits->extent(1); ++i) {
      EXPECT_TRUE(std::isfinite(row[i])) << i;
      squares += static_cast<double>(row[i]) * static_cast<double>(row[i]);
    }
    // The weights are scaled so that logits are of order 1.
    const double rms =
        std::sqrt(squares / static_cast<double>(logits->extent(1)));
    EXPECT_GT(rms, 0.5);
    EXPECT_LT(rms, 2);
    const int64_t best = std::max_element(row, row + logits->extent(1)) - row;
    chosen.push_back(static_cast<int32_t>(best));
    tokens = {chosen.back()};
  }
  return chosen;
}

void ExpectRuns(const std::string& shape, const std::string& dtype) {
  SCOPED_TRACE(absl::StrCat(shape, " ", dtype));
  const std::string path = TempFile(absl::StrCat(shape, "_", dtype, ".gguf"));
  const Outcome outcome = Make(
      absl::StrCat("--shape=", shape, " --dtype=", dtype, " --out=", path));
  ASSERT_EQ(outcome.code, 0) << outcome.text;
  EXPECT_EQ(outcome.text, "");  // no progress without a terminal
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto config = DecoderConfig::Create(*file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->name, shape + " with random weights");
  EXPECT_EQ(Generate(*file, 5).size(), 5u);
}

TEST(MakeRandomGgufTest, TheModelRunsInEveryType) {
  for (const char* dtype : {"bf16", "f16", "f32", "q8_0"}) {
    ExpectRuns("tiny", dtype);
  }
}

TEST(MakeRandomGgufTest, EverySmallModelRuns) {
  for (const RandomModelShape& shape : RandomModelShapes()) {
    if (!absl::StartsWith(shape.name, "tiny_")) continue;
    for (const char* dtype : {"bf16", "q8_0"}) {
      ExpectRuns(std::string(shape.name), dtype);
    }
  }
}

// Every architecture has a shape here, and a small one that the test above
// runs.
TEST(MakeRandomGgufTest, EveryArchitectureHasASmallModel) {
  for (const Architecture* architecture : Architectures()) {
    const auto shapes = RandomModelShapes();
    EXPECT_TRUE(std::any_of(shapes.begin(), shapes.end(),
                            [&](const RandomModelShape& shape) {
                              return shape.architecture == architecture->name &&
                                     absl::StartsWith(shape.name, "tiny");
                            }))
        << architecture->name;
  }
}

TEST(MakeRandomGgufTest, LayersCanBeFewer) {
  const std::string path = TempFile("one_layer.gguf");
  ASSERT_EQ(Make("--shape=tiny_qwen3moe --layers=1 --out=" + path).code, 0);
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto config = DecoderConfig::Create(*file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layers, 1);
  EXPECT_EQ(config->experts, 8);
  EXPECT_EQ(Generate(*file, 5).size(), 5u);
  for (const char* layers : {"0", "-1", "1.5", "", "4097"}) {
    const Outcome outcome = Make(absl::StrCat("--shape=tiny --layers=", layers,
                                              " --out=", path, ".none"));
    EXPECT_EQ(outcome.code, 2) << layers;
    EXPECT_THAT(outcome.text, HasSubstr("need a whole number, 1 to 4096"));
  }
}

// Models refuse a file of recurrent layers alone.
TEST(MakeRandomGgufTest, OneLayerAttends) {
  const std::string path = TempFile("hybrid.gguf");
  for (const char* shape : {"tiny_lfm2", "tiny_granite4_h"}) {
    const auto make = [&](int layers) {
      return Make(absl::StrCat("--shape=", shape, " --layers=", layers,
                               " --out=", path));
    };
    const Outcome outcome = make(1);
    EXPECT_EQ(outcome.code, 2) << shape;
    EXPECT_EQ(
        outcome.text,
        absl::StrCat("make_random_gguf: random_model: layers=1 of ", shape,
                     " are all recurrent; need layers >= 2, so that one "
                     "attends\n"));
    // The last of four layers is recurrent.
    ASSERT_EQ(make(4).code, 0) << shape;
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(Generate(*file, 3).size(), 3u);
  }
  // Every second layer of tiny_qwen3next attends, and the last of fewer.
  for (const int layers : {1, 3}) {
    ASSERT_EQ(Make(absl::StrCat("--shape=tiny_qwen3next --layers=", layers,
                                " --out=", path))
                  .code,
              0);
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    const auto config = DecoderConfig::Create(*file);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->attention_interval, layers == 1 ? 1 : 2);
    EXPECT_EQ(Generate(*file, 3).size(), 3u);
  }
}

// The frequencies with the factors must be those of Llama 3.1's formula.
TEST(MakeRandomGgufTest, Llama31HasItsRotaryFactors) {
  const std::string path = TempFile("factors.gguf");
  ASSERT_EQ(Make("--shape=tiny_llama3.1 --out=" + path).code, 0);
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto config = DecoderConfig::Create(*file);
  ASSERT_TRUE(config.ok()) << config.status();
  RotaryScaling scaling;
  scaling.kind = RotaryScalingKind::kLlama3;
  scaling.factor = 8;
  scaling.original = 8192;
  const auto want =
      ComputeRotaryFrequencies(config->rope_dim, config->rope_base, scaling);
  const auto plain =
      ComputeRotaryFrequencies(config->rope_dim, config->rope_base, {});
  ASSERT_TRUE(want.ok() && plain.ok());
  ASSERT_EQ(config->rope_factors.size(), want->frequencies.size());
  for (size_t j = 0; j < want->frequencies.size(); ++j) {
    EXPECT_NEAR(plain->frequencies[j] / config->rope_factors[j],
                want->frequencies[j], 1e-6 * want->frequencies[j])
        << j;
  }
  EXPECT_EQ(config->rope_factors.front(), 1);
  EXPECT_EQ(config->rope_factors.back(), 8);
}

// Turns the token that the model likes second into an end of turn, then into an
// end of message. Generation must stop there, and print nothing for it.
TEST(MakeRandomGgufTest, GenerateStopsAtAnyEndToken) {
  const std::string path = TempFile("ends.gguf");
  ASSERT_EQ(Make("--shape=tiny_qwen3 --out=" + path).code, 0);
  std::vector<int32_t> chosen;
  {
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    chosen = Generate(*file, 2);
  }
  ASSERT_NE(chosen[0], chosen[1]);
  const std::string bytes = FileBytes(path);
  for (const char* key :
       {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    SCOPED_TRACE(key);
    std::string changed = bytes;
    const size_t at = changed.find(key);
    ASSERT_NE(at, std::string::npos);
    // The key's name is followed by its type (u32), then by the value.
    std::memcpy(&changed[at + std::strlen(key) + 4], &chosen[1],
                sizeof(chosen[1]));
    std::ofstream(path, std::ios::binary) << changed;
    const Outcome outcome = RunProgram(
        "examples/generate/generate",
        absl::StrCat("--model=", path, " --stats --max_tokens=5 --kv=f16 ",
                     "--temperature=0 --prompt='In the'"));
    EXPECT_EQ(outcome.code, 0) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr("generation: 2 tokens, "));
    EXPECT_THAT(outcome.text, HasSubstr("stopped by: the model: end of text"));
  }
}

// From a prompt with an invalid byte to printed text.
TEST(MakeRandomGgufTest, GenerateRunsOnAByteLevelVocabulary) {
  const std::string path = TempFile("generate.gguf");
  ASSERT_EQ(Make("--shape=tiny_qwen3 --out=" + path).code, 0);
  const auto generate = [&](const std::string& flags) {
    return RunProgram("examples/generate/generate",
                      absl::StrCat("--model=", path,
                                   " --stats --max_tokens=4 --temperature=0 "
                                   "--prompt='In the \xff<|endoftext|>' ",
                                   flags));
  };
  const Outcome text = generate("");
  EXPECT_EQ(text.code, 0) << text.text;
  EXPECT_THAT(text.text, HasSubstr("In the \xff<|endoftext|>"));
  EXPECT_THAT(text.text, HasSubstr("prompt: 20 tokens, "));
  const Outcome token = generate("--specials");
  EXPECT_EQ(token.code, 0) << token.text;
  EXPECT_THAT(token.text, HasSubstr("prompt: 8 tokens, "));
}

TEST(MakeRandomGgufTest, TheSeedDecidesEveryByte) {
  const auto bytes = [](const std::string& name, const std::string& seed) {
    const std::string path = TempFile(name);
    const Outcome outcome =
        Make(absl::StrCat("--shape tiny --out ", path, " ", seed));
    EXPECT_EQ(outcome.code, 0) << outcome.text;
    return FileBytes(path);
  };
  const std::string one = bytes("one.gguf", "");
  EXPECT_EQ(bytes("again.gguf", "--seed=1"), one);
  const std::string other = bytes("other.gguf", "--seed=2");
  EXPECT_EQ(other.size(), one.size());
  EXPECT_NE(other, one);
}

// Weights must have mean 0 and the deviation that random_model.h promises, and
// no two tensors may be alike. The mean of n independent weights strays by
// deviation / sqrt(n), and the variance by less than sqrt(2 / n) of itself; the
// test allows five times that.
TEST(MakeRandomGgufTest, WeightsHaveTheirDeviation) {
  for (const char* dtype : {"f32", "q8_0"}) {
    const std::string path = TempFile(absl::StrCat("spread_", dtype, ".gguf"));
    ASSERT_EQ(
        Make(absl::StrCat("--shape=tiny --dtype=", dtype, " --out=", path))
            .code,
        0);
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    const struct {
      const char* name;
      double variance;
    } kTensors[] = {{"token_embd.weight", 1},
                    {"blk.0.attn_q.weight", 1.0 / 64},
                    {"blk.1.attn_output.weight", 1.0 / (4 * 64)},
                    {"blk.1.ffn_up.weight", 1.0 / 64},
                    {"blk.1.ffn_down.weight", 1.0 / (4 * 160)},
                    {"output.weight", 1.0 / 64}};
    std::vector<float> first_weights;
    for (const auto& t : kTensors) {
      const GgufTensor& tensor = **file->FindTensor(t.name);
      std::vector<float> values(static_cast<size_t>(tensor.elements));
      ASSERT_TRUE(file->ReadRows(tensor, 0, absl::MakeSpan(values)).ok());
      double sum = 0, squares = 0;
      for (const float value : values) {
        const auto v = static_cast<double>(value);
        sum += v;
        squares += v * v;
      }
      const auto n = static_cast<double>(tensor.elements);
      EXPECT_NEAR(sum / n, 0, 5 * std::sqrt(t.variance / n)) << t.name;
      // Q8_0 rounds in steps of 1/37 of the deviation, which adds 1/12 of the
      // step's square to the variance.
      EXPECT_NEAR(squares / n / t.variance, 1, 5 * std::sqrt(2 / n) + 1e-3)
          << t.name;
      first_weights.push_back(values[0] / values[1]);
    }
    std::sort(first_weights.begin(), first_weights.end());
    EXPECT_EQ(std::adjacent_find(first_weights.begin(), first_weights.end()),
              first_weights.end());
  }
}

// With weights of 1, a norm in the wrong place would go unseen, and so would a
// bias of 0.
TEST(MakeRandomGgufTest, NormsBiasesAndDecaysDiffer) {
  const struct {
    const char* shape;
    std::vector<const char*> norms, biases, decays;
  } kCases[] = {
      {"tiny_qwen2",
       {"blk.0.attn_norm.weight", "blk.1.attn_norm.weight",
        "blk.1.ffn_norm.weight", "output_norm.weight"},
       {"blk.0.attn_q.bias", "blk.1.attn_v.bias"},
       {}},
      {"tiny_qwen3next",
       {"blk.0.ssm_norm.weight", "blk.1.attn_q_norm.weight",
        "blk.0.post_attention_norm.weight"},
       {"blk.0.ssm_dt.bias"},
       {"blk.0.ssm_a"}},
      {"tiny_granite4_h",
       {"blk.0.ssm_d", "blk.0.ssm_norm.weight"},
       {},
       {"blk.0.ssm_a", "blk.2.ssm_a"}},
      {"tiny_deepseek2", {"blk.0.attn_q_a_norm.weight"}, {}, {}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.shape);
    const std::string path = TempFile("norms.gguf");
    ASSERT_EQ(Make(absl::StrCat("--shape=", c.shape, " --out=", path)).code, 0);
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    std::vector<std::vector<float>> seen;
    const auto expect = [&](const char* name, float min, float max) {
      const auto tensor = file->FindTensor(name);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      std::vector<float> values(static_cast<size_t>((*tensor)->elements));
      ASSERT_TRUE(file->ReadRows(**tensor, 0, absl::MakeSpan(values)).ok());
      const auto [least, most] =
          std::minmax_element(values.begin(), values.end());
      EXPECT_GE(*least, min) << name;
      EXPECT_LE(*most, max) << name;
      // Over a third of the range, by chance alone.
      EXPECT_GT(*most - *least, (max - min) / 3) << name;
      EXPECT_EQ(std::find(seen.begin(), seen.end(), values), seen.end())
          << name << " has the values of another";
      seen.push_back(values);
    };
    for (const char* name : c.norms) expect(name, 0.5f, 1.5f);
    for (const char* name : c.biases) expect(name, -0.25f, 0.25f);
    for (const char* name : c.decays) expect(name, -1.5f, -0.5f);
  }
}

// llama.cpp takes no deepseek2 of one matrix of queries, unless it has the
// layers of DeepSeek-V2-Lite.
TEST(MakeRandomGgufTest, TinyDeepseekHasTwoMatricesOfQueries) {
  const std::string path = TempFile("lora.gguf");
  ASSERT_EQ(Make("--shape=tiny_deepseek2 --out=" + path).code, 0);
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file->GetInt("deepseek2.attention.q_lora_rank"), 96);
  EXPECT_TRUE(file->HasTensor("blk.2.attn_q_b.weight"));
  EXPECT_FALSE(file->HasTensor("blk.2.attn_q.weight"));
}

TEST(MakeRandomGgufTest, HelpIsReadable) {
  const Outcome outcome = Make("--help");
  EXPECT_EQ(outcome.code, 0);
  for (const char* words :
       {"--shape\n", "--dtype (bf16)\n", "--out\n", "--seed (1)\n",
        "tinyllama_1.1b: 22 layers, width 2048, 32 heads on 4, feed-forward "
        "5632, vocabulary 32000\n",
        "Exit code"}) {
    EXPECT_THAT(outcome.text, HasSubstr(words));
  }
}

TEST(MakeRandomGgufTest, RefusesBadCommandLinesWithCode2) {
  std::string shapes;
  for (const RandomModelShape& shape : RandomModelShapes()) {
    absl::StrAppend(&shapes, shapes.empty() ? "" : ", ", shape.name);
  }
  const struct {
    const char* flags;
    std::string text;
  } kRefusals[] = {
      {"", "--shape is missing; need one of " + shapes},
      {"--shape=tiny", "--out=FILE is missing"},
      {"--shape=tiny --out=",
       "--out= is not a value of that flag: need a "
       "file"},
      {"--shape=gpt5 --out=x",
       "--shape=gpt5 is not a value of that flag: need one of " + shapes},
      {"--shape=tiny --out=x --dtype=int4",
       "--dtype=int4 is not a value of that flag: need bf16, f16, f32 or "
       "q8_0"},
      {"--shape=tiny --out=x --seed=-1",
       "--seed=-1 is not a value of that flag: need a whole number, 0 or "
       "more"},
      {"--shape=tiny --out=x --sed=1",
       "there is no flag --sed; --help lists them"},
      {"--shape=tiny --out", "--out needs a value"},
      {"tiny", "'tiny' is not a flag; --help lists them"},
  };
  for (const auto& r : kRefusals) {
    const Outcome outcome = Make(r.flags);
    EXPECT_EQ(outcome.code, 2) << r.flags;
    EXPECT_EQ(outcome.text, absl::StrCat("make_random_gguf: ", r.text, "\n"));
  }
}

TEST(MakeRandomGgufTest, FailsWithCode1AndTheReason) {
  const Outcome nowhere =
      Make("--shape=tiny --out='" + TempFile("none/x.gguf") + "'");
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_THAT(nowhere.text, HasSubstr("No such file or directory\n"));
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  const Outcome full = Make("--shape=tiny --out=/dev/full");
  EXPECT_EQ(full.code, 1);
  EXPECT_EQ(full.text,
            "make_random_gguf: cannot write '/dev/full': No space left on "
            "device\n");
  EXPECT_EQ(access("/dev/full", W_OK), 0);  // must not have been removed
}

}  // namespace
}  // namespace quern
