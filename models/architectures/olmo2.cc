// olmo2: norms are behind a layer's parts, not in front of them, and q and k
// are normalised whole, not head by head:
//
//   q, k = rope(rms_norm(q)), rope(rms_norm(k))
//   x += rms_norm(linear(attention(q, cache)))
//   x += rms_norm(linear(silu(gate) * up))
//
// where q, k, v, gate and up are linear(x). RoPE turns the pairs
// (j, j + rope_dim / 2).

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window", FixedKey::Kind::kInteger, 0,
     ", because every layer sees the whole text; OLMo 3, whose layers do not, "
     "is not read"},
};

}  // namespace

constexpr Architecture kOlmo2 = {
    "olmo2",
    ModelPart::kBareInputs | ModelPart::kPostNorms | ModelPart::kWholeNorms,
    ModelPart::kOutputMatrix,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    kFixedKeys};

}  // namespace quern
