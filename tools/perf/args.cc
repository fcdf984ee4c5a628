#include "quern/tools/perf/args.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

std::string Names(absl::Span<const Key> keys) {
  return absl::StrJoin(keys, " ", [](std::string* out, const Key& key) {
    absl::StrAppend(out, "--", key.name);
  });
}

}  // namespace

absl::StatusOr<Args> Args::Parse(absl::string_view op,
                                 absl::Span<const Key> keys,
                                 absl::Span<const Key> common,
                                 absl::Span<const absl::string_view> words) {
  Args args;
  args.op_ = std::string(op);
  for (const absl::Span<const Key> table : {keys, common}) {
    for (const Key& key : table) {
      const bool inserted =
          args.values_.emplace(key.name, key.default_value).second;
      QUERN_CHECK(inserted);  // a key of an op must not hide a common one
    }
  }
  for (absl::string_view word : words) {
    const absl::string_view whole = word;
    const size_t equals = word.find('=');
    if (!absl::ConsumePrefix(&word, "--") || equals == whole.npos ||
        equals == 2) {
      return InvalidArgument(op, "cannot read \"", whole,
                             "\"; write --key=value");
    }
    const absl::string_view name = whole.substr(2, equals - 2);
    const auto value = args.values_.find(name);
    if (value == args.values_.end()) {
      return InvalidArgument(op, "no key --", name, "; need one of ",
                             Names(keys), keys.empty() ? "" : " ",
                             Names(common));
    }
    if (!args.given_.emplace(name).second) {
      return InvalidArgument(op, "--", name, " is given twice");
    }
    value->second = std::string(whole.substr(equals + 1));
  }
  return args;
}

void Args::Set(absl::string_view key, std::string value) {
  const auto at = values_.find(key);
  QUERN_CHECK(at != values_.end());  // not in the op's table
  at->second = std::move(value);
  given_.emplace(key);
}

const std::string& Args::Text(absl::string_view key) const {
  const auto value = values_.find(key);
  QUERN_CHECK(value != values_.end());  // not in the op's table
  return value->second;
}

absl::StatusOr<int64_t> Args::Int(absl::string_view key, int64_t min,
                                  int64_t max) const {
  const std::string& text = Text(key);
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) {
    return InvalidArgument(op_, "--", key, "=\"", text,
                           "\" is not an integer; need ", min, " <= ", key,
                           " <= ", max);
  }
  QUERN_RETURN_IF_ERROR(CheckRange(op_, key, value, min, max));
  return value;
}

absl::StatusOr<std::vector<int64_t>> Args::Ints(absl::string_view key,
                                                int64_t min,
                                                int64_t max) const {
  std::vector<int64_t> values;
  for (const absl::string_view piece : absl::StrSplit(Text(key), ',')) {
    Args one = *this;
    one.Set(key, std::string(piece));
    QUERN_ASSIGN_OR_RETURN(const int64_t value, one.Int(key, min, max));
    values.push_back(value);
  }
  return values;
}

absl::StatusOr<std::string> Args::Choice(
    absl::string_view key, absl::Span<const absl::string_view> choices) const {
  const std::string& text = Text(key);
  for (const absl::string_view choice : choices) {
    if (text == choice) return text;
  }
  return InvalidArgument(op_, "--", key, "=\"", text, "\"; need one of ",
                         absl::StrJoin(choices, ", "));
}

absl::StatusOr<DType> Args::Type(absl::string_view key,
                                 absl::Span<const DType> choices) const {
  std::vector<absl::string_view> names;
  for (const DType dtype : choices) names.push_back(DTypeName(dtype));
  QUERN_ASSIGN_OR_RETURN(const std::string name, Choice(key, names));
  return ParseDType(name);
}

absl::StatusOr<bool> Args::Flag(absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const std::string text, Choice(key, {"0", "1"}));
  return text == "1";
}

}  // namespace quern
