// deepseek2: llama, but attention is over latents (ops/mla/mla.h), and the
// first layers alone are dense: the others have experts, whose scores, weights
// and factor the file gives, and shared ones that every token has. Rotary
// positions may be scaled by YaRN.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kDeepseek2 = {
    "deepseek2", ModelPart::kLatent | ModelPart::kRouting | ModelPart::kExperts,
    ModelPart::kOutputMatrix | ModelPart::kSharedExpert |
        ModelPart::kQueryLora | ModelPart::kSplitKvB | ModelPart::kYarn |
        ModelPart::kRouterBias,
    RotaryStyle::kPairs};

}  // namespace quern
