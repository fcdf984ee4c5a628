// The operators that models are made of.

#include "absl/status/status.h"
#include "quern/core/status_macros.h"
#include "quern/models/decoder/decoder.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/families/attention/mla_ops.h"
#include "quern/ops/registry/families/linear/experts_ops.h"
#include "quern/ops/registry/families/linear/linear_weights_ops.h"
#include "quern/ops/registry/families/recurrent/mixer_ops.h"
#include "quern/ops/registry/families/rows/embedding_ops.h"
#include "quern/ops/registry/families/rows/gate_ops.h"
#include "quern/ops/registry/families/rows/norm_ops.h"
#include "quern/ops/registry/families/rows/rope_ops.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

absl::Status RegisterDecoderOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterEmbeddingOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterExpertsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterGateOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterLinearWeightsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMixerOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMlaOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterNormOps(registry));
  return RegisterRopeOps(registry);
}

}  // namespace quern
