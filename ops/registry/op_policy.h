#ifndef QUERN_OPS_REGISTRY_OP_POLICY_H_
#define QUERN_OPS_REGISTRY_OP_POLICY_H_

// Which operators run their fast implementations, given as text:
//
//   all | none | +op | -op          in any order, between commas
//
//   enabled(op) = (all, or by default, or +op) and not -op
//
// Layers are an exception: for them OpDispatcher looks only at -op.
//
// `all` and `none` may occur at most once, and not both; without either, the
// default decides. Repeating +op or -op is harmless. Both +op and -op for one
// operator are refused here, before the operator is used. Nothing is trimmed,
// and case matters. The name of an unknown operator is not an error:
// OpDispatcher::Warnings reports it.

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quern {

enum class OpDefault : uint8_t { kAll, kNone };

class OpPolicy {
 public:
  // Enables everything.
  OpPolicy() = default;

  // One token per element. InvalidArgument, checked in this order, for `all`
  // and `none` more than once, a token of none of the four forms, and both +op
  // and -op.
  static absl::StatusOr<OpPolicy> FromTokens(
      absl::Span<const absl::string_view> tokens,
      OpDefault when_silent = OpDefault::kAll);
  // Splits `text` at commas. An empty text has no tokens.
  static absl::StatusOr<OpPolicy> Parse(
      absl::string_view text, OpDefault when_silent = OpDefault::kAll);

  bool default_on() const { return default_on_; }
  bool enabled(absl::string_view op) const {
    return (default_on_ || Has(plus_, op)) && !Has(minus_, op);
  }
  // Whether -op is one of the tokens.
  bool disables(absl::string_view op) const { return Has(minus_, op); }
  // The tokens +op and -op, in the order given, once each.
  const std::vector<std::string>& signed_tokens() const { return tokens_; }

 private:
  using Names = std::set<std::string, std::less<>>;
  static bool Has(const Names& names, absl::string_view op) {
    return names.find(op) != names.end();
  }

  bool default_on_ = true;
  Names plus_;
  Names minus_;
  std::vector<std::string> tokens_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_POLICY_H_
