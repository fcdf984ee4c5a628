// granitemoe: granite with experts, as llama has them, and maybe one more that
// every token has.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kGraniteMoe = {
    "granitemoe", ModelPart::kMultipliers | ModelPart::kExperts,
    ModelPart::kOutputMatrix | ModelPart::kSharedExpert, RotaryStyle::kPairs};

}  // namespace quern
