// gpt-oss: experts with biases and a clamped activation, whose weights are a
// softmax of the chosen scores, which is what experts_sum_to_one gives too.
// Attention has sinks and biases, and a window in every second layer. YaRN's
// range does not end at whole pairs.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window_pattern", FixedKey::Kind::kInteger, 2,
     ", because every second layer is local"},
};

void Adjust(DecoderConfig& c) { c.yarn_truncates = false; }

}  // namespace

constexpr Architecture kGptOss = {
    "gpt-oss",
    ModelPart::kQkvBias | ModelPart::kOutputBias | ModelPart::kSinks |
        ModelPart::kLocalLayers | ModelPart::kPostMixNorm |
        ModelPart::kExperts | ModelPart::kMixtureBias,
    ModelPart::kOutputMatrix | ModelPart::kYarn,
    RotaryStyle::kHalves,
    LinearActivation::kSwigluOaiAndMul,
    kFixedKeys,
    &Adjust};

}  // namespace quern
