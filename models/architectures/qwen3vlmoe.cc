// qwen3vlmoe: the text part of Qwen3-VL with experts, which is qwen3moe.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen3VlMoe = {
    "qwen3vlmoe", ModelPart::kHeadNorms | ModelPart::kExperts,
    ModelPart::kOutputMatrix, RotaryStyle::kHalves};

}  // namespace quern
