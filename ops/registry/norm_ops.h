#ifndef QUERN_OPS_REGISTRY_NORM_OPS_H_
#define QUERN_OPS_REGISTRY_NORM_OPS_H_

#include "absl/status/status.h"
#include "ops/registry/op_registry.h"

namespace quern {

// rms_norm, fused_add_rms_norm (in place), gemma_rms_norm, rms_norm_gated.
// Providers: simd, and reference, which rounds as a framework does: the normed
// row to the dtype of the weight, and their product; norms of the unrounded
// sum.
absl::Status RegisterNormOps(OpRegistry& registry);

// mixer2_gated_rms_norm, the output norm of Mamba-2, of h = x * silu(gate):
//
//   out = round(h / rms of its group * weight), or round(h) if not use_rms_norm
//
// n_groups is of all ranks; x, gate and weight are the rank's columns. A group
// lies on one rank: Unimplemented where n_groups is no multiple of the ranks.
absl::Status RegisterMixer2NormOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NORM_OPS_H_
