// qwen2moe: qwen2 with experts, whose weights are shares of the softmax of all
// scores and do not sum to 1. There may be an expert that every token has,
// times sigmoid(linear(rms_norm(x))).

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

void Adjust(DecoderConfig& c) { c.experts_sum_to_one = false; }

}  // namespace

constexpr Architecture kQwen2Moe = {
    "qwen2moe",
    ModelPart::kQkvBias | ModelPart::kExperts | ModelPart::kSharedGate,
    ModelPart::kOutputMatrix | ModelPart::kSharedExpert,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    {},
    &Adjust};

}  // namespace quern
