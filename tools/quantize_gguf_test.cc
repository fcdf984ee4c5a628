// Runs the program as a user would, on the shipped model, and measures what
// each format costs it.

#include <sys/wait.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/likelihood.h"
#include "quern/quant/block_format.h"
#include "quern/testing/files.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

constexpr char kModel[] = "models/quern_kjv_4m/quern-kjv-4m.bf16.gguf";

struct Outcome {
  int code;
  std::string text;  // standard output and standard error
};

Outcome Quantize(const std::string& arguments) {
  const std::string command =
      absl::StrCat("tools/quantize_gguf ", arguments, " 2>&1");
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

std::string TempFile(const std::string& name) {
  return ::testing::TempDir() + "/" + name;
}

// Mean negative log-likelihood of the first windows of the validation text, in
// nats, as golden.json defines it.
double Loss(const GgufFile& file,
            DecoderActivations activations = DecoderActivations::kExact) {
  // Sanitizers make this a hundred times slower. The bounds hold for one
  // window.
  constexpr size_t kWindow = 256, kWindows = kSanitized ? 1 : 4;
  InlineExecutor executor;
  DecoderOptions options;
  options.activations = activations;
  const auto model = Decoder::Create(file, options, executor);
  EXPECT_TRUE(model.ok()) << model.status();
  DecoderStateSpec spec;
  spec.max_sequences = 1;
  spec.max_step_tokens = static_cast<int64_t>(kWindow);
  auto state = DecoderState::Create(*model, spec);
  EXPECT_TRUE(state.ok()) << state.status();
  const std::string bytes = FileBytes("models/quern_kjv_4m/valid.tokens.u16");
  std::vector<int32_t> tokens(kWindow * kWindows);
  EXPECT_GE(bytes.size(), 2 * tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    uint16_t token;
    std::memcpy(&token, bytes.data() + 2 * i, 2);
    tokens[i] = token;
  }
  double loss = 0;
  for (size_t w = 0; w < kWindows; ++w) {
    const auto first =
        tokens.begin() + static_cast<std::ptrdiff_t>(w * kWindow);
    std::vector<int32_t> input(
        first, first + static_cast<std::ptrdiff_t>(kWindow) - 1);
    input[0] = 1;
    const int32_t sequence = *state->NewSequence();
    const auto logits =
        state->Forward({{sequence, input}}, LogitsOf::kAllTokens, executor);
    EXPECT_TRUE(logits.ok()) << logits.status();
    loss += NegativeLogLikelihood(*logits, absl::MakeConstSpan(tokens).subspan(
                                               w * kWindow + 1, kWindow - 1));
    EXPECT_TRUE(state->EndSequence(sequence).ok());
  }
  return loss / static_cast<double>(kWindows * (kWindow - 1));
}

TEST(QuantizeGgufTest, TheModelStaysAModelInEveryFormat) {
  const auto source = GgufFile::Open(kModel);
  ASSERT_TRUE(source.ok()) << source.status();
  const double loss = Loss(*source);
  std::printf("BF16 16 bits a weight: loss %.4f\n", loss);
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const std::string path = TempFile(absl::StrCat(info.name, ".gguf"));
    const Outcome outcome =
        Quantize(absl::StrCat(kModel, " ", path, " ", info.name));
    ASSERT_EQ(outcome.code, 0) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr("43 of 56 tensors are in blocks, "));
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(file->tensors().size(), source->tensors().size());
    for (size_t i = 0; i < file->tensors().size(); ++i) {
      const GgufTensor& tensor = file->tensors()[i];
      const GgufTensor& from = source->tensors()[i];
      EXPECT_EQ(tensor.name, from.name);
      EXPECT_EQ(tensor.dims, from.dims);
      EXPECT_EQ(static_cast<uint32_t>(tensor.type),
                from.type == GgufTensorType::kBF16
                    ? static_cast<uint32_t>(info.format)
                    : static_cast<uint32_t>(from.type));
    }
    for (const char* key : {"general.architecture", "tokenizer.ggml.tokens",
                            "llama.attention.layer_norm_rms_epsilon"}) {
      EXPECT_EQ(*file->KeyBytes(key), *source->KeyBytes(key));
    }
    const double exact = Loss(*file), more = exact - loss;
    if (info.format == BlockFormat::kTQ2_0) {
      // This model was not trained to be ternary: it guesses, at about ln(2048)
      // = 7.6 nats. Weights that are ternary come back (block_quantize_test).
      EXPECT_TRUE(exact > loss + 1 && exact < 10) << exact;
      continue;
    }
    const double int8 = Loss(*file, DecoderActivations::kInt8) - exact;
    std::printf("%s %.4f bits a weight: loss %+.4f; rows of int8 %+.4f\n",
                std::string(info.name).c_str(), info.bits_per_weight(), more,
                int8);
    // Measured: 0.52 nats more in Q2_K, 0.044 in Q3_K, and at most 0.033 in the
    // others. The bounds leave half as much again for the order of sums.
    const double bits = info.bits_per_weight();
    const double bound = bits < 3 ? 0.8 : bits < 4 ? 0.07 : 0.05;
    EXPECT_TRUE(std::abs(more) <= bound) << more;
    // Measured: 0.0012 at most. docs/numerics.md has what generate's default
    // rests on.
    EXPECT_TRUE(std::abs(int8) <= 0.005) << int8;
  }
}

TEST(QuantizeGgufTest, TheEmbeddingMayHaveAFormatOfItsOwn) {
  const std::string path = TempFile("mixed.gguf");
  const Outcome outcome =
      Quantize(absl::StrCat(kModel, " ", path, " q4_k q6_k"));
  ASSERT_EQ(outcome.code, 0) << outcome.text;
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file->FindTensor("token_embd.weight"))->type,
            GgufTensorType::kQ6_K);
  EXPECT_EQ((*file->FindTensor("blk.0.attn_q.weight"))->type,
            GgufTensorType::kQ4_K);
  // A file in blocks has nothing left to quantise.
  const Outcome again =
      Quantize(absl::StrCat(path, " ", TempFile("again.gguf"), " q4_0"));
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.text,
              HasSubstr("has no matrix of F32, F16 or BF16 whose rows are "
                        "whole blocks of 32 values"));
}

TEST(QuantizeGgufTest, RefusesWithASentence) {
  const std::string out = TempFile("refused.gguf");
  for (const auto& [arguments, code, words] :
       std::vector<std::tuple<std::string, int, std::string>>{
           {"a b", 2, "quantize_gguf: 2 arguments; need IN OUT FORMAT"},
           {"a b q4_2", 2,
            "quantize_gguf: format=q4_2; need one of Q4_0, Q4_1"},
           {"a b q4_0 x", 2, "quantize_gguf: format=x; need one of"},
           {absl::StrCat("no/such.gguf ", out, " q4_0"), 1,
            "gguf: cannot open"},
           {absl::StrCat(kModel, " ", kModel, " q4_0"), 1,
            "the file to write is the one to read"},
           {absl::StrCat(kModel, " ", TempFile("none/x"), " q4_0"), 1,
            "No such file or directory"}}) {
    const Outcome outcome = Quantize(arguments);
    EXPECT_EQ(outcome.code, code) << arguments;
    EXPECT_THAT(outcome.text, HasSubstr(words));
  }
  const Outcome help = Quantize("--help");
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.text, HasSubstr("quantize_gguf IN OUT FORMAT"));
}

}  // namespace
}  // namespace quern
