// llama: the forward pass of models/decoder/decoder.h; RoPE turns the pairs
// (2j, 2j + 1). With experts it is Mixtral:
//
//   x += sum over the experts_used of the largest router logits of
//        w * linear(silu(gate) * up), w their softmax

#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

constexpr Architecture kLlama = {"llama", ModelParts(),
                                 ModelPart::kOutputMatrix |
                                     ModelPart::kRopeFactors |
                                     ModelPart::kExperts | ModelPart::kYarn,
                                 RotaryStyle::kPairs};

}  // namespace quern
