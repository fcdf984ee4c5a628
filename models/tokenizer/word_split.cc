#include "quern/models/tokenizer/word_split.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/models/tokenizer/deepseek_words.h"
#include "quern/models/tokenizer/unicode_class.h"
#include "quern/models/tokenizer/utf8.h"

namespace quern {
namespace {

// What a character is, as bits: its class, and what rules ask for by code
// point.
using Traits = uint32_t;
constexpr Traits Bit(CharClass c) { return Traits{1} << static_cast<int>(c); }
constexpr Traits kCased = Bit(CharClass::kUpper) | Bit(CharClass::kLower);
constexpr Traits kLetter = kCased | Bit(CharClass::kOtherLetter);
constexpr Traits kMark = Bit(CharClass::kMark);
constexpr Traits kNumber = Bit(CharClass::kNumber);
constexpr Traits kSign = Bit(CharClass::kPunctuation) | Bit(CharClass::kSymbol);
constexpr Traits kSpace = Bit(CharClass::kSpace);
constexpr Traits kNewline = 1u << 16;    // \r, \n
constexpr Traits kBlank = 1u << 17;      // U+0020
constexpr Traits kSlash = 1u << 18;      // /
constexpr Traits kAscii = 1u << 19;      // below U+0080
constexpr Traits kIdeograph = 1u << 20;  // U+4E00..U+9FA5, U+3040..U+30FF
constexpr Traits kAny = 1u << 31;        // every character

// Upper-case, or neither; lower-case, or neither.
constexpr Traits kUpperOrOther =
    Bit(CharClass::kUpper) | Bit(CharClass::kOtherLetter) | kMark;
constexpr Traits kLowerOrOther =
    Bit(CharClass::kLower) | Bit(CharClass::kOtherLetter) | kMark;

Traits TraitsOf(char32_t c) {
  Traits traits = kAny | Bit(ClassOf(c));
  if (c == '\r' || c == '\n') traits |= kNewline;
  if (c == ' ') traits |= kBlank;
  if (c == '/') traits |= kSlash;
  if (c < 0x80) traits |= kAscii;
  if ((c >= 0x4e00 && c <= 0x9fa5) || (c >= 0x3040 && c <= 0x30ff)) {
    traits |= kIdeograph;
  }
  return traits;
}

// Texts are mostly ASCII.
Traits FastTraitsOf(char32_t c) {
  static const std::array<Traits, 128> ascii = [] {
    std::array<Traits, 128> result = {};
    for (char32_t i = 0; i < result.size(); ++i) result[i] = TraitsOf(i);
    return result;
  }();
  return c < ascii.size() ? ascii[c] : TraitsOf(c);
}

// A character of the text. Past its end there is one without bytes and traits,
// which is in no set.
struct Char {
  char32_t code_point = 0;
  size_t bytes = 0;
  Traits traits = 0;
};

// Characters that have one of some traits, all of others, and none of others.
struct CharSet {
  Traits some = 0;
  Traits all = 0;
  Traits none = 0;

  constexpr CharSet() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): traits are a set
  constexpr CharSet(Traits some_of, Traits none_of = 0, Traits all_of = 0)
      : some(some_of), all(all_of), none(none_of) {}

  bool Has(const Char& c) const {
    return (c.traits & some) != 0 && (c.traits & all) == all &&
           (c.traits & none) == 0;
  }
};
constexpr CharSet AnyBut(Traits none) { return {kAny, none}; }

enum class Contractions : uint8_t { kNone, kLowerCase, kAnyCase };

// One expression:  prefix? head* body{1,most} tail*  and then maybe a
// contraction. A contraction alone has an empty body.
struct Pattern {
  CharSet prefix, head, body, tail;
  int64_t most = std::numeric_limits<int64_t>::max();
  bool needs_prefix = false;
  bool stops_before_text = false;  // E: the last of it is left to what follows
  Contractions contraction = Contractions::kNone;

  constexpr Pattern After(CharSet one) const {
    Pattern p = *this;
    p.prefix = one;
    return p;
  }
  constexpr Pattern Behind(CharSet one) const {
    Pattern p = After(one);
    p.needs_prefix = true;
    return p;
  }
  constexpr Pattern AfterMany(CharSet many) const {
    Pattern p = *this;
    p.head = many;
    return p;
  }
  constexpr Pattern ThenMany(CharSet many) const {
    Pattern p = *this;
    p.tail = many;
    return p;
  }
  constexpr Pattern ThenContraction() const {
    Pattern p = *this;
    p.contraction = Contractions::kAnyCase;
    return p;
  }
};

constexpr Pattern Run(CharSet body,
                      int64_t most = std::numeric_limits<int64_t>::max()) {
  Pattern p;
  p.body = body;
  p.most = most;
  return p;
}
constexpr Pattern Contraction(Contractions contraction) {
  Pattern p;
  p.contraction = contraction;
  return p;
}
constexpr Pattern SpacesBeforeSpace() {
  Pattern p = Run(kSpace);
  p.stops_before_text = true;
  return p;
}

constexpr CharSet kBeforeLetters = AnyBut(kNewline | kLetter | kNumber);
constexpr CharSet kNeither = AnyBut(kSpace | kLetter | kNumber);
constexpr Pattern kAnyContraction = Contraction(Contractions::kAnyCase);
constexpr Pattern kLetters = Run(kLetter).After(kBeforeLetters);
constexpr Pattern kSigns =
    Run(kNeither).After(kBlank).ThenMany(CharSet(kNewline));
constexpr Pattern kSignsWithSlash =
    Run(kNeither).After(kBlank).ThenMany(CharSet(kNewline | kSlash));
constexpr Pattern kNewlines = Run(CharSet(kNewline)).AfterMany(kSpace);
constexpr Pattern kToLower =
    Run(kLowerOrOther).After(kBeforeLetters).AfterMany(kUpperOrOther);
constexpr Pattern kUppers =
    Run(kUpperOrOther).After(kBeforeLetters).ThenMany(kLowerOrOther);

constexpr Pattern kQwen2[] = {kAnyContraction, kLetters,  Run(kNumber, 1),
                              kSigns,          kNewlines, SpacesBeforeSpace(),
                              Run(kSpace)};
constexpr Pattern kLlama3[] = {kAnyContraction, kLetters,  Run(kNumber, 3),
                               kSigns,          kNewlines, SpacesBeforeSpace(),
                               Run(kSpace)};
constexpr Pattern kQwen35[] = {kAnyContraction,
                               Run(kLetter | kMark).After(kBeforeLetters),
                               Run(kNumber, 1),
                               Run(AnyBut(kSpace | kLetter | kMark | kNumber))
                                   .After(kBlank)
                                   .ThenMany(CharSet(kNewline)),
                               kNewlines,
                               SpacesBeforeSpace(),
                               Run(kSpace)};
constexpr Pattern kSeedCoder[] = {kAnyContraction, kLetters,
                                  Run(kNumber, 1), Run(kNeither).After(kBlank),
                                  kNewlines,       SpacesBeforeSpace(),
                                  Run(kSpace)};
constexpr Pattern kTekken[] = {kToLower,        kUppers,   Run(kNumber, 1),
                               kSignsWithSlash, kNewlines, SpacesBeforeSpace(),
                               Run(kSpace)};
constexpr Pattern kGpt4o[] = {kToLower.ThenContraction(),
                              kUppers.ThenContraction(),
                              Run(kNumber, 3),
                              kSignsWithSlash,
                              kNewlines,
                              SpacesBeforeSpace(),
                              Run(kSpace)};
constexpr Pattern kGpt2[] = {Contraction(Contractions::kLowerCase),
                             Run(kLetter).After(kBlank),
                             Run(kNumber).After(kBlank),
                             Run(kNeither).After(kBlank),
                             SpacesBeforeSpace(),
                             Run(kSpace)};
constexpr Pattern kDeepSeekV3[] = {
    Run(CharSet(kCased, 0, kAscii)).Behind(CharSet(kSign, 0, kAscii)),
    Run(kLetter | kMark).After(AnyBut(kNewline | kLetter | kSign)),
    Run(kSign).After(kBlank).ThenMany(CharSet(kNewline)),
    kNewlines,
    SpacesBeforeSpace(),
    Run(kSpace)};

struct Rules {
  absl::Span<const Pattern> patterns;
  // Where the text is cut first: so many numbers, or all of a run, are as if
  // they were a text of their own.
  int64_t numbers = 0;  // 0: numbers are not cut off
  Traits run = 0;
};

Rules RulesOf(WordRules rules) {
  switch (rules) {
    case WordRules::kQwen2:
      return {kQwen2};
    case WordRules::kLlama3:
      return {kLlama3};
    case WordRules::kQwen35:
      return {kQwen35};
    case WordRules::kSeedCoder:
      return {kSeedCoder};
    case WordRules::kTekken:
      return {kTekken};
    case WordRules::kGpt4o:
      return {kGpt4o};
    case WordRules::kGpt2:
      return {kGpt2};
    case WordRules::kGpt2Digits:
      return {kGpt2, 1};
    case WordRules::kDeepSeekV3:
      return {kDeepSeekV3, 3, kIdeograph};
    case WordRules::kDeepSeekLlm:
      break;
  }
  return {};
}

// Matches expressions against a text that ends where the first character of
// `wall` is.
class Matcher {
 public:
  Matcher(absl::string_view text, CharSet wall) : text_(text), wall_(wall) {}

  // End of what `p` matches at `begin`; `begin` where it does not match.
  size_t Match(const Pattern& p, size_t begin) const {
    if (p.body.some == 0) return ContractionEnd(p.contraction, begin);
    const Char first = At(begin);
    size_t end = begin;
    if (p.prefix.Has(first)) {
      const size_t behind = begin + first.bytes;
      end = MatchFrom(p, behind);
      if (end == behind) end = begin;
    }
    if (end == begin && !p.needs_prefix) end = MatchFrom(p, begin);
    if (end > begin && p.contraction != Contractions::kNone) {
      end = ContractionEnd(p.contraction, end);
    }
    return end;
  }

  Char At(size_t at) const {
    if (at >= text_.size()) return {};
    const Utf8Char c = FirstUtf8Char(text_.substr(at));
    const Char result = {c.code_point, c.bytes, FastTraitsOf(c.code_point)};
    return wall_.Has(result) ? Char{} : result;
  }

 private:
  // Like Match, without the prefix and the contraction.
  size_t MatchFrom(const Pattern& p, size_t begin) const {
    // The body begins where head* ends, or else at the last character of head*
    // that is of the body.
    size_t at = begin, body = begin;
    bool found = false;
    Char c = At(at);
    for (; p.head.Has(c); c = At(at)) {
      if (p.body.Has(c)) body = at, found = true;
      at += c.bytes;
    }
    if (p.body.Has(c)) body = at, found = true;
    if (!found) return begin;

    size_t end = body, last = body;
    c = At(end);
    for (int64_t left = p.most; left > 0 && p.body.Has(c); --left) {
      last = end;
      end += c.bytes;
      c = At(end);
    }
    if (p.stops_before_text && c.bytes > 0) return last;
    for (; p.tail.Has(c); c = At(end)) end += c.bytes;
    return end;
  }

  size_t ContractionEnd(Contractions contraction, size_t begin) const {
    if (contraction == Contractions::kNone || At(begin).code_point != '\'') {
      return begin;
    }
    size_t end = begin + 1;
    const auto letter = [&] {
      const Char c = At(end);
      end += c.bytes;
      if (contraction == Contractions::kLowerCase) return c.code_point;
      if (c.code_point == 0x17f) return U's';
      return c.code_point >= 'A' && c.code_point <= 'Z'
                 ? static_cast<char32_t>(c.code_point - 'A' + 'a')
                 : c.code_point;
    };
    const char32_t first = letter();
    if (first == 's' || first == 't' || first == 'm' || first == 'd') {
      return end;
    }
    const char32_t second = letter();
    const bool two = ((first == 'r' || first == 'v') && second == 'e') ||
                     (first == 'l' && second == 'l');
    return two ? end : begin;
  }

  absl::string_view text_;
  CharSet wall_;
};

// The part of `text` that is cut off first, if it begins with one, and the text
// else, as a text that the expressions match.
Matcher FirstPart(const Rules& rules, absl::string_view text) {
  const Traits first = Matcher(text, {}).At(0).traits;
  if (rules.numbers > 0 && (first & kNumber) != 0) {
    const size_t end = Matcher(text, {}).Match(Run(kNumber, rules.numbers), 0);
    return Matcher(text.substr(0, end), {});
  }
  if ((first & rules.run) != 0) return Matcher(text, AnyBut(rules.run));
  return Matcher(text, rules.run | (rules.numbers > 0 ? kNumber : 0));
}

// End of the word at `begin`; `begin` where nothing matches.
size_t WordEnd(const Matcher& matcher, absl::Span<const Pattern> patterns,
               size_t begin) {
  for (const Pattern& pattern : patterns) {
    const size_t end = matcher.Match(pattern, begin);
    if (end > begin) return end;
  }
  return begin;
}

}  // namespace

size_t FirstWordBytes(WordRules word_rules, absl::string_view text) {
  if (text.empty()) return 0;
  if (word_rules == WordRules::kDeepSeekLlm) {
    return FirstDeepSeekWordBytes(text);
  }
  const Rules rules = RulesOf(word_rules);
  const Matcher matcher = FirstPart(rules, text);
  size_t end = WordEnd(matcher, rules.patterns, 0);
  if (end > 0) return end;
  // What nothing matches is a word up to where something does.
  Char c = matcher.At(0);
  do {
    end += c.bytes;
    c = matcher.At(end);
  } while (c.bytes > 0 && WordEnd(matcher, rules.patterns, end) == end);
  return end;
}

}  // namespace quern
