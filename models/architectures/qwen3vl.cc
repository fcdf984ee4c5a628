// qwen3vl: the text part of Qwen3-VL, which is qwen3. A token of text has one
// position in all of rope.dimension_sections.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen3Vl = {"qwen3vl", ModelPart::kHeadNorms,
                                   ModelPart::kOutputMatrix,
                                   RotaryStyle::kHalves};

}  // namespace quern
