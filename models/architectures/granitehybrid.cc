// granitehybrid: llama, with recurrent layers of Mamba-2
// (ops/mixer/mamba_mixer2.h) where attention.head_count_kv is 0, and
// multipliers from 2^-20 to 2^20:
//
//   x = embedding_scale * embedding[token];  x += residual_scale * ..
//   scores times attention_scale;  logits / logit_scale
//
// q and k are not rotated if rope.scaling.finetuned is false. With experts,
// there may be one that every token has.

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kGraniteHybrid = {
    "granitehybrid",
    ModelPart::kMamba2 | ModelPart::kStates | ModelPart::kMultipliers,
    ModelPart::kOutputMatrix | ModelPart::kExperts | ModelPart::kSharedExpert,
    RotaryStyle::kPairs};

}  // namespace quern
