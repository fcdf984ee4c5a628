#include "quern/models/tokenizer/word_split.h"

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/strings/string_view.h"
#include "quern/models/tokenizer/deepseek_words.h"
#include "quern/models/tokenizer/unicode_class.h"
#include "quern/models/tokenizer/utf8.h"

namespace quern {
namespace {

// A character of the text. Past the end of the text it has no bytes and class
// kOther.
struct Char {
  char32_t code_point = 0;
  size_t bytes = 0;
  CharClass char_class = CharClass::kOther;

  bool Is(CharClass c) const { return bytes > 0 && char_class == c; }
  bool IsNewline() const {
    return bytes > 0 && (code_point == '\r' || code_point == '\n');
  }
};

Char CharAt(absl::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const Utf8Char c = FirstUtf8Char(text.substr(at));
  return {c.code_point, c.bytes, ClassOf(c.code_point)};
}

// End of the run of at most `max` characters of class `c` that starts at `at`.
size_t RunEnd(absl::string_view text, size_t at, CharClass c,
              int64_t max = std::numeric_limits<int64_t>::max()) {
  for (; max > 0; --max) {
    const Char next = CharAt(text, at);
    if (!next.Is(c)) break;
    at += next.bytes;
  }
  return at;
}

// Length of a contraction ('s 't 're 've 'm 'll 'd) at the front of `text`, or
// 0.
size_t ContractionBytes(WordRules rules, absl::string_view text) {
  if (text.empty() || text[0] != '\'') return 0;
  const auto letter = [&](size_t at) {
    const char32_t c = CharAt(text, at).code_point;
    if (rules == WordRules::kGpt2) return c;
    if (c == 0x17f) return U's';
    return c >= 'A' && c <= 'Z' ? static_cast<char32_t>(c - 'A' + 'a') : c;
  };
  const char32_t first = letter(1);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') {
    return 1 + CharAt(text, 1).bytes;
  }
  const char32_t second = letter(2);
  const bool two = ((first == 'r' || first == 'v') && second == 'e') ||
                   (first == 'l' && second == 'l');
  return two ? 3 : 0;
}

// Length of the word by rules 5 to 7, for text that begins with white space.
size_t SpaceBytes(WordRules rules, absl::string_view text) {
  size_t end = 0, last = 0, newlines_end = 0;
  for (Char c = CharAt(text, 0); c.Is(CharClass::kSpace);
       c = CharAt(text, end)) {
    last = end;
    end += c.bytes;
    if (c.IsNewline()) newlines_end = end;
  }
  if (rules != WordRules::kGpt2 && newlines_end > 0) return newlines_end;
  return end == text.size() || last == 0 ? end : last;
}

}  // namespace

size_t FirstWordBytes(WordRules rules, absl::string_view text) {
  if (text.empty()) return 0;
  if (rules == WordRules::kDeepSeekLlm) return FirstDeepSeekWordBytes(text);
  const bool gpt2 = rules == WordRules::kGpt2;
  if (const size_t bytes = ContractionBytes(rules, text); bytes > 0) {
    return bytes;
  }
  const Char first = CharAt(text, 0);
  const Char second = CharAt(text, first.bytes);
  const bool space = first.code_point == ' ';
  const auto other = [](const Char& c) { return c.Is(CharClass::kOther); };

  if (first.Is(CharClass::kLetter)) {
    return RunEnd(text, 0, CharClass::kLetter);
  }
  if (second.Is(CharClass::kLetter) &&
      (gpt2 ? space : !first.IsNewline() && !first.Is(CharClass::kNumber))) {
    return RunEnd(text, first.bytes, CharClass::kLetter);
  }
  if (first.Is(CharClass::kNumber)) {
    if (gpt2) return RunEnd(text, 0, CharClass::kNumber);
    return RunEnd(text, 0, CharClass::kNumber,
                  rules == WordRules::kQwen2 ? 1 : 3);
  }
  if (gpt2 && space && second.Is(CharClass::kNumber)) {
    return RunEnd(text, first.bytes, CharClass::kNumber);
  }
  if (other(first) || (space && other(second))) {
    size_t end = RunEnd(text, first.bytes, CharClass::kOther);
    if (!gpt2) {
      while (CharAt(text, end).IsNewline()) ++end;
    }
    return end;
  }
  return SpaceBytes(rules, text);
}

}  // namespace quern
