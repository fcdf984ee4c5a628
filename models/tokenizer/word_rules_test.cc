// The words of every set of rules, against the regular expressions of the
// tokenizers that the rules are those of, applied by a backtracking matcher.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "quern/models/tokenizer/regex_testutil.h"
#include "quern/models/tokenizer/word_split.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

#define QUERN_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define QUERN_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define QUERN_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define QUERN_BEFORE "[^\\r\\n\\p{L}\\p{N}]?"
#define QUERN_SPACES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

constexpr char kGpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
    "|\\s+(?!\\S)|\\s+";

struct RulesCase {
  WordRules rules;
  std::vector<const char*> stages;
};

std::vector<RulesCase> AllRules() {
  return {
      {WordRules::kQwen2,
       {QUERN_CONTRACTIONS
        "|" QUERN_BEFORE
        "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" QUERN_SPACES}},
      {WordRules::kLlama3,
       {QUERN_CONTRACTIONS
        "|" QUERN_BEFORE
        "\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" QUERN_SPACES}},
      {WordRules::kQwen35,
       {QUERN_CONTRACTIONS "|" QUERN_BEFORE "[\\p{L}\\p{M}]+|\\p{N}| "
                           "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" QUERN_SPACES}},
      {WordRules::kSeedCoder,
       {QUERN_CONTRACTIONS
        "|" QUERN_BEFORE
        "\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" QUERN_SPACES}},
      {WordRules::kTekken,
       {QUERN_BEFORE QUERN_UPPER
        "*" QUERN_LOWER "+|" QUERN_BEFORE QUERN_UPPER "+" QUERN_LOWER
        "*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" QUERN_SPACES}},
      {WordRules::kGpt4o,
       {QUERN_BEFORE QUERN_UPPER
        "*" QUERN_LOWER "+" QUERN_CONTRACTIONS "?|" QUERN_BEFORE QUERN_UPPER
        "+" QUERN_LOWER "*" QUERN_CONTRACTIONS
        "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" QUERN_SPACES}},
      {WordRules::kGpt2, {kGpt2}},
      {WordRules::kGpt2Digits, {"\\p{N}", kGpt2}},
      {WordRules::kDeepSeekV3,
       {"\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\\r\\n]*" QUERN_SPACES}},
  };
}

// At least one character of each class that a rule tells from others.
constexpr CategorizedChar kChars[] = {
    {"a", "Ll"},        {"B", "Lu"},        {"\u00e9", "Ll"},
    {"\u01c5", "Lt"},   {"\u02b0", "Lm"},   {"\u4e2d", "Lo"},
    {"\u05d0", "Lo"},   {"\u309b", "Sk"},   {"1", "Nd"},
    {"\u00b2", "No"},   {" ", "Zs", true},  {"\n", "Cc", true},
    {"\r", "Cc", true}, {"\t", "Cc", true}, {"\u3000", "Zs", true},
    {"\u0301", "Mn"},   {"!", "Po"},        {"/", "Po"},
    {"'", "Po"},        {"s", "Ll"},        {"\u017f", "Ll"},
    {"E", "Lu"},        {"R", "Lu"},        {"+", "Sm"},
    {"\u3002", "Po"},   {"\u200b", "Cf"},   {"\U0001f600", "So"},
};

std::string Text(const CategorizedText& text) {
  std::string bytes;
  for (const CategorizedChar* c : text) bytes += c->utf8;
  return bytes;
}

std::string Words(WordRules rules, absl::string_view text) {
  std::vector<absl::string_view> words;
  while (!text.empty()) {
    words.push_back(text.substr(0, FirstWordBytes(rules, text)));
    if (words.back().empty()) return "a word without bytes";
    text.remove_prefix(words.back().size());
  }
  return absl::StrJoin(words, "|");
}

class WordRulesTest : public ::testing::TestWithParam<size_t> {
 protected:
  WordRulesTest() : rules_(AllRules()[GetParam()]) {
    for (const char* stage : rules_.stages) regexes_.emplace_back(stage);
  }

  void ExpectWords(const CategorizedText& text) const {
    std::vector<CategorizedText> pieces = {text};
    for (const TestRegex& regex : regexes_) pieces = CutByRegex(pieces, regex);
    ASSERT_EQ(Words(rules_.rules, Text(text)),
              absl::StrJoin(pieces, "|",
                            [](std::string* out, const CategorizedText& piece) {
                              *out += Text(piece);
                            }));
  }

  RulesCase rules_;
  std::vector<TestRegex> regexes_;
};

TEST_P(WordRulesTest, AreTheExpressionsOnShortTexts) {
  constexpr size_t kCount = std::size(kChars);
  for (size_t i = 0; i < kCount * kCount * kCount; ++i) {
    ExpectWords({&kChars[i % kCount], &kChars[i / kCount % kCount],
                 &kChars[i / kCount / kCount]});
    if (HasFatalFailure()) return;
  }
}

TEST_P(WordRulesTest, AreTheExpressionsOnLongerTexts) {
  TestRng rng;
  for (int i = 0; i < 10000; ++i) {
    // Few kinds of characters make runs of them.
    CategorizedText kinds, text;
    for (int64_t n = rng.Integer(1, 5); n > 0; --n) {
      kinds.push_back(&kChars[rng.Integer(0, std::size(kChars) - 1)]);
    }
    for (int64_t n = rng.Integer(1, 14); n > 0; --n) {
      text.push_back(kinds[static_cast<size_t>(
          rng.Integer(0, static_cast<int64_t>(kinds.size()) - 1))]);
    }
    ExpectWords(text);
    if (HasFatalFailure()) return;
  }
}

// A long text takes a moment, whatever it is made of.
TEST_P(WordRulesTest, TakeLinearTime) {
  for (const char* pattern : {"1 ", "  ", "a", "\u4f60,", "\u4f60\u30fb", "\n ",
                              "B", "aB", "\u200b", "!", "' "}) {
    std::string text;
    while (text.size() < 200000) text += pattern;
    size_t bytes = 0;
    for (absl::string_view rest = text; !rest.empty();) {
      const size_t word = FirstWordBytes(rules_.rules, rest);
      ASSERT_GE(word, 1u);
      rest.remove_prefix(word);
      bytes += word;
    }
    EXPECT_EQ(bytes, text.size());
  }
}

INSTANTIATE_TEST_SUITE_P(All, WordRulesTest,
                         ::testing::Range<size_t>(0, AllRules().size()));

TEST(WordRulesByHandTest, WordsByHand) {
  const struct {
    WordRules rules;
    const char* text;
    const char* words;
  } kCases[] = {
      // Marks belong to letters.
      {WordRules::kQwen35, "cafe\u0301s 12", "cafe\u0301s| |1|2"},
      {WordRules::kQwen2, "cafe\u0301s", "cafe|\u0301s"},
      // Signs leave newlines to what follows.
      {WordRules::kSeedCoder, "a!\n\nb", "a|!|\n\n|b"},
      {WordRules::kQwen2, "a!\n\nb", "a|!\n\n|b"},
      // Words end before an upper-case letter that follows a lower-case one.
      {WordRules::kTekken, "camelCase HTTPServer", "camel|Case| HTTPServer"},
      {WordRules::kTekken, "it's 2026//\n", "it|'s| |2|0|2|6|//\n"},
      {WordRules::kGpt4o, "it's I'M 2026//\n", "it's| I'M| |202|6|//\n"},
      // A mark ends a lower-case word even before upper-case letters.
      {WordRules::kGpt4o, "\u0301AB", "\u0301|AB"},
      {WordRules::kGpt2Digits, "in 2026, x1", "in| |2|0|2|6|,| x|1"},
      {WordRules::kGpt2Digits, "a  1", "a|  |1"},
      {WordRules::kGpt2, "a  1", "a| | 1"},
      // Signs of ASCII go with the letters behind them.
      {WordRules::kDeepSeekV3, "f(x_i) 12345", "f|(x|_i|)| |123|45"},
      {WordRules::kDeepSeekV3, "\u4f60\u597d\uff0cworld\u3002",
       "\u4f60\u597d|\uff0c|world|\u3002"},
      {WordRules::kDeepSeekV3, "\u200b\u200ba\u200b", "\u200b|\u200ba|\u200b"},
      {WordRules::kDeepSeekV3, "\u30c6\u30fb\u30c6a", "\u30c6|\u30fb|\u30c6|a"},
      {WordRules::kDeepSeekV3, "a\xff\xfe!", "a|\xff\xfe!"},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(Words(c.rules, c.text), c.words) << c.text;
  }
}

}  // namespace
}  // namespace quern
