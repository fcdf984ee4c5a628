// seed_oss: qwen2, whose feed-forward norm is post_attention_norm.weight.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kSeedOss = {
    "seed_oss", ModelPart::kQkvBias | ModelPart::kPostMixNorm,
    ModelPart::kOutputMatrix, RotaryStyle::kHalves};

}  // namespace quern
