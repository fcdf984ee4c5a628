// qwen2vl: the text part of Qwen2-VL and Qwen2.5-VL, which is qwen2. A token of
// text has one position in all of rope.dimension_sections.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen2Vl = {"qwen2vl", ModelPart::kQkvBias,
                                   ModelPart::kOutputMatrix,
                                   RotaryStyle::kHalves};

}  // namespace quern
