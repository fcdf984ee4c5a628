#ifndef QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_
#define QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_

#include <cstdint>

#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router_spec.h"

namespace quern {

// The formulas of ops/moe/router_spec.h as plain loops in f32, on the calling
// thread: what RouterPlan::Execute does, with exponentials rounded from double.
void NativeRouter(const RouterSpec& spec, const AnyTensorView& logits,
                  const AnyTensorView& bias, const MatrixView<float>& weights,
                  const MatrixView<int32_t>& ids);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NATIVE_ROUTER_H_
