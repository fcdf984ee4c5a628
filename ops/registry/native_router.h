#ifndef QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_
#define QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router_spec.h"

namespace quern {

// The formulas of ops/moe/router_spec.h as plain loops in f32, on the calling
// thread: what RouterPlan::Execute does, with exponentials rounded from double.
void NativeRouter(const RouterSpec& spec, const AnyTensorView& logits,
                  const AnyTensorView& bias, const MatrixView<float>& weights,
                  const MatrixView<int32_t>& ids);

// "softmax", "sigmoid" or "sqrtsoftplus", the names that operators use.
absl::StatusOr<RouterScore> RouterScoreOf(absl::string_view op,
                                          const std::string& name);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_
