// Deterministic fuzzing of the GGUF reader: small legal files and the header of
// the shipped model are cut, flipped, overwritten with extreme numbers and
// spliced. Nothing may crash, hang, or allocate more than a multiple of the
// file; what is accepted must be readable to its last byte.
//
// QUERN_TEST_SEED=n gives other mutations; a failure prints the seed and saves
// nothing, because the same seed makes the same bytes. QUERN_FUZZ_CASES=n
// sets how many.

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

// Calls everything that a caller may call. Returns whether the file is legal.
bool Exercise(const uint8_t* data, size_t size) {
  const auto file = GgufFile::Parse(absl::MakeConstSpan(data, size));
  if (!file.ok()) {
    EXPECT_TRUE(absl::StartsWith(file.status().message(), "gguf: "))
        << file.status();
    return false;
  }
  int64_t total = 0;
  for (const GgufTensor& tensor : file->tensors()) {
    total += tensor.bytes;
    std::vector<uint8_t> raw(static_cast<size_t>(tensor.bytes));
    EXPECT_TRUE(file->ReadPartBytes(tensor,
                                    {0, tensor.rows(), 0, tensor.cols()},
                                    absl::MakeSpan(raw))
                    .ok());
    // No format has four elements per byte (TQ2_0 has 3.88), so a small file
    // cannot make the test allocate much.
    EXPECT_LT(tensor.elements, 4 * tensor.bytes);
    std::vector<float> values(static_cast<size_t>(tensor.elements));
    EXPECT_TRUE(file->ReadRows(tensor, 0, absl::MakeSpan(values)).ok());
  }
  EXPECT_LE(total, static_cast<int64_t>(size));
  // Some of these keys are missing or have other types; reading them must not
  // crash.
  for (const absl::string_view key :
       {"k.u32", "k.f32", "k.bool", "k.string", "k.strings", "k.floats",
        "k.ints", "general.alignment"}) {
    (void)file->GetU32(key).ok();
    (void)file->GetInt(key).ok();
    (void)file->GetF32(key).ok();
    (void)file->GetBool(key).ok();
    (void)file->GetString(key).ok();
    const auto strings = file->GetStrings(key);
    if (strings.ok()) {
      for (const absl::string_view s : *strings) EXPECT_LE(s.size(), size);
    }
    (void)file->GetF32s(key).ok();
    (void)file->GetI32s(key).ok();
  }
  const auto tokenizer = Tokenizer::Create(*file);
  if (tokenizer.ok()) {
    std::string text;
    for (const int32_t id : tokenizer->Encode("In the \xff beginning")) {
      text += tokenizer->Decode(absl::MakeConstSpan(&id, 1));
    }
  }
  return true;
}

std::string SmallFile() {
  GgufWriter writer;
  writer.Key("general.alignment", 32u)
      .Key("k.u32", 7u)
      .Key("k.f32", 1.5f)
      .Key("k.bool", true)
      .Key("k.string", "text")
      .Key("k.strings", std::vector<std::string>{"", "one", "two"})
      .Key("k.floats", std::vector<float>{1, -2})
      .Key("k.ints", std::vector<int32_t>{3, 4, 5})
      .Tensor("a", {3, 2}, GgufTensorType::kF32, std::string(24, '\1'))
      .Tensor("b", {5}, GgufTensorType::kBF16, std::string(10, '\2'))
      .Tensor("c", {32, 2}, GgufTensorType::kQ8_0, std::string(68, '\3'));
  return writer.Finish();
}

// A tensor of each block format.
std::string BlocksFile() {
  GgufWriter writer;
  for (const BlockFormatInfo& info : BlockFormats()) {
    writer.Tensor(info.name, {static_cast<uint64_t>(info.values), 2},
                  static_cast<GgufTensorType>(info.format),
                  std::string(static_cast<size_t>(2 * info.bytes), '\5'));
  }
  return writer.Finish();
}

// Metadata of a tokenizer: the bytes, and a few merges.
std::string SmallTokenizer() {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  for (int b = 0; b < 256; ++b) {
    static constexpr char kHex[] = "0123456789ABCDEF";
    tokens.push_back(std::string("<0x") + kHex[b / 16] + kHex[b % 16] + ">");
    types.push_back(6);
  }
  for (const char* piece : {"\u2581", "I", "n", "\u2581I", "\u2581In", "th"}) {
    tokens.emplace_back(piece);
    types.push_back(1);
  }
  std::vector<float> scores(tokens.size(), 0.0f);
  GgufWriter writer;
  writer.Key("tokenizer.ggml.model", "llama")
      .Key("tokenizer.ggml.tokens", tokens)
      .Key("tokenizer.ggml.scores", scores)
      .Key("tokenizer.ggml.token_type", types)
      .Key("tokenizer.ggml.bos_token_id", 1u)
      .Key("tokenizer.ggml.eos_token_id", 2u);
  return writer.Finish();
}

std::string ModelHead() {
  std::ifstream in("models/quern_kjv_4m/quern-kjv-4m.bf16.gguf",
                   std::ios::binary);
  std::string head(64 << 10, '\0');
  in.read(&head[0], static_cast<std::streamsize>(head.size()));
  EXPECT_TRUE(in.good());
  return head;
}

TEST(GgufFuzzTest, SmallFilesSurviveMutation) {
  TestRng rng;
  const std::vector<std::string> corpus = {SmallFile(), SmallTokenizer(),
                                           BlocksFile()};
  for (const std::string& file : corpus) {
    ASSERT_TRUE(
        Exercise(reinterpret_cast<const uint8_t*>(file.data()), file.size()));
  }
  const int64_t cases = Cases(500, 20000);
  int64_t legal = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    // The mutant lies on the heap in its exact size, so that a sanitizer
    // notices a read of one byte too many.
    const std::string mutant =
        Mutate(rng, corpus[At(rng, corpus.size())], corpus);
    const std::vector<uint8_t> bytes(mutant.begin(), mutant.end());
    legal += Exercise(bytes.data(), bytes.size()) ? 1 : 0;
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
  // If all mutants were refused or all accepted, the mutations would test
  // little.
  EXPECT_GT(legal, cases / 100);
  EXPECT_LT(legal, cases * 9 / 10);
}

TEST(GgufFuzzTest, TheModelsHeaderSurvivesMutation) {
  TestRng rng;
  const std::vector<std::string> corpus = {ModelHead(), SmallFile()};
  const int64_t cases = Cases(50, 2000);
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    const std::string mutant = Mutate(rng, corpus[0], corpus);
    const std::vector<uint8_t> bytes(mutant.begin(), mutant.end());
    Exercise(bytes.data(), bytes.size());
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
}

TEST(GgufFuzzTest, NoiseIsRefused) {
  TestRng rng;
  for (int i = 0; i < 2000; ++i) {
    std::vector<uint8_t> bytes(static_cast<size_t>(rng.Integer(0, 300)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.Next());
    EXPECT_FALSE(Exercise(bytes.data(), bytes.size()));
  }
}

}  // namespace
}  // namespace quern
