#include "quern/models/tokenizer/word_split.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

// Joins the words of `text` by '|'.
std::string Split(WordRules rules, absl::string_view text) {
  std::vector<absl::string_view> words;
  while (!text.empty()) {
    words.push_back(text.substr(0, FirstWordBytes(rules, text)));
    text.remove_prefix(words.back().size());
  }
  return absl::StrJoin(words, "|");
}

struct Case {
  const char* text;
  const char* qwen2;
  const char* llama3 = nullptr;  // null: the same as qwen2
  const char* gpt2 = nullptr;
};

constexpr Case kCases[] = {
    {"", ""},
    {"Hello world", "Hello| world"},
    {"Hello, world!", "Hello|,| world|!"},
    // One character before letters belongs to their word, whatever it is.
    {"(a) $b\tc", "(a|)| $|b|\tc", nullptr, "(|a|)| $|b|\t|c"},
    {"a.b", "a|.b", nullptr, "a|.|b"},
    {"..ab", "..|ab"},
    {"\u3000\u6f22\u5b57", "\u3000\u6f22\u5b57", nullptr,
     "\u3000|\u6f22\u5b57"},
    // A number or a newline before letters is a word of its own.
    {"1a", "1|a"},
    {"\na", "\n|a"},
    {"\ra", "\r|a"},
    // Contractions in any case; GPT-2 knows only lower case.
    {"I'm you're he'll", "I|'m| you|'re| he|'ll"},
    {"I'M YOU'RE HE'Ll", "I|'M| YOU|'RE| HE|'Ll", nullptr,
     "I|'|M| YOU|'|RE| HE|'|Ll"},
    {"'s't've'd", "'s|'t|'ve|'d"},
    {"it'\u017f", "it|'\u017f", nullptr, "it|'|\u017f"},
    {"it'\u017fx", "it|'\u017f|x", nullptr, "it|'|\u017fx"},
    {"'sun 'lx 'r", "'s|un| '|lx| '|r"},
    {"'less", "'less", nullptr, "'|less"},
    {"' s", "'| s"},
    {"'", "'"},
    {"'r", "'r", nullptr, "'|r"},
    {"\u2019s", "\u2019s", nullptr, "\u2019|s"},
    // Numbers are cut one by one, by threes, or not at all; only GPT-2 adds a
    // space.
    {"12345", "1|2|3|4|5", "123|45", "12345"},
    {"a 12", "a| |1|2", "a| |12", "a| 12"},
    {"x2\u00b2\u2163\u0663", "x|2|\u00b2|\u2163|\u0663",
     "x|2\u00b2\u2163|\u0663", "x|2\u00b2\u2163\u0663"},
    // Other characters take a space in front and newlines behind.
    {" ... \n", " ...| \n", nullptr, " ...| \n"},
    {"!\n\n a", "!\n\n| a", nullptr,
     "!|\n\n|"
     " a"},
    {"!\r\n\t!", "!\r\n|\t|!", nullptr, "!|\r\n|\t|!"},
    {"\t!", "\t|!"},
    {"  !", " | !"},
    {"e\u0301a", "e|\u0301a", nullptr, "e|\u0301|a"},
    {"\U0001f600\U0001f44d\U0001f3fd ok", "\U0001f600\U0001f44d\U0001f3fd| ok"},
    // White space is cut after the last newline of a run, or before the last
    // character in front of text, and is taken whole at the end.
    {"a  b", "a| | b"},
    {"a   ", "a|   "},
    {"a \n b", "a| \n| b", nullptr, "a| \n| b"},
    {"a \r b", "a| \r| b"},
    {"a \n\n  b", "a| \n\n| | b", nullptr, "a| \n\n | b"},
    {"a\n\nb", "a|\n\n|b", nullptr, "a|\n|\n|b"},
    {"a\n \n  ", "a|\n \n|  ", nullptr, "a|\n \n  "},
    {"a\u00a0\u00a0b", "a|\u00a0|\u00a0b", nullptr, "a|\u00a0|\u00a0|b"},
    {"a\u2003\u20031", "a|\u2003|\u2003|1"},
    {"\u0085x", "\u0085x", nullptr, "\u0085|x"},
    {"\v\f\n", "\v\f\n"},
    // Each byte that is not part of valid UTF-8 counts as punctuation.
    {"a\xff\xfe b", "a|\xff\xfe| b"},
    {"\xff"
     "a",
     "\xff"
     "a",
     nullptr, "\xff|a"},
    {" \xed\xa0\x80\n", " \xed\xa0\x80\n", nullptr, " \xed\xa0\x80|\n"},
    {"\xe2\x96", "\xe2\x96"},
    {"'\xc5", "'\xc5"},
};

TEST(WordSplitTest, SplitsByHand) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(Split(WordRules::kQwen2, c.text), c.qwen2);
    EXPECT_EQ(Split(WordRules::kLlama3, c.text), c.llama3 ? c.llama3 : c.qwen2);
    EXPECT_EQ(Split(WordRules::kGpt2, c.text), c.gpt2 ? c.gpt2 : c.qwen2);
  }
}

TEST(WordSplitTest, EveryWordHasBytesAndStaysInTheText) {
  TestRng rng;
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (int64_t n = rng.Integer(0, 12); n > 0; --n) {
      text += static_cast<char>(rng.Next());
    }
    for (int last = static_cast<int>(WordRules::kDeepSeekLlm), r = 0; r <= last;
         ++r) {
      const auto rules = static_cast<WordRules>(r);
      for (absl::string_view rest = text; !rest.empty();) {
        const size_t bytes = FirstWordBytes(rules, rest);
        ASSERT_GE(bytes, 1u);
        ASSERT_LE(bytes, rest.size());
        rest.remove_prefix(bytes);
      }
    }
  }
  EXPECT_EQ(FirstWordBytes(WordRules::kQwen2, ""), 0u);
}

}  // namespace
}  // namespace quern
