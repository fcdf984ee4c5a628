// exaone4: olmo2, but each head of q and k is normalised by itself, as in
// qwen3. Frequencies may have factors, as in llama.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window", FixedKey::Kind::kInteger, 0,
     ", because every layer sees the whole text; EXAONE 4.0 32B, whose layers "
     "do not, is not read"},
};

}  // namespace

constexpr Architecture kExaone4 = {
    "exaone4",
    ModelPart::kBareInputs | ModelPart::kPostNorms | ModelPart::kHeadNorms,
    ModelPart::kOutputMatrix | ModelPart::kRopeFactors,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    kFixedKeys};

}  // namespace quern
