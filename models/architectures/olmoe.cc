// olmoe: rms_norm of all heads of q together, and of k; experts whose weights
// are shares of the softmax of all scores and do not sum to 1.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

void Adjust(DecoderConfig& c) { c.experts_sum_to_one = false; }

}  // namespace

constexpr Architecture kOlmoe = {"olmoe",
                                 ModelPart::kWholeNorms | ModelPart::kExperts,
                                 ModelPart::kOutputMatrix,
                                 RotaryStyle::kHalves,
                                 LinearActivation::kSiluAndMul,
                                 {},
                                 &Adjust};

}  // namespace quern
