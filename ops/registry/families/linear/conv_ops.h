#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_CONV_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_CONV_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// conv2d, conv3d: ops/conv/conv.h. x is [batch, channels, height, width], or
// [batch, channels, depth, height, width]; weight is [out_channels, channels /
// groups, kernel..], dense but for its first dimension; bias has the weight's
// dtype. Padding is on both sides of a dimension and of zeros. Prepare packs
// weight and bias, and CheckArgs then refuses others. The batch may differ from
// the one that the operator was made with, the other extents may not;
// WorkspaceBytes takes the largest batch.
//
// Providers: simd; reference, which sums in double and rounds once.
//
// Brings gemm along.
absl::Status RegisterConvOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_CONV_OPS_H_
