#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_WEIGHTS_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_WEIGHTS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// linear: a layer on LinearWeights of any format, as gemm/linear.h computes it.
// `weights` is read while the operator is made and may be dropped afterwards:
// an implementation that needs it longer keeps a copy, which shares the bytes.
// Bytes that the weights have adopted are read as long as the operator lives. x
// is f32, bf16 or f16. `activation` has the names of gemm/epilogue.h. A
// residual is added to the result in place, so its view must also be given as
// the result. An empty out_dtype means the residual's dtype, or that of x
// without one. `activations` (LinearSpec::activations) is "exact", for all
// weights, or "int8_blocks", for kBlocks and for int4 in groups, where k and
// groups are multiples of 32. Operators of several products apply it to those
// of their weights that allow it.
//
// Providers: simd and onednn, as gemm/linear.h (and QUERN_KERNELS) chooses:
// FailedPrecondition where QUERN_KERNELS asks for kernels that cannot run the
// layer. onednn packs its own form when the operator is made, on one thread.
// reference decodes each weight where it is used and sums in double, by rows
// that are never rounded; it has no kBlocks.
//
// Brings gemm along.
absl::Status RegisterLinearWeightsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_WEIGHTS_OPS_H_
