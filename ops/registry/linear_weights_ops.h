#ifndef QUERN_OPS_REGISTRY_LINEAR_WEIGHTS_OPS_H_
#define QUERN_OPS_REGISTRY_LINEAR_WEIGHTS_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// linear: a layer on LinearWeights of any format, as gemm/linear.h computes it.
// `weights` is read while the operator is made and may be dropped afterwards;
// whoever needs it longer takes a copy, which shares the bytes. Bytes that the
// weights have adopted are read as long as the operator lives. x is f32, bf16
// or f16. `activation` has the names of gemm/epilogue.h. With a residual, the
// layer adds to it: the view of the residual is also what is returned.
// out_dtype is the residual's if it is empty, or else that of x.
//
// Providers: simd and onednn, whichever gemm/linear.h (and QUERN_KERNELS)
// chooses; onednn packs its form when the operator is made, on one thread.
// reference decodes each weight where it is used, with sums in double.
//
// Brings gemm along.
absl::Status RegisterLinearWeightsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_LINEAR_WEIGHTS_OPS_H_
