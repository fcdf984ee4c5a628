// gemma2: for the tokens t of a step,
//
//   x = sqrt(hidden) * embedding[token]
//   x += rms_norm(linear(attention(q, cache)))
//   x += rms_norm(linear(gelu_tanh(gate) * up))
//
// Attention's scores and logits have soft caps. Layers 0, 2, 4 ... are local: a
// query sees no more than the window's tokens. RoPE turns the pairs
// (j, j + rope_dim / 2).

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
    {"attention.sliding_window_pattern", FixedKey::Kind::kInteger, 2,
     ", because every second layer is local"},
};

void Adjust(DecoderConfig& c) {
  const auto hidden = static_cast<double>(c.hidden);
  c.embedding_scale = static_cast<float>(std::sqrt(hidden));
  // The file does not give the divisor of queries. It is head_dim, except for
  // the model of 27 billion weights, which is recognised by its number of
  // layers.
  constexpr int64_t kLayersOf27B = 46;
  if (c.layers == kLayersOf27B) {
    c.attention_scale =
        static_cast<float>(std::sqrt(static_cast<double>(c.q_heads) / hidden));
  }
}

}  // namespace

constexpr Architecture kGemma2 = {
    "gemma2",
    ModelPart::kPostNorms | ModelPart::kSoftCaps | ModelPart::kLocalLayers,
    ModelParts(),
    RotaryStyle::kHalves,
    LinearActivation::kGeluTanhAndMul,
    kFixedKeys,
    &Adjust};

}  // namespace quern
