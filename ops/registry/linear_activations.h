#ifndef QUERN_OPS_REGISTRY_LINEAR_ACTIVATIONS_H_
#define QUERN_OPS_REGISTRY_LINEAR_ACTIVATIONS_H_

// Private: LinearActivations by name, for schemas.

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear.h"

namespace quern {

// The activations that `name` means: "exact" or "int8_blocks", the words of
// LinearPlan's messages. InvalidArgument for others.
inline absl::StatusOr<LinearActivations> LinearActivationsOf(
    absl::string_view op, absl::string_view name) {
  if (name == "exact") return LinearActivations::kExact;
  if (name == "int8_blocks") return LinearActivations::kInt8Blocks;
  return InvalidArgument(op, "activations=\"", name,
                         "\"; need exact or int8_blocks");
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_LINEAR_ACTIVATIONS_H_
