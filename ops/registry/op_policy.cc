#include "quern/ops/registry/op_policy.h"

#include "absl/strings/str_split.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kWhat[] = "op policy";

}  // namespace

absl::StatusOr<OpPolicy> OpPolicy::FromTokens(
    absl::Span<const absl::string_view> tokens, OpDefault when_silent) {
  OpPolicy policy;
  policy.default_on_ = when_silent == OpDefault::kAll;
  int defaults = 0;
  for (const absl::string_view token : tokens) {
    if (token != "all" && token != "none") continue;
    ++defaults;
    policy.default_on_ = token == "all";
  }
  if (defaults > 1) {
    return InvalidArgument(kWhat, "has ", defaults,
                           " of all and none; need at most one");
  }
  for (const absl::string_view token : tokens) {
    if (token == "all" || token == "none") continue;
    if (token.empty() || (token[0] != '+' && token[0] != '-')) {
      return InvalidArgument(kWhat, "\"", token,
                             "\"; need all, none, +op or -op");
    }
    Names& names = token[0] == '+' ? policy.plus_ : policy.minus_;
    if (names.emplace(token.substr(1)).second) {
      policy.tokens_.emplace_back(token);
    }
  }
  for (const std::string& name : policy.plus_) {
    if (Has(policy.minus_, name)) {
      return InvalidArgument(kWhat, "+", name, " and -", name,
                             "; need one of them");
    }
  }
  return policy;
}

absl::StatusOr<OpPolicy> OpPolicy::Parse(absl::string_view text,
                                         OpDefault when_silent) {
  if (text.empty()) return FromTokens({}, when_silent);
  const std::vector<absl::string_view> tokens = absl::StrSplit(text, ',');
  return FromTokens(tokens, when_silent);
}

}  // namespace quern
