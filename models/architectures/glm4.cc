// glm4: llama, with norms of what is added to the stream, as gemma2 has them.
// One tensor has the rows of gate and up. q, k and v may have biases. Half of
// each head is rotated, as rope.dimension_count says.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kGlm4 = {
    "glm4", ModelPart::kPostNorms | ModelPart::kJoinedGateUp,
    ModelPart::kOutputMatrix | ModelPart::kQkvBias, RotaryStyle::kPairs};

}  // namespace quern
