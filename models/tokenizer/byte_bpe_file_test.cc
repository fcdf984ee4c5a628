// Byte-level vocabularies of files: rules and flags, damaged files, refusals.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/tokenizer/small_merges_testutil.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ByteBpeFileTest : public ::testing::Test {
 protected:
  // Makes a file of the small vocabulary without the key `without`, plus what
  // `add` writes, and creates its tokenizer.
  template <typename Add>
  absl::StatusOr<Tokenizer> Create(const Add& add, absl::string_view pre,
                                   absl::string_view without = "") {
    return Create(SmallSpec(SmallMerges()), add, pre, without);
  }
  template <typename Add>
  absl::StatusOr<Tokenizer> Create(const TokenizerSpec& spec, const Add& add,
                                   absl::string_view pre,
                                   absl::string_view without = "") {
    std::vector<int32_t> types;
    for (const TokenType type : spec.types) {
      types.push_back(static_cast<int32_t>(type));
    }
    GgufWriter writer;
    writer.Key("tokenizer.ggml.model", "gpt2")
        .Key("tokenizer.ggml.tokens", spec.pieces)
        .Key("tokenizer.ggml.token_type", types);
    if (without != "merges") writer.Key("tokenizer.ggml.merges", spec.merges);
    if (without != "pre") {
      writer.Key("tokenizer.ggml.pre", std::string(pre).c_str());
    }
    if (without != "eos") writer.Key("tokenizer.ggml.eos_token_id", 265u);
    add(writer);
    bytes_ = writer.Finish();
    const auto file = GgufFile::Parse(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size()));
    EXPECT_TRUE(file.ok()) << file.status();
    return Tokenizer::Create(*file);
  }

  static void Nothing(GgufWriter&) {}

  std::string bytes_;
};

TEST_F(ByteBpeFileTest, ReadsRulesAndFlags) {
  const auto qwen = Create(&Nothing, "qwen2");
  ASSERT_TRUE(qwen.ok()) << qwen.status();
  EXPECT_EQ(qwen->vocab_size(), 268);
  EXPECT_EQ(qwen->bos_id(), -1);
  EXPECT_EQ(qwen->eos_id(), kEnd);
  EXPECT_FALSE(qwen->add_bos());
  EXPECT_THAT(qwen->Encode("the'T 12"),
              ElementsAre(kThe, '\'', 'T', ' ', '1', '2'));
  const auto bos = [](GgufWriter& writer) {
    writer.Key("tokenizer.ggml.bos_token_id", 266u);
  };
  const auto llama = Create(bos, "llama-bpe");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_TRUE(llama->add_bos());
  EXPECT_EQ(llama->bos_id(), 266);
  const auto off = Create(
      [&](GgufWriter& writer) {
        writer.Key("tokenizer.ggml.add_bos_token", false);
      },
      "llama-bpe");
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_FALSE(off->add_bos());
  const auto lfm2 = Create(bos, "lfm2");  // the rules of llama-bpe
  ASSERT_TRUE(lfm2.ok()) << lfm2.status();
  EXPECT_TRUE(lfm2->add_bos());
  EXPECT_EQ(lfm2->Encode("the'T 12"), llama->Encode("the'T 12"));
  const auto deepseek = Create(bos, "deepseek-llm");
  ASSERT_TRUE(deepseek.ok()) << deepseek.status();
  EXPECT_FALSE(deepseek->add_bos());
  EXPECT_EQ(deepseek->bos_id(), 266);
  EXPECT_THAT(deepseek->Encode("the the 12"),
              ElementsAre(kThe, kSpaceThe, ' ', '1', '2'));
  const auto gpt = Create(bos, "gpt-2");
  ASSERT_TRUE(gpt.ok()) << gpt.status();
  EXPECT_FALSE(gpt->add_bos());
}

// Names whose words are cut as another's. The text is cut differently by each
// of the rules, and "hen" is a piece that no merge makes.
TEST_F(ByteBpeFileTest, NamesStandForRules) {
  const std::string text = " the 1234'T hen\r\n\n x aB!\n e\u0301";
  std::vector<std::vector<int32_t>> different;
  const struct {
    const char* first;
    std::vector<const char*> others;
    bool adds_bos;
  } kNames[] = {
      {"llama-bpe",
       {"llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral",
        "midm-2.0"},
       true},
      {"dbrx", {"smaug-bpe", "chatglm-bpe", "glm4"}, false},
      {"qwen2",
       {"deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open",
        "kormo", "grok-2", "bailingmoe"},
       false},
      {"gpt-2",
       {"phi-2", "exaone4", "olmo", "mpt", "gigachat", "a.x-4.0", "mellum",
        "jais", "trillion", "granite-docling"},
       false},
      {"qwen35", {}, false},
      {"seed-coder", {}, false},
      {"tekken", {}, true},
      {"gpt-4o", {"llama4", "kanana2", "minimax-m2"}, false},
      {"smollm",
       {"refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b",
        "mellum2"},
       false},
      {"deepseek-v3", {"hunyuan-dense", "joyai-llm"}, false},
      {"deepseek-llm", {}, false},
  };
  const auto create = [this](const char* name) {
    TokenizerSpec spec =
        SmallSpec({"t h", "e n", "1 2", "12 3", "' T", "\u010d \u010a",
                   "\u010a \u010a", "\u0120 1", "a B", "! \u010a", "e \u00cc"});
    spec.pieces.emplace_back("\u0120hen");
    spec.types.push_back(TokenType::kNormal);
    return Create(
        spec, [](GgufWriter& w) { w.Key("tokenizer.ggml.bos_token_id", 265u); },
        name);
  };
  for (const auto& names : kNames) {
    const auto first = create(names.first);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(first->add_bos(), names.adds_bos) << names.first;
    const std::vector<int32_t> ids = first->Encode(text);
    EXPECT_EQ(std::find(different.begin(), different.end(), ids),
              different.end())
        << names.first << " cuts as another";
    different.push_back(ids);
    for (const char* name : names.others) {
      const auto other = create(name);
      ASSERT_TRUE(other.ok()) << other.status();
      EXPECT_EQ(other->Encode(text), ids) << name;
      EXPECT_EQ(other->add_bos(), names.adds_bos) << name;
    }
  }
}

// Files with flipped, overwritten or cut bytes are refused, or give a tokenizer
// that works.
TEST_F(ByteBpeFileTest, DamagedFilesDoNotBreakIt) {
  ASSERT_TRUE(Create(&Nothing, "qwen2").ok());
  const std::string good = bytes_;
  const std::string text = "the 'S \xff\r\n12<|end|><tool> aaab\u6f22";
  TestRng rng;
  const auto any = [&](size_t size) {
    return static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(size) - 1));
  };
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = good;
    for (int64_t n = rng.Integer(1, 3); n > 0; --n) {
      const size_t at = any(bytes.size());
      switch (rng.Integer(0, 3)) {
        case 0:
          bytes[at] = static_cast<char>(rng.Next());
          break;
        case 1:
          bytes[at] = bytes[any(bytes.size())];
          break;
        case 2:
          std::swap(bytes[at], bytes[any(bytes.size())]);
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.Integer(0, 7)));
      }
    }
    if (rng.Integer(0, 15) == 0) bytes.resize(any(bytes.size()));
    const auto file = GgufFile::Parse(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
    if (!file.ok()) continue;
    const auto tokenizer = Tokenizer::Create(*file);
    if (!tokenizer.ok()) continue;
    ++accepted;
    ASSERT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text) << i;
    for (const int32_t id :
         tokenizer->Encode(text, Tokenizer::Specials::kAsTokens)) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer->vocab_size());
    }
  }
  EXPECT_GT(accepted, 30);  // too few test only the file reader
  EXPECT_LT(accepted, 2700);
}

TEST_F(ByteBpeFileTest, RefusesWhatItCannotRead) {
  const auto message = [](const absl::StatusOr<Tokenizer>& tokenizer,
                          absl::StatusCode code) {
    EXPECT_EQ(tokenizer.status().code(), code);
    return std::string(tokenizer.status().message());
  };
  EXPECT_THAT(
      message(Create(&Nothing, "qwen\xff"), absl::StatusCode::kUnimplemented),
      HasSubstr("tokenizer: tokenizer.ggml.pre is 'qwen\\xff'; need one of "
                "llama-bpe, llama3, "));
  EXPECT_EQ(message(Create(&Nothing, "qwen2", "pre"),
                    absl::StatusCode::kInvalidArgument),
            "tokenizer: no key 'tokenizer.ggml.pre', which says how text is "
            "cut into words; need a file from a newer converter");
  for (const char* key : {"pre", "merges"}) {
    EXPECT_THAT(message(Create(&Nothing, "qwen2", key),
                        absl::StatusCode::kInvalidArgument),
                HasSubstr(absl::StrCat("tokenizer.ggml.", key)));
  }
  EXPECT_THAT(message(Create(&Nothing, "qwen2", "eos"),
                      absl::StatusCode::kInvalidArgument),
              HasSubstr("tokenizer.ggml.eos_token_id"));
  EXPECT_THAT(message(Create(&Nothing, "llama-bpe"),
                      absl::StatusCode::kInvalidArgument),
              HasSubstr("bos_id=-1; need 0 <= bos_id <= 267"));
  EXPECT_THAT(message(Create(
                          [](GgufWriter& w) {
                            w.Key("tokenizer.ggml.bos_token_id", 0xffffffffu);
                          },
                          "qwen2"),
                      absl::StatusCode::kInvalidArgument),
              HasSubstr("tokenizer.ggml.bos_token_id=4294967295; need 0 <= "));
}

}  // namespace
}  // namespace quern
