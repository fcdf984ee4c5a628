// phi3: llama, but one tensor has the rows of q, k and v, and one those of gate
// and up. RoPE turns the pairs (j, j + rope_dim / 2). With a window, every
// layer is local. Models of longer contexts, whose frequencies have factors
// (rope_factors_long.weight), are refused.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

// No layer sees more than the window.
void Adjust(DecoderConfig& c) { c.window_interval = 0; }

}  // namespace

constexpr Architecture kPhi3 = {
    "phi3",
    ModelPart::kJoinedQkv | ModelPart::kJoinedGateUp,
    ModelPart::kOutputMatrix | ModelPart::kLocalLayers,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    {},
    &Adjust};

}  // namespace quern
