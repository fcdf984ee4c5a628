// qwen2: q, k and v have biases; RoPE turns the pairs (j, j + rope_dim / 2).

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen2 = {"qwen2", ModelPart::kQkvBias,
                                 ModelPart::kOutputMatrix | ModelPart::kYarn,
                                 RotaryStyle::kHalves};

}  // namespace quern
