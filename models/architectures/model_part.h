#ifndef QUERN_MODELS_ARCHITECTURES_MODEL_PART_H_
#define QUERN_MODELS_ARCHITECTURES_MODEL_PART_H_

// What models differ in, and sets of it. A new part is a line of ModelPart.

#include <cstddef>
#include <cstdint>

namespace quern {

// Parts that a model may have and a plain Llama does not, and tensors that a
// file may omit.
enum class ModelPart : uint8_t {
  kQkvBias,        // q, k and v have biases
  kHeadNorms,      // rms_norm of each head of q and k, before RoPE
  kLateHeadNorms,  // with kHeadNorms: behind RoPE
  kPostNorms,      // rms_norm of what is added to the stream
  kSoftCaps,       // caps on attention's scores and on logits
  kLocalLayers,    // some layers have a window
  kOutputMatrix,   // output.weight; otherwise the embedding
  kRopeFactors,    // rope_freqs.weight, as Llama 3.1 and later have it
  kExperts,        // the feed-forward layer is a mixture of experts
  kDense,          // the feed-forward layer has one gate, one up and one down
  kOutputNorm,     // the last norm is output_norm.weight
  kEmbdNorm,       // the last norm is token_embd_norm.weight
  kShortConv,      // some layers are LFM2's short convolution
  kMamba2,         // some layers are Mamba-2
  kSharedExpert,   // one extra expert, applied to every token
  kMultipliers,    // factors of embedding, contributions, scores and logits
  kAttention,      // of a layer: it attends to keys and values of heads
  kLatent,         // layers attend to latents (DeepSeek)
  kPlainQuery,     // with kLatent: one matrix makes queries
  kQueryLora,      // with kLatent: two matrices, with a norm between, make them
  kJoinedKvB,      // with kLatent: attn_kv_b makes keys and values
  kSplitKvB,       // with kLatent: attn_k_b and attn_v_b, one matrix per head
  kYarn,           // rotary positions are scaled by YaRN
  kRouting,        // the file says how experts are scored and weighted
  kRouterBias,     // biases change which experts are chosen, not their weights
  kDeltaNet,       // some layers are gated delta nets
  kStates,         // recurrent layers have states: kMamba2 or kDeltaNet
  kAttnGate,       // attention's output times a sigmoid of the input
  kSharedGate,     // the shared expert times a sigmoid of the input
  kFfnNorm,        // the feed-forward layer's norm is ffn_norm.weight
  kPostMixNorm,    // that norm is post_attention_norm.weight
  kAttnNorm,       // a mixer's norm is attn_norm.weight
  kBareInputs,     // mixers and feed-forward layers take x itself, not its norm
  kWholeNorms,     // rms_norm of all heads of q together, and of k, before RoPE
  kJoinedQkv,      // the rows of q, k and v are in attn_qkv.weight
  kOwnQkv,         // q, k and v have tensors of their own
  kJoinedGateUp,   // the rows of gate and up are in ffn_up.weight
  kOwnGateUp,      // gate and up have tensors of their own
  kLocalRope,      // local layers have a rotary base of their own, unscaled
  kLinearRope,     // positions are divided by a number
  kSinks,          // scores of a head compete with a number of the head's own
  kOutputBias,     // attention's last matrix has a bias
  kMixtureBias,    // the router and the matrices of experts have biases
  kCount,          // the number of parts
};
constexpr size_t kNumModelParts = static_cast<size_t>(ModelPart::kCount);

class ModelParts {
 public:
  constexpr ModelParts() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a part is a set of one
  constexpr ModelParts(ModelPart part) {
    has_[static_cast<size_t>(part)] = true;
  }

  constexpr void Add(const ModelParts& others) {
    for (size_t i = 0; i < kNumModelParts; ++i) {
      has_[i] = has_[i] || others.has_[i];
    }
  }
  constexpr void Remove(const ModelParts& others) {
    for (size_t i = 0; i < kNumModelParts; ++i) {
      has_[i] = has_[i] && !others.has_[i];
    }
  }

  constexpr bool Has(ModelPart part) const {
    return has_[static_cast<size_t>(part)];
  }
  constexpr bool HasAll(const ModelParts& others) const {
    for (size_t i = 0; i < kNumModelParts; ++i) {
      if (others.has_[i] && !has_[i]) return false;
    }
    return true;
  }
  constexpr bool HasAny(const ModelParts& others) const {
    for (size_t i = 0; i < kNumModelParts; ++i) {
      if (others.has_[i] && has_[i]) return true;
    }
    return false;
  }
  constexpr bool empty() const { return ModelParts().HasAll(*this); }

 private:
  bool has_[kNumModelParts] = {};
};

constexpr ModelParts operator|(ModelParts a, ModelPart b) {
  a.Add(b);
  return a;
}

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_MODEL_PART_H_
