#ifndef QUERN_EXAMPLES_GENERATE_OPERATORS_H_
#define QUERN_EXAMPLES_GENERATE_OPERATORS_H_

// The operators by name that a model and its sampling take, under the policy of
// --custom_ops.

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

class Operators {
 public:
  // `policy` is as for OpPolicy::Parse, whose refusals are returned.
  static absl::StatusOr<std::unique_ptr<Operators>> Create(
      const std::string& policy);

  const OpDispatcher& dispatcher() const { return *dispatcher_; }
  // What was made so far, "rms_norm 2, rotary_embedding 1 by reference".
  std::string Summary() const;
  // The words of the policy that had no effect so far, a line each.
  std::string Warnings() const;

 private:
  Operators() = default;

  OpRegistry registry_;
  std::unique_ptr<const OpDispatcher> dispatcher_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_OPERATORS_H_
