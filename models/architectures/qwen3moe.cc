// qwen3moe: qwen3 with experts, as llama has them.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen3Moe = {
    "qwen3moe", ModelPart::kHeadNorms | ModelPart::kExperts,
    ModelPart::kOutputMatrix | ModelPart::kYarn, RotaryStyle::kHalves};

}  // namespace quern
