// granite: llama, with granitehybrid's multipliers, and without its recurrent
// layers. q and k are not rotated if rope.scaling.finetuned is false.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kGranite = {"granite", ModelPart::kMultipliers,
                                   ModelPart::kOutputMatrix,
                                   RotaryStyle::kPairs};

}  // namespace quern
