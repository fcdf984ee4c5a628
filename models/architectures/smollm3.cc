// smollm3: llama, but q and k of layers 3, 7, 11 ... are not rotated.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

void Adjust(DecoderConfig& c) { c.unrotated_interval = 4; }

}  // namespace

constexpr Architecture kSmolLm3 = {"smollm3",
                                   ModelParts(),
                                   ModelPart::kOutputMatrix,
                                   RotaryStyle::kPairs,
                                   LinearActivation::kSiluAndMul,
                                   {},
                                   &Adjust};

}  // namespace quern
