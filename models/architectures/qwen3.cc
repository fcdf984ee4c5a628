// qwen3: q, k = rope(rms_norm(q)), rope(rms_norm(k)), each head by itself; RoPE
// turns the pairs (j, j + rope_dim / 2).

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kQwen3 = {"qwen3", ModelPart::kHeadNorms,
                                 ModelPart::kOutputMatrix | ModelPart::kYarn,
                                 RotaryStyle::kHalves};

}  // namespace quern
