#include "quern/ops/registry/op_schema.h"

#include <cstdio>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr OpType kTypes[] = {OpType::kTensor, OpType::kInt, OpType::kFloat,
                             OpType::kBool, OpType::kString};

// Whether `word` is an object's name: [A-Z][A-Za-z0-9]*.
bool IsObjectName(absl::string_view word) {
  return !word.empty() &&
         absl::ascii_isupper(static_cast<unsigned char>(word[0])) &&
         word.find('_') == absl::string_view::npos;
}

class Parser {
 public:
  explicit Parser(absl::string_view text) : text_(text) {}

  absl::StatusOr<OpSchema> Parse() {
    OpSchema schema;
    QUERN_ASSIGN_OR_RETURN(schema.name, Name());
    QUERN_RETURN_IF_ERROR(Expect("("));
    while (!Accept(")")) {
      if (!schema.params.empty()) QUERN_RETURN_IF_ERROR(Expect(","));
      QUERN_ASSIGN_OR_RETURN(OpParam param, Param(schema.params.size()));
      for (const OpParam& other : schema.params) {
        if (other.name == param.name) {
          return Error(absl::StrCat("another name than ", param.name));
        }
      }
      schema.params.push_back(std::move(param));
    }
    QUERN_RETURN_IF_ERROR(Expect("->"));
    if (Accept("(")) {
      while (!Accept(")")) {
        if (schema.returns > 0) QUERN_RETURN_IF_ERROR(Expect(","));
        QUERN_RETURN_IF_ERROR(Expect("Tensor"));
        ++schema.returns;
      }
    } else {
      QUERN_RETURN_IF_ERROR(Expect("Tensor"));
      schema.returns = 1;
    }
    SkipSpaces();
    if (at_ != text_.size()) return Error("the end");
    return schema;
  }

 private:
  void SkipSpaces() {
    while (at_ < text_.size() && absl::ascii_isspace(Byte(at_))) ++at_;
  }
  unsigned char Byte(size_t i) const {
    return static_cast<unsigned char>(text_[i]);
  }
  bool Accept(absl::string_view word) {
    SkipSpaces();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  absl::Status Error(absl::string_view want) const {
    return InvalidArgument("op schema", "\"", text_, "\", at ", at_, ": need ",
                           want);
  }
  absl::Status Expect(absl::string_view word) {
    return Accept(word) ? absl::OkStatus()
                        : Error(absl::StrCat("\"", word, "\""));
  }
  // Reads a word of letters, digits and the characters of `more`.
  absl::string_view Word(absl::string_view more) {
    SkipSpaces();
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (absl::ascii_isalnum(Byte(at_)) ||
            more.find(text_[at_]) != absl::string_view::npos)) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  absl::StatusOr<std::string> Name() {
    SkipSpaces();
    const size_t begin = at_;
    const absl::string_view word = Word("_");
    bool good = !word.empty() && !absl::ascii_isdigit(Byte(begin));
    for (const char c : word)
      good = good && !absl::ascii_isupper(static_cast<unsigned char>(c));
    if (good) return std::string(word);
    at_ = begin;
    return Error("a name of [a-z_][a-z0-9_]*");
  }

  absl::StatusOr<OpParam> Param(size_t index) {
    OpParam param;
    const size_t begin = at_;
    const absl::string_view type = Word("_");
    bool found = false;
    for (const OpType t : kTypes) {
      if (type == OpTypeName(t)) {
        param.type = t;
        found = true;
      }
    }
    if (!found && IsObjectName(type)) {
      param.type = OpType::kObject;
      param.object = std::string(type);
    } else if (!found) {
      at_ = begin;
      SkipSpaces();
      return Error("Tensor, int, float, bool, str or the type of an object");
    }
    if (param.type == OpType::kTensor && Accept("(")) {
      QUERN_RETURN_IF_ERROR(Expect(absl::StrCat("a", index, "!)")));
      param.mutated = true;
    }
    param.optional = Accept("?");
    QUERN_ASSIGN_OR_RETURN(param.name, Name());
    if (Accept("=")) {
      if (param.type == OpType::kTensor || param.type == OpType::kObject) {
        return Error("no default");
      }
      QUERN_ASSIGN_OR_RETURN(param.default_value, Default(param.type));
    }
    return param;
  }

  absl::StatusOr<OpScalar> Default(OpType type) {
    SkipSpaces();
    const size_t begin = at_;
    if (type == OpType::kString) {
      QUERN_RETURN_IF_ERROR(Expect("\""));
      const size_t end = text_.find('"', at_);
      if (end == absl::string_view::npos) return Error("a closing \"");
      std::string value(text_.substr(at_, end - at_));
      at_ = end + 1;
      return OpScalar(std::move(value));
    }
    const absl::string_view word = Word("+-._");
    int64_t i = 0;
    double d = 0;
    if (type == OpType::kBool && (word == "True" || word == "False")) {
      return OpScalar(word == "True");
    }
    if (type == OpType::kInt && absl::SimpleAtoi(word, &i)) return OpScalar(i);
    // NaN is refused as a default, because it is not equal to itself and a
    // printed schema could not be compared with the one read back.
    if (type == OpType::kFloat && absl::SimpleAtod(word, &d) && d == d) {
      return OpScalar(d);
    }
    at_ = begin;
    return Error(absl::StrCat("a default of type ", OpTypeName(type)));
  }

  absl::string_view text_;
  size_t at_ = 0;
};

// Prints the fewest digits that are read back as `value`.
std::string PrintDouble(double value) {
  std::string text;
  for (int digits = 1; digits <= 17; ++digits) {
    char buffer[40];
    std::snprintf(buffer, sizeof(buffer), "%.*g", digits, value);
    text = buffer;
    double again = 0;
    if (absl::SimpleAtod(text, &again) && again == value) break;
  }
  const bool whole = text.find_first_of(".en") == std::string::npos;
  return whole ? text + ".0" : text;
}

std::string PrintScalar(const OpScalar& value) {
  if (const auto* i = std::get_if<int64_t>(&value)) return absl::StrCat(*i);
  if (const auto* d = std::get_if<double>(&value)) return PrintDouble(*d);
  if (const auto* b = std::get_if<bool>(&value)) return *b ? "True" : "False";
  return absl::StrCat("\"", std::get<std::string>(value), "\"");
}

}  // namespace

absl::string_view OpTypeName(OpType type) {
  switch (type) {
    case OpType::kTensor:
      return "Tensor";
    case OpType::kInt:
      return "int";
    case OpType::kFloat:
      return "float";
    case OpType::kBool:
      return "bool";
    case OpType::kString:
      return "str";
    case OpType::kObject:
      return "object";
  }
  return "";
}

absl::StatusOr<OpSchema> OpSchema::Parse(absl::string_view text) {
  return Parser(text).Parse();
}

std::string OpSchema::Print() const {
  std::string text = absl::StrCat(name, "(");
  for (size_t i = 0; i < params.size(); ++i) {
    const OpParam& param = params[i];
    absl::StrAppend(&text, i > 0 ? ", " : "", param.TypeName());
    if (param.mutated) absl::StrAppend(&text, "(a", i, "!)");
    absl::StrAppend(&text, param.optional ? "?" : "", " ", param.name);
    if (param.default_value.has_value()) {
      absl::StrAppend(&text, "=", PrintScalar(*param.default_value));
    }
  }
  if (returns == 1) return text + ") -> Tensor";
  text += ") -> (";
  for (int i = 0; i < returns; ++i) text += i > 0 ? ", Tensor" : "Tensor";
  return text + ")";
}

}  // namespace quern
