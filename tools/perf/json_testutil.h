#ifndef QUERN_TOOLS_PERF_JSON_TESTUTIL_H_
#define QUERN_TOOLS_PERF_JSON_TESTUTIL_H_

// Reads one flat JSON object, strictly by RFC 8259, for tests of what the
// driver prints.

#include <cctype>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace quern {

// Key to value as text: a string without its quotes, a number, "null".
using JsonFields = std::map<std::string, std::string>;

class FlatJson {
 public:
  // Nothing if `text` is not one object of strings, numbers and nulls, or has a
  // key twice.
  static std::optional<JsonFields> Parse(const std::string& text) {
    FlatJson parser(text);
    JsonFields fields;
    if (!parser.Object(fields) || parser.at_ != text.size()) return {};
    return fields;
  }

 private:
  explicit FlatJson(const std::string& text) : text_(text) {}

  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool Object(JsonFields& fields) {
    if (!Take('{')) return false;
    do {
      std::string key, value;
      Space();
      if (!String(key)) return false;
      Space();
      if (!Take(':')) return false;
      Space();
      if (!Value(value)) return false;
      if (!fields.emplace(std::move(key), std::move(value)).second) {
        return false;
      }
      Space();
    } while (Take(','));
    return Take('}');
  }
  bool String(std::string& out) {
    if (!Take('"')) return false;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) return false;
      if (text_[at_] == '\\') {
        ++at_;
        if (at_ >= text_.size()) return false;
        if (text_[at_] == 'u') {
          for (int i = 0; i < 4; ++i) {
            if (++at_ >= text_.size() || !std::isxdigit(text_[at_])) {
              return false;
            }
          }
        } else if (text_[at_] != '"' && text_[at_] != '\\') {
          return false;
        }
      }
      out += text_[at_++];
    }
    return Take('"');
  }
  bool Value(std::string& out) {
    if (at_ < text_.size() && text_[at_] == '"') return String(out);
    const size_t begin = at_;
    if (text_.compare(at_, 4, "null") == 0) {
      at_ += 4;
    } else {
      Take('-');
      if (!Digits()) return false;
      if (Take('.') && !Digits()) return false;
      if (Take('e') || Take('E')) {
        if (!Take('+')) Take('-');
        if (!Digits()) return false;
      }
    }
    out = text_.substr(begin, at_ - begin);
    return true;
  }
  bool Digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && std::isdigit(text_[at_])) ++at_;
    return at_ > begin;
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_JSON_TESTUTIL_H_
