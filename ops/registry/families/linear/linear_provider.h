#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_PROVIDER_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_PROVIDER_H_

// Private: the plan with which a provider of a linear operator runs, and what
// schemas call its activations.

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

enum class LinearProvider : uint8_t { kSimd, kOneDnn, kReference };

// The provider that registries call "simd", "onednn" or "reference".
inline LinearProvider LinearProviderOf(absl::string_view name) {
  return name == "simd"     ? LinearProvider::kSimd
         : name == "onednn" ? LinearProvider::kOneDnn
                            : LinearProvider::kReference;
}

// kSimd: the packed plan, where gemm/linear.h chooses it. Unimplemented where
// it chooses another implementation, whose provider is asked next;
// FailedPrecondition where QUERN_KERNELS asks for kernels that cannot run the
// layer. kOneDnn: oneDNN's plan, packed on the calling thread; Unimplemented
// where it has none, or is not linked. kReference: the packed plan, which
// accepts what our kernels accept. `op` opens the messages.
absl::StatusOr<LinearPlan> LinearPlanOf(absl::string_view op,
                                        LinearProvider provider,
                                        const LinearSpec& spec,
                                        const LinearWeights& weights);

// The words of LinearPlan's messages with their values, for
// OpDeclaration::Choice.
inline std::vector<std::pair<const char*, LinearActivations>>
LinearActivationsByName() {
  return {{"exact", LinearActivations::kExact},
          {"int8_blocks", LinearActivations::kInt8Blocks}};
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_PROVIDER_H_
