#ifndef QUERN_OPS_REGISTRY_ALL_OPS_H_
#define QUERN_OPS_REGISTRY_ALL_OPS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Registers every operator of this library that has a name.
absl::Status RegisterAllOps(OpRegistry& registry);

// The table of ops/README.md: one line for each operator, and for each dtype
// the providers that take it, first choice first. Internal if an operator takes
// none of its examples.
absl::StatusOr<std::string> ListOps(const OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_ALL_OPS_H_
