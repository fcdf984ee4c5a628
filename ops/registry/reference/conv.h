#ifndef QUERN_OPS_REGISTRY_REFERENCE_CONV_H_
#define QUERN_OPS_REGISTRY_REFERENCE_CONV_H_

#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv.h"

namespace quern {

// Convolution as plain loops, summed in double and rounded once. x is [batch,
// channels, depth, height, width], the other tensors as ConvPlan takes them; a
// bias of rank 0 adds nothing.
void NativeConv(const ConvSpec& spec, const AnyTensorView& x,
                const AnyTensorView& weight, const AnyTensorView& bias,
                const AnyTensorView& out);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_CONV_H_
