// lfm2: qwen3, and recurrent layers where attention.head_count_kv is 0:
//
//   [B, C, u] = linear(rms_norm(x));  x += linear(C * conv(B * u))
//
// conv is causal, over a few tokens of each channel.

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window", FixedKey::Kind::kInteger, 0,
     ", because every layer that attends sees the whole text"},
};

}  // namespace

constexpr Architecture kLfm2 = {
    "lfm2",
    ModelPart::kHeadNorms | ModelPart::kShortConv | ModelPart::kEmbdNorm,
    ModelPart::kOutputMatrix,
    RotaryStyle::kHalves,
    LinearActivation::kSiluAndMul,
    kFixedKeys};

}  // namespace quern
