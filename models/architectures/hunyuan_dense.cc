// hunyuan-dense: qwen3, but the norms of each head of q and k come behind RoPE.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kHunyuanDense = {
    "hunyuan-dense", ModelPart::kHeadNorms | ModelPart::kLateHeadNorms,
    ModelPart::kOutputMatrix, RotaryStyle::kHalves};

}  // namespace quern
