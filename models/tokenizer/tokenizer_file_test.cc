// Tokenizers of files: ends of a text, flags, and vocabularies that are
// refused.

#include <cmath>
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
#include "quern/models/tokenizer/small_vocabulary_testutil.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Creates the tokenizer of a file with the pieces of `spec` and the keys of
// `add_keys`.
template <typename AddKeys>
absl::StatusOr<Tokenizer> CreateFromFile(const TokenizerSpec& spec,
                                         const AddKeys& add_keys) {
  std::vector<int32_t> types;
  for (const TokenType type : spec.types) {
    types.push_back(static_cast<int32_t>(type));
  }
  GgufWriter writer;
  writer.Key("tokenizer.ggml.model", "llama")
      .Key("tokenizer.ggml.tokens", spec.pieces)
      .Key("tokenizer.ggml.scores", spec.scores)
      .Key("tokenizer.ggml.token_type", types);
  add_keys(writer);
  const std::string bytes = writer.Finish();
  const auto file = GgufFile::Parse(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  EXPECT_TRUE(file.ok()) << file.status();
  return Tokenizer::Create(*file);
}

// gpt-oss ends a part of its turn, such as its thoughts, by <|end|>, and the
// turn by <|return|>.
TEST(TokenizerFileTest, APartOfATurnIsNoEnd) {
  for (const bool has_return : {false, true}) {
    TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}});
    for (const char* piece : {"<|end|>", has_return ? "<|return|>" : "<x>"}) {
      spec.pieces.emplace_back(piece);
      spec.types.push_back(TokenType::kControl);
      spec.scores.push_back(0);
    }
    const auto tokenizer = CreateFromFile(spec, [](GgufWriter&) {});
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto last = tokenizer->vocab_size() - 1;
    EXPECT_EQ(tokenizer->IsEnd(last - 1), !has_return);
    EXPECT_EQ(tokenizer->IsEnd(last), has_return);
  }
}

// A text ends at the tokens that the file's keys name, and at control and
// user-defined pieces whose names end turns.
TEST(TokenizerFileTest, EveryEndOfTheFileIsAnEnd) {
  TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}, {"b", 0}, {"c", 0}});
  std::vector<int32_t> ends;
  for (const char* piece :
       {"<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
        "<|endoftext|>", "<|end|>", "<|end_of_text|>", "<|call|>", "<turn|>",
        "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]"}) {
    ends.push_back(static_cast<int32_t>(spec.pieces.size()));
    spec.pieces.emplace_back(piece);
    spec.types.push_back(ends.size() % 2 == 0 ? TokenType::kControl
                                              : TokenType::kUserDefined);
    spec.scores.push_back(0);
  }
  spec.pieces.emplace_back("<end>");
  spec.types.push_back(TokenType::kControl);
  spec.scores.push_back(0);
  const auto create = [&](auto&& add_keys) {
    return CreateFromFile(spec, add_keys);
  };
  const auto tokenizer = create([](GgufWriter& w) {
    w.Key("tokenizer.ggml.eos_token_id", 260u)
        .Key("tokenizer.ggml.eot_token_id", 261u)
        .Key("tokenizer.ggml.eom_token_id", 262u);
  });
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->eos_id(), 260);
  std::vector<int32_t> want = {260, 261, 262}, got;
  want.insert(want.end(), ends.begin(), ends.end());
  for (int32_t id = -1; id <= tokenizer->vocab_size(); ++id) {
    if (tokenizer->IsEnd(id)) got.push_back(id);
  }
  EXPECT_EQ(got, want);
  // Pieces that end a turn become control tokens, so that a user who writes one
  // ends nothing.
  for (const int32_t id : ends) {
    EXPECT_EQ(tokenizer->type(id), TokenType::kControl) << id;
  }
  for (const int32_t id : tokenizer->Encode("a<end_of_turn><|im_end|>")) {
    EXPECT_FALSE(tokenizer->IsEnd(id) && id != 260) << id;
  }
  // A piece of any other name becomes a control token too if a key of the file
  // names it.
  const auto end = static_cast<uint32_t>(spec.pieces.size() - 1);  // <end>
  spec.types[end] = TokenType::kUserDefined;
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    SCOPED_TRACE(key);
    const auto named = create([&](GgufWriter& w) {
      w.Key(absl::StrCat("tokenizer.ggml.", key), end);
    });
    ASSERT_TRUE(named.ok()) << named.status();
    for (const int32_t id : named->Encode("a<end>")) {
      EXPECT_FALSE(named->IsEnd(id)) << id;
    }
    EXPECT_EQ(named->Encode("<end>", Tokenizer::Specials::kAsTokens),
              std::vector<int32_t>{static_cast<int32_t>(end)});
  }
  for (const char* key : {"eot_token_id", "eom_token_id"}) {
    const std::string name = absl::StrCat("tokenizer.ggml.", key);
    const auto refused = create([&](GgufWriter& w) {
      w.Key(name, static_cast<uint32_t>(spec.pieces.size()));
    });
    EXPECT_THAT(std::string(refused.status().message()),
                HasSubstr(absl::StrCat("tokenizer: ", name, "=",
                                       spec.pieces.size(), "; need 0 <= ", name,
                                       " <= ", spec.pieces.size() - 1)));
  }
}

TEST(TokenizerFileTest, ReadsTheFlagsOfAFile) {
  const TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}});
  const auto create = [&](auto&& add_keys) {
    return CreateFromFile(spec, add_keys);
  };
  const auto absent = create([](GgufWriter&) {});
  ASSERT_TRUE(absent.ok()) << absent.status();
  EXPECT_TRUE(absent->add_bos());
  EXPECT_THAT(absent->Encode("a"), ElementsAre(259, 260));
  const auto off = create([](GgufWriter& w) {
    w.Key("tokenizer.ggml.add_bos_token", false)
        .Key("tokenizer.ggml.add_space_prefix", false);
  });
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_FALSE(off->add_bos());
  EXPECT_THAT(off->Encode("a"), ElementsAre(260));
  const auto on = create(
      [](GgufWriter& w) { w.Key("tokenizer.ggml.add_bos_token", true); });
  ASSERT_TRUE(on.ok()) << on.status();
  EXPECT_TRUE(on->add_bos());
  const auto wrong =
      create([](GgufWriter& w) { w.Key("tokenizer.ggml.add_bos_token", 1u); });
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr("key 'tokenizer.ggml.add_bos_token' is of type u32; "
                        "need bool"));
}

TEST(TokenizerFileTest, RefusesHostileVocabularies) {
  const TokenizerSpec good = SmallSpec({{"\u2581", 0}, {"a", 0}});
  ASSERT_TRUE(Tokenizer::Create(good).ok());
  const auto expect_refused = [&](auto&& change, absl::string_view words) {
    TokenizerSpec spec = good;
    change(spec);
    const auto tokenizer = Tokenizer::Create(std::move(spec));
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tokenizer.status().message()),
                HasSubstr(std::string(words)));
  };
  expect_refused([](TokenizerSpec& s) { s = {}; },
                 "tokenizer: pieces=0; need 1 <= pieces <= 16777216");
  expect_refused([](TokenizerSpec& s) { s.scores.pop_back(); },
                 "tokenizer: scores=260; need 261, as there are pieces");
  expect_refused([](TokenizerSpec& s) { s.types.pop_back(); },
                 "tokenizer: types=260; need 261");
  expect_refused([](TokenizerSpec& s) { s.scores[260] = std::nanf(""); },
                 "piece 260 'a' has score NaN");
  expect_refused(
      [](TokenizerSpec& s) { s.types[260] = static_cast<TokenType>(7); },
      "piece 260 'a' has type 7; need 1..6");
  expect_refused([](TokenizerSpec& s) { s.types[260] = TokenType::kByte; },
                 "piece 260 'a' has type byte; need <0x00>..<0xFF>");
  expect_refused([](TokenizerSpec& s) { s.pieces[3] = "<0x01>"; },
                 "piece 4 '<0x01>' is also piece 3");
  expect_refused([](TokenizerSpec& s) { s.pieces[3] = "<0x0g>"; },
                 "need <0x00>..<0xFF>");
  expect_refused([](TokenizerSpec& s) { s.types[3] = TokenType::kUnused; },
                 "no token for byte 0");
  expect_refused([](TokenizerSpec& s) { s.pieces[260] = "\u2581"; },
                 "is also piece 259");
  expect_refused([](TokenizerSpec& s) { s.pieces[260] = ""; },
                 "piece 260 '' is empty or not UTF-8");
  expect_refused([](TokenizerSpec& s) { s.pieces[260] = "\xc3"; },
                 "piece 260 '\\xc3' is empty or not UTF-8");
  expect_refused([](TokenizerSpec& s) { s.pieces[259] = "b"; },
                 "no piece U+2581");
  expect_refused([](TokenizerSpec& s) { s.bos_id = 261; },
                 "bos_id=261; need 0 <= bos_id <= 260");
  expect_refused([](TokenizerSpec& s) { s.eos_id = -1; }, "eos_id=-1");
  expect_refused(
      [](TokenizerSpec& s) {
        s.end_ids = {2, 261};
      },
      "end_ids=261; need 0 <= end_ids <= 260");
  for (const TokenType type : {TokenType::kControl, TokenType::kUserDefined}) {
    expect_refused(
        [&](TokenizerSpec& s) {
          s.pieces[260] = std::string(1025, 'x');
          s.types[260] = type;
        },
        "' has 1025 bytes; need at most 1024 of a control, unknown or "
        "user-defined");
  }
}

}  // namespace
}  // namespace quern
