// qwen3next: qwen3moe; every full_attention_interval-th layer attends, and
//
//   x += linear(attention(q, cache) * sigmoid(gate))
//
// where q and gate come from one matrix. The other layers are gated delta nets
// (ops/mixer/gated_delta_net.h). There may be an expert that every token has,
// times sigmoid(linear(rms_norm(x))).

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen3Next = {
    "qwen3next",
    ModelPart::kHeadNorms | ModelPart::kExperts | ModelPart::kDeltaNet |
        ModelPart::kStates | ModelPart::kAttnGate | ModelPart::kSharedGate |
        ModelPart::kPostMixNorm,
    ModelPart::kOutputMatrix | ModelPart::kSharedExpert, RotaryStyle::kHalves};

}  // namespace quern
