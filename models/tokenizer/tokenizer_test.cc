#include "quern/models/tokenizer/tokenizer.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/golden_testutil.h"
#include "quern/models/tokenizer/small_vocabulary_testutil.h"
#include "quern/models/tokenizer/text_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/files.h"

namespace quern {
namespace {

using ::testing::ElementsAre;

// The algorithm of the model's card as a plain quadratic loop.
std::vector<int32_t> ReferenceEncode(const Tokenizer& tokenizer,
                                     const TokenizerSpec& spec,
                                     std::vector<std::string> symbols) {
  const auto find = [&](const std::string& text) {
    for (size_t i = 0; i < spec.pieces.size(); ++i) {
      if (spec.types[i] == TokenType::kNormal && spec.pieces[i] == text) {
        return static_cast<int32_t>(i);
      }
    }
    return -1;
  };
  for (;;) {
    float best = -std::numeric_limits<float>::infinity();
    size_t at = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const int32_t id = find(symbols[i] + symbols[i + 1]);
      if (id >= 0 && (at == symbols.size() ||
                      spec.scores[static_cast<size_t>(id)] > best)) {
        best = spec.scores[static_cast<size_t>(id)];
        at = i;
      }
    }
    if (at == symbols.size()) break;
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& symbol : symbols) {
    if (find(symbol) >= 0) {
      ids.push_back(find(symbol));
    } else {
      for (const char c : symbol) ids.push_back(3 + static_cast<uint8_t>(c));
    }
  }
  EXPECT_EQ(tokenizer.vocab_size(), static_cast<int32_t>(spec.pieces.size()));
  return ids;
}

Tokenizer ShippedTokenizer() {
  auto file = GgufFile::Open(ModelFile("quern-kjv-4m.bf16.gguf"));
  EXPECT_TRUE(file.ok()) << file.status();
  auto tokenizer = Tokenizer::Create(*file);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(TokenizerTest, ReproducesTheGoldenCases) {
  const Tokenizer tokenizer = ShippedTokenizer();
  int cases = 0;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(
           FileBytes(ModelFile("tokenizer_golden.txt")), '\n'))) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ');
    if (fields.size() != 3) continue;
    ++cases;
    const std::string text = GoldenText(fields[0]);
    SCOPED_TRACE(text);
    const std::vector<int32_t> ids = GoldenIds(fields[1]);
    EXPECT_EQ(tokenizer.Encode(text), ids);
    EXPECT_EQ(tokenizer.Decode(ids), GoldenText(fields[2]));
  }
  EXPECT_EQ(cases, 24);
}

TEST(TokenizerTest, EncodesTheGoldenPrompts) {
  const Tokenizer tokenizer = ShippedTokenizer();
  const Golden golden = ReadGolden();
  ASSERT_EQ(golden.prompts.size(), 3u);
  for (const GoldenPrompt& prompt : golden.prompts) {
    std::vector<int32_t> ids = tokenizer.Encode(prompt.text);
    ids.insert(ids.begin(), tokenizer.bos_id());
    EXPECT_EQ(ids, prompt.ids);
    StreamDecoder decoder(tokenizer, StreamDecoder::Start::kAfterText);
    std::string text;
    for (const int32_t id : prompt.greedy_ids) text += decoder.Add(id);
    EXPECT_EQ(text + decoder.Finish(), prompt.greedy_text);
  }
}

TEST(TokenizerTest, RoundTripsAnyBytes) {
  TestRng rng;
  const Tokenizer tokenizer = ShippedTokenizer();
  const std::vector<std::string> parts = {
      "a",        " ",    "the ",     "\n",   "\xe2\x96",
      "\xc3\xa9", "\xff", "\xed\xa0", "\x80", "\xf0\x9f\x98\x80",
      "\xc0\xaf", "LORD"};
  for (int i = 0; i < 3000; ++i) {
    const std::string text = RandomText(rng, parts);
    const std::vector<int32_t> ids = tokenizer.Encode(text);
    ASSERT_EQ(tokenizer.Decode(ids),
              absl::StrReplaceAll(text, {{"\xe2\x96\x81", " "}}))
        << absl::StrCat("case ", i);
    for (const int32_t id : ids) {
      ASSERT_NE(tokenizer.type(id), TokenType::kControl);
      ASSERT_NE(tokenizer.type(id), TokenType::kUnknown);
    }
  }
}

TEST(TokenizerTest, TurnsEachInvalidByteIntoItsToken) {
  const Tokenizer tokenizer = ShippedTokenizer();
  const int32_t space = tokenizer.Encode(" ")[0];
  // Invalid UTF-8: a surrogate, an overlong slash, a lone continuation, a
  // cut-off character.
  EXPECT_THAT(tokenizer.Encode("\xed\xa0\x80\xc0\xaf\x80\xe2\x96"),
              ElementsAre(space, 3 + 0xed, 3 + 0xa0, 3 + 0x80, 3 + 0xc0,
                          3 + 0xaf, 3 + 0x80, 3 + 0xe2, 3 + 0x96));
}

TEST(TokenizerTest, JoinsTheHighestScoreFirstAndTheLeftmostOnATie) {
  // Few letters, colliding merges and equal scores make any wrong order show.
  const TokenizerSpec spec = SmallSpec({{"\u2581", 0},
                                        {"a", 0},
                                        {"b", 0},
                                        {"aa", -1},
                                        {"ab", -1},
                                        {"ba", -1},
                                        {"aba", -2},
                                        {"bb", -3},
                                        {"aaaa", -2},
                                        {"abab", -4},
                                        {"\u2581a", -3},
                                        {"bbb", 1}});
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  TestRng rng;
  for (int i = 0; i < 1000; ++i) {
    std::string text;
    std::vector<std::string> symbols = {"\u2581"};
    for (int64_t n = rng.Integer(1, 16); n > 0; --n) {
      const int64_t kind = rng.Integer(0, 8);
      text += kind == 0 ? " " : kind == 1 ? "c" : kind % 2 == 0 ? "a" : "b";
      symbols.push_back(text.back() == ' ' ? "\u2581"
                                           : text.substr(text.size() - 1));
    }
    ASSERT_EQ(tokenizer->Encode(text),
              ReferenceEncode(*tokenizer, spec, symbols))
        << text;
  }
}

// One long run without a space is the worst case of a quadratic algorithm,
// whose 2^40 steps would take longer than the test may.
TEST(TokenizerTest, EncodesAMegabyteWithoutASpace) {
  const Tokenizer tokenizer = ShippedTokenizer();
  const std::string text(1 << 20, 'x');
  EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text)), text);
}

TEST(TokenizerTest, WithoutASpacePrefixNothingIsAddedOrDropped) {
  TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}});
  spec.add_space_prefix = false;
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode(" a"), ElementsAre(259, 260));
  EXPECT_EQ(tokenizer->Decode({259, 260}), " a");
}

// Gemma-2's vocabulary has user-defined pieces: runs of spaces and newlines,
// and tags.
TEST(TokenizerTest, UserDefinedPiecesAreNeverSplit) {
  TokenizerSpec spec = SmallSpec({{"\u2581", 0},
                                  {"a", 0},
                                  {"b", 0},
                                  {"ab", 1},
                                  {"\u2581a", 2},
                                  {"<", 0},
                                  {"c", 0},
                                  {"bc", 3}});
  const auto add = [&](const char* piece, TokenType type) {
    spec.pieces.emplace_back(piece);
    spec.types.push_back(type);
    spec.scores.push_back(0);
    return static_cast<int32_t>(spec.pieces.size()) - 1;
  };
  const int32_t tag = add("<b>", TokenType::kUserDefined);
  const int32_t tags = add("<b><b>", TokenType::kUserDefined);
  const int32_t two = add("\u2581\u2581", TokenType::kUserDefined);
  const int32_t three = add("   ", TokenType::kUserDefined);
  const int32_t turn = add("<b>turn", TokenType::kControl);
  constexpr int32_t kSpaceId = 259, kA = 260, kB = 261, kSpaceA = 263, kC = 265;
  using Specials = Tokenizer::Specials;
  for (const Specials specials : {Specials::kAsText, Specials::kAsTokens}) {
    spec.add_space_prefix = false;
    const auto gemma = Tokenizer::Create(spec);
    ASSERT_TRUE(gemma.ok()) << gemma.status();
    const auto encode = [&](absl::string_view text) {
      return gemma->Encode(text, specials);
    };
    EXPECT_THAT(encode("a<b>b"), ElementsAre(kA, tag, kB));
    // No join crosses a user-defined piece: "bc" would win over "ab".
    EXPECT_THAT(encode("b<b>c"), ElementsAre(kB, tag, kC));
    EXPECT_THAT(encode("<b><b><b>"), ElementsAre(tags, tag));
    EXPECT_THAT(encode("<b"), ElementsAre(264, kB));
    EXPECT_THAT(encode("a  a"), ElementsAre(kA, two, kA));
    EXPECT_THAT(encode("a\u2581 a"), ElementsAre(kA, two, kA));
    EXPECT_THAT(encode("a     a"), ElementsAre(kA, three, two, kA));
    // The space in front is part of the text, as in SentencePiece.
    spec.add_space_prefix = true;
    const auto prefixed = Tokenizer::Create(spec);
    ASSERT_TRUE(prefixed.ok()) << prefixed.status();
    EXPECT_THAT(prefixed->Encode("<b>a", specials),
                ElementsAre(kSpaceId, tag, kA));
    EXPECT_THAT(prefixed->Encode(" a", specials), ElementsAre(two, kA));
    EXPECT_THAT(prefixed->Encode("a a", specials),
                ElementsAre(kSpaceA, kSpaceA));
    for (const char* text :
         {"<b>a", " a", "  a", "   ", "a<b> b", "<b>  <b>"}) {
      EXPECT_EQ(prefixed->Decode(prefixed->Encode(text, specials)), text);
      EXPECT_EQ(gemma->Decode(gemma->Encode(text, specials)), text);
    }
  }
  // A control token is plain text by default. With kAsTokens the longest one
  // wins.
  const auto tokenizer = Tokenizer::Create(spec);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("a<b>turn")), "a<b>turn");
  EXPECT_THAT(tokenizer->Encode("a<b>turna", Specials::kAsTokens),
              ElementsAre(kSpaceA, turn, kSpaceA));
}

// The text of the unknown token is that token where control tokens are.
TEST(TokenizerTest, TheUnknownTokenIsFoundAmongSpecials) {
  const auto tokenizer =
      Tokenizer::Create(SmallSpec({{"\u2581", 0}, {"a", 0}, {"\u2581a", 1}}));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode("a<unk>a", Tokenizer::Specials::kAsTokens),
              ElementsAre(261, 0, 261));
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("a<unk>a")), "a<unk>a");
}

// A text that begins with the token that begins texts gets no second one.
TEST(TokenizerTest, AWholeTextBeginsWithOneBos) {
  using Specials = Tokenizer::Specials;
  TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}, {"\u2581a", 1}});
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->EncodeText("a"), ElementsAre(1, 261));
  EXPECT_THAT(tokenizer->EncodeText(""), ElementsAre(1));
  EXPECT_THAT(tokenizer->EncodeText("<s>a", Specials::kAsTokens),
              ElementsAre(1, 261));
  EXPECT_THAT(tokenizer->EncodeText("a<s>", Specials::kAsTokens),
              ElementsAre(1, 261, 1));
  // Two that the text has are two.
  EXPECT_THAT(tokenizer->EncodeText("<s><s>", Specials::kAsTokens),
              ElementsAre(1, 1));
  // As text, "<s>" is bytes.
  EXPECT_EQ(tokenizer->EncodeText("<s>").size(),
            1 + tokenizer->Encode("<s>").size());
  spec.add_bos = false;
  const auto without = Tokenizer::Create(spec);
  EXPECT_THAT(without->EncodeText("a"), ElementsAre(261));
  EXPECT_THAT(without->EncodeText("<s>a", Specials::kAsTokens),
              ElementsAre(1, 261));
}

// A file may have one text a hundred thousand times. Testing each of them at
// each byte of a text would take minutes, longer than this test may run.
TEST(TokenizerTest, PiecesOfOneTextCostEncodeNothing) {
  TokenizerSpec spec = SmallSpec({{"\u2581", 0}, {"a", 0}});
  spec.add_space_prefix = false;
  const auto first = static_cast<int32_t>(spec.pieces.size());
  constexpr size_t kCopies = 1 << 18;
  spec.pieces.insert(spec.pieces.end(), kCopies, "b");
  spec.types.insert(spec.types.end(), kCopies, TokenType::kUserDefined);
  spec.scores.insert(spec.scores.end(), kCopies, 0.0f);
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  constexpr size_t kBytes = 1 << 18;
  EXPECT_EQ(tokenizer->Encode(std::string(kBytes, 'b')),
            std::vector<int32_t>(kBytes, first));
}

TEST(TokenizerTest, IdsOutsideTheVocabularyDecodeToNothing) {
  const Tokenizer tokenizer = ShippedTokenizer();
  EXPECT_EQ(tokenizer.Decode({-1, 2048, 0, 1, 2, 1 << 30}), "");
}

TEST(StreamDecoderTest, HoldsIncompleteCharactersBack) {
  const Tokenizer tokenizer = ShippedTokenizer();
  StreamDecoder decoder(tokenizer, StreamDecoder::Start::kAfterText);
  EXPECT_EQ(decoder.Add(3 + 0xf0), "");
  EXPECT_EQ(decoder.Add(3 + 0x9f), "");
  EXPECT_EQ(decoder.Add(3 + 0x98), "");
  EXPECT_EQ(decoder.Add(3 + 0x80), "\xf0\x9f\x98\x80");
  EXPECT_EQ(decoder.Add(3 + 0xff), "\xef\xbf\xbd");
  EXPECT_EQ(decoder.Add(3 + 0xc3), "");
  EXPECT_EQ(decoder.Add(3 + 'x'), "\xef\xbf\xbdx");
  EXPECT_EQ(decoder.Add(3 + 0xe2), "");
  EXPECT_EQ(decoder.Finish(), "\xef\xbf\xbd");
  EXPECT_EQ(decoder.Finish(), "");
}

TEST(StreamDecoderTest, EqualsDecodeOnValidText) {
  const Tokenizer tokenizer = ShippedTokenizer();
  for (const absl::string_view text :
       {"", " ", "  two", "In the beginning", "\xe6\x97\xa5\xe6\x9c\xac!", "\n",
        "caf\xc3\xa9 \xf0\x9f\x98\x80"}) {
    StreamDecoder decoder(tokenizer, StreamDecoder::Start::kOfText);
    std::string streamed = decoder.Add(tokenizer.bos_id());
    for (const int32_t id : tokenizer.Encode(text)) streamed += decoder.Add(id);
    EXPECT_EQ(streamed + decoder.Finish(), text);
  }
}

}  // namespace
}  // namespace quern
