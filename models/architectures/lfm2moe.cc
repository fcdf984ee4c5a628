// lfm2moe: lfm2, but the first layers alone are dense: the others have experts,
// whose scores the file says how to make, and whose weights sum to 1.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window", FixedKey::Kind::kInteger, 0,
     ", because every layer that attends sees the whole text"},
    {kExpertsNormKey, FixedKey::Kind::kTrue, 1,
     ", because the weights of a token's experts sum to 1"},
};

void Adjust(DecoderConfig& c) { c.experts_sum_to_one = true; }

}  // namespace

constexpr Architecture kLfm2Moe = {
    "lfm2moe",
    ModelPart::kHeadNorms | ModelPart::kShortConv | ModelPart::kEmbdNorm |
        ModelPart::kRouting | ModelPart::kExperts,
    ModelPart::kOutputMatrix | ModelPart::kRouterBias,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    kFixedKeys,
    &Adjust};

}  // namespace quern
