// ernie4_5: llama; q, k and v may have biases.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kErnie45 = {
    "ernie4_5", ModelParts(), ModelPart::kOutputMatrix | ModelPart::kQkvBias,
    RotaryStyle::kPairs};

}  // namespace quern
