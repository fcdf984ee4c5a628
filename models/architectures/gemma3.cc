// gemma3: gemma2 without caps, and with norms of each head of q and k, as qwen3
// has them. Layers 5, 11, 17 ... see the whole text, and their positions may be
// scaled linearly. All others are local, and have a rotary base of their own.

#include <cmath>
#include <cstdint>

#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr FixedKey kFixedKeys[] = {
    {"attention.sliding_window_pattern", FixedKey::Kind::kInteger, 6,
     ", because five of six layers are local"},
    {"attn_logit_softcapping", FixedKey::Kind::kReal, 0,
     ", because scores have no cap"},
    {"final_logit_softcapping", FixedKey::Kind::kReal, 0,
     ", because logits have no cap"},
};

void Adjust(DecoderConfig& c) {
  const auto hidden = static_cast<double>(c.hidden);
  c.embedding_scale = static_cast<float>(std::sqrt(hidden));
  c.window_interval = 6;
  // As in gemma2, the model of 27 billion weights is recognised by its number
  // of layers.
  constexpr int64_t kLayersOf27B = 62;
  if (c.layers == kLayersOf27B) {
    c.attention_scale =
        static_cast<float>(std::sqrt(static_cast<double>(c.q_heads) / hidden));
  }
}

}  // namespace

constexpr Architecture kGemma3 = {
    "gemma3",
    ModelPart::kPostNorms | ModelPart::kHeadNorms | ModelPart::kLocalLayers |
        ModelPart::kLocalRope,
    ModelPart::kOutputMatrix | ModelPart::kLinearRope,
    RotaryStyle::kHalves,
    LinearActivation::kGeluTanhAndMul,
    kFixedKeys,
    &Adjust};

}  // namespace quern
