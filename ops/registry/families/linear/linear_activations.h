#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_ACTIVATIONS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_ACTIVATIONS_H_

// Private: LinearActivations by name, for schemas.

#include <utility>
#include <vector>

#include "quern/gemm/linear.h"

namespace quern {

// The words of LinearPlan's messages with their values, for
// OpDeclaration::Choice.
inline std::vector<std::pair<const char*, LinearActivations>>
LinearActivationsByName() {
  return {{"exact", LinearActivations::kExact},
          {"int8_blocks", LinearActivations::kInt8Blocks}};
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_ACTIVATIONS_H_
