#ifndef QUERN_OPS_REGISTRY_OP_POLICY_H_
#define QUERN_OPS_REGISTRY_OP_POLICY_H_

// Which operators run their fast implementations, as text:
//
//   all | none | +op | -op          in any order, between commas
//
//   enabled(op) = (all, or by default, or +op) and not -op
//
// but for layers, of which OpDispatcher looks at -op alone.
//
// At most one of `all` and `none`, once; without either the default decides.
// Repeating +op or -op is harmless; both for one op are refused here, not when
// the operator is first used. Nothing is trimmed, and case matters. A name that
// no operator has is no error: OpDispatcher::Warnings tells of it.

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
  // Everything by default.
  OpPolicy() = default;

  // One token an element. InvalidArgument, in this order: `all` and `none`
  // more than once; a token that is none of the four forms; +op and -op.
  static absl::StatusOr<OpPolicy> FromTokens(
      absl::Span<const absl::string_view> tokens,
      OpDefault when_silent = OpDefault::kAll);
  // Tokens between commas; no text, no tokens.
  static absl::StatusOr<OpPolicy> Parse(
      absl::string_view text, OpDefault when_silent = OpDefault::kAll);

  bool default_on() const { return default_on_; }
  bool enabled(absl::string_view op) const {
    return (default_on_ || Has(plus_, op)) && !Has(minus_, op);
  }
  // Whether -op is one of the tokens.
  bool disables(absl::string_view op) const { return Has(minus_, op); }
  // The tokens with a sign, in the order given, once each.
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
