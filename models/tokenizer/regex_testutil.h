#ifndef QUERN_MODELS_TOKENIZER_REGEX_TESTUTIL_H_
#define QUERN_MODELS_TOKENIZER_REGEX_TESTUTIL_H_

// A backtracking matcher of the regular expressions that tokenizers' files
// have: alternatives, (?:x), (?i:x), (?!x), [abc], [^abc], a-b, \p{Lu}, \p{L},
// \s, \S, \r, \n, and ? * + {n} {n,m}, all greedy. It is slow and recursive.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/check.h"
#include "absl/strings/string_view.h"
#include "quern/models/tokenizer/utf8.h"

namespace quern {

// A character, and its general category as written down by hand.
struct CategorizedChar {
  const char* utf8;
  const char* category;  // such as "Lu"
  bool space = false;    // property White_Space

  char32_t code_point() const { return FirstUtf8Char(utf8).code_point; }
};
using CategorizedText = std::vector<const CategorizedChar*>;

class TestRegex {
 public:
  explicit TestRegex(absl::string_view pattern) : rest_(pattern) {
    root_ = Choice();
    CHECK(rest_.empty()) << rest_;
  }

  // Number of characters that match at place `at`; 0 if none does.
  size_t Match(const CategorizedText& text, size_t at) const {
    size_t end = at;
    root_(text, at, [&](size_t place) {
      end = place;
      return true;
    });
    return end - at;
  }

 private:
  // Calls `next` with the end of each match in order, until it returns true.
  using Next = std::function<bool(size_t)>;
  using Node = std::function<bool(const CategorizedText&, size_t, const Next&)>;
  using Set = std::function<bool(const CategorizedChar&)>;

  bool Skip(absl::string_view prefix) {
    if (rest_.substr(0, prefix.size()) != prefix) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }
  char32_t TakeChar() {
    const Utf8Char c = FirstUtf8Char(rest_);
    rest_.remove_prefix(c.bytes);
    return c.code_point;
  }
  size_t TakeNumber() {
    size_t number = 0;
    while (rest_[0] >= '0' && rest_[0] <= '9') {
      number = 10 * number + static_cast<size_t>(TakeChar() - '0');
    }
    return number;
  }

  Node Choice() {
    std::vector<Node> nodes = {Sequence()};
    while (Skip("|")) nodes.push_back(Sequence());
    return [nodes](const auto& text, size_t at, const Next& next) {
      for (const Node& node : nodes) {
        if (node(text, at, next)) return true;
      }
      return false;
    };
  }

  Node Sequence() {
    Node all = [](const auto&, size_t at, const Next& next) {
      return next(at);
    };
    std::vector<Node> nodes;
    while (!rest_.empty() && rest_[0] != '|' && rest_[0] != ')') {
      nodes.push_back(Repeat(Atom()));
    }
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      all = [first = *node, then = all](const auto& text, size_t at,
                                        const Next& next) {
        return first(text, at,
                     [&](size_t end) { return then(text, end, next); });
      };
    }
    return all;
  }

  Node Repeat(Node atom) {
    size_t least = 1, most = 1;
    if (Skip("?")) {
      least = 0;
    } else if (Skip("*")) {
      least = 0, most = 1000;
    } else if (Skip("+")) {
      most = 1000;
    } else if (Skip("{")) {
      least = most = TakeNumber();
      if (Skip(",")) most = TakeNumber();
      CHECK(Skip("}"));
    }
    if (least == 1 && most == 1) return atom;
    return [=](const auto& text, size_t at, const Next& next) {
      const std::function<bool(size_t, size_t)> from = [&](size_t place,
                                                           size_t count) {
        if (count < most && atom(text, place, [&](size_t end) {
              return from(end, count + 1);
            })) {
          return true;
        }
        return count >= least && next(place);
      };
      return from(at, 0);
    };
  }

  Node Atom() {
    const bool fold_before = fold_;
    if (Skip("(?!")) {
      const Node node = Choice();
      CHECK(Skip(")"));
      return [node](const auto& text, size_t at, const Next& next) {
        return !node(text, at, [](size_t) { return true; }) && next(at);
      };
    }
    if (Skip("(?:") || (fold_ = Skip("(?i:"))) {
      Node node = Choice();
      CHECK(Skip(")"));
      fold_ = fold_before;
      return node;
    }
    fold_ = fold_before;
    const Set set = Skip("[") ? Bracket() : One();
    return [set](const auto& text, size_t at, const Next& next) {
      return at < text.size() && set(*text[at]) && next(at + 1);
    };
  }

  Set Bracket() {
    const bool negated = Skip("^");
    std::vector<Set> sets;
    while (!Skip("]")) sets.push_back(One());
    return [=](const CategorizedChar& c) {
      bool any = false;
      for (const Set& set : sets) any = any || set(c);
      return any != negated;
    };
  }

  // A character, a range or a property.
  Set One() {
    if (Skip("\\p{")) {
      const size_t end = rest_.find('}');
      const std::string property(rest_.substr(0, end));
      rest_.remove_prefix(end + 1);
      return [property](const CategorizedChar& c) {
        return absl::string_view(c.category).substr(0, property.size()) ==
               property;
      };
    }
    if (Skip("\\s")) return [](const CategorizedChar& c) { return c.space; };
    if (Skip("\\S")) return [](const CategorizedChar& c) { return !c.space; };
    char32_t first = '\r';
    if (!Skip("\\r")) {
      first = Skip("\\n") ? U'\n' : (Skip("\\"), TakeChar());
    }
    char32_t last = first;
    if (rest_.size() > 1 && rest_[0] == '-' && rest_[1] != ']') {
      Skip("-");
      last = TakeChar();
    }
    return [first, last, fold = fold_](const CategorizedChar& c) {
      char32_t point = c.code_point();
      if (fold && point >= 'A' && point <= 'Z') point += 'a' - 'A';
      if (fold && point == 0x17f) point = 's';
      return first <= point && point <= last;
    };
  }

  absl::string_view rest_;
  bool fold_ = false;
  Node root_;
};

// Cuts each piece before and behind each match.
inline std::vector<CategorizedText> CutByRegex(
    const std::vector<CategorizedText>& pieces, const TestRegex& regex) {
  std::vector<CategorizedText> cut;
  for (const CategorizedText& piece : pieces) {
    CategorizedText between;
    for (size_t at = 0; at < piece.size();) {
      const size_t length = regex.Match(piece, at);
      if (length == 0) {
        between.push_back(piece[at++]);
        continue;
      }
      if (!between.empty()) cut.push_back(std::exchange(between, {}));
      const auto begin = piece.begin() + static_cast<std::ptrdiff_t>(at);
      cut.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(length));
      at += length;
    }
    if (!between.empty()) cut.push_back(std::move(between));
  }
  return cut;
}

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_REGEX_TESTUTIL_H_
