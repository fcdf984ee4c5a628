#ifndef QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_MIXER_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_MIXER_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Layers over pools of windows and states, from x[tokens, hidden] to
// [tokens, hidden]; equations are in ops/mixer. in_proj, out_proj and the other
// products are LinearWeights of any format, read while the operator is made and
// dropped afterwards as for `linear`. State indices and starts are i32 or i64:
// query_start_loc [sequences + 1] and has_initial_state u8[sequences] may be
// left out, as in recurrent_ops.h; null_slot is the index of a sequence to
// skip. Sizes come from the shapes of the tensors. `activations` is that of
// `linear`, for weights that allow it.
//
//   short_conv           ops/mixer/short_conv.h
//   mamba_mixer          ops/mixer/mamba_mixer.h; a is [1, channels, d_state],
//                        d and dt_bias [1, channels]
//   plamo2_mamba_mixer   the same with a, d and dt_bias [heads]
//   mamba_mixer2         ops/mixer/mamba_mixer2.h; without `norm` the gate
//                        alone
//   gated_delta_net      ops/mixer/gated_delta_net.h
//
// The provider is simd; there is no reference, and so no policy may disable
// them. Packs nothing. Brings gemm along.
absl::Status RegisterMixerOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_MIXER_OPS_H_
