// glm4moe: the first layers are dense, and the others have experts, whose
// scores the file says how to make, and one more that every token has. q, k and
// v have biases, and maybe norms of each head of q and k. Half of each head is
// rotated, as rope.dimension_count says.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kGlm4Moe = {
    "glm4moe",
    ModelPart::kPostMixNorm | ModelPart::kRouting | ModelPart::kExperts,
    ModelPart::kOutputMatrix | ModelPart::kQkvBias | ModelPart::kHeadNorms |
        ModelPart::kSharedExpert | ModelPart::kRouterBias,
    RotaryStyle::kHalves};

}  // namespace quern
