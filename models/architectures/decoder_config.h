#ifndef QUERN_MODELS_ARCHITECTURES_DECODER_CONFIG_H_
#define QUERN_MODELS_ARCHITECTURES_DECODER_CONFIG_H_

// The shape of a model, and how its architecture differs from others, read from
// the metadata of a GGUF file.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

struct DecoderConfig {
  // Upper bound of every dimension: far above any model, and low enough that
  // products of two dimensions fit in int64.
  static constexpr int64_t kMaxDim = int64_t{1} << 28;
  static constexpr int64_t kMaxLayers = 4096;
  static constexpr ModelParts kRecurrentParts =
      ModelPart::kShortConv | ModelPart::kMamba2 | ModelPart::kDeltaNet |
      ModelPart::kStates;
  static constexpr ModelParts kMixtureParts =
      ModelPart::kExperts | ModelPart::kSharedExpert | ModelPart::kSharedGate |
      ModelPart::kRouterBias | ModelPart::kMixtureBias;

  std::string architecture;  // one of models/architectures/architecture.h
  std::string name;          // general.name, or ""
  ModelParts parts;

  int64_t vocab = 0;    // rows of token_embd.weight
  int64_t context = 0;  // positions that the model was made for
  int64_t hidden = 0;   // elements of a token's row
  int64_t layers = 0;
  // Layers that the file has behind these, which predict more tokens at once
  // (MTP, nextn_predict_layers). They are not read.
  int64_t predicting_layers = 0;
  int64_t ffn = 0;      // of the feed-forward layer, if it is dense
  int64_t q_heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;  // head_dim, but for kLatent
  int64_t rope_dim = 0;   // even, <= head_dim
  // With kExperts; else 0.
  int64_t experts = 0;
  int64_t experts_used = 0;  // of each token
  int64_t expert_ffn = 0;    // of each expert
  int64_t shared_ffn = 0;    // of the shared expert, if there is one
  // With kRouting; else as here.
  int64_t leading_dense = 0;   // layers before the first with experts
  int64_t shared_experts = 0;  // whose columns, expert_ffn each, are shared_ffn
  static constexpr int64_t kSoftmax = 1, kSigmoid = 2;
  int64_t gating = kSoftmax;       // how the experts' scores are made
  bool experts_sum_to_one = true;  // weights of a token, before expert_scale
  float expert_scale = 1;
  // With kLatent; else 0. A query and a key have head_dim elements, of which
  // the last rope_dim rotate.
  int64_t kv_lora = 0;  // elements of a latent
  int64_t q_lora = 0;   // with kQueryLora: elements between the two matrices
  // With kYarn; else 0.
  float yarn_factor = 0;       // how much longer the context became
  int64_t yarn_original = 0;   // the context before
  float yarn_log_mul = 0;      // a tenth of mscale_all_dim, with kLatent
  bool yarn_truncates = true;  // see RotaryScaling::truncate
  // Which layers remember a sequence in a state of fixed size, and do not
  // attend to its keys: 1 for these, 0 for the others; empty if no layer does.
  std::vector<uint8_t> recurrent;
  int64_t conv_width = 0;  // tokens that a recurrent layer convolves; else 0
  // With kStates; else 0. In a gated delta net the heads are those of values,
  // and the groups are the heads of keys, which are ssm_state wide.
  int64_t ssm_inner = 0;  // channels, a multiple of ssm_heads
  int64_t ssm_heads = 0;  // a multiple of ssm_groups
  int64_t ssm_groups = 0;
  int64_t ssm_state = 0;  // numbers that a channel remembers
  // With kDeltaNet, layers attention_interval - 1, 2 * attention_interval - 1
  // and so on attend; else 0.
  int64_t attention_interval = 0;
  float rope_base = 10000;
  float local_rope_base = 10000;  // of local layers, with kLocalRope
  // Positions are divided by it, but those of local layers with kLocalRope.
  float rope_divisor = 1;
  float norm_eps = 0;
  // Divisors of the rotary frequencies, rope_dim / 2 finite numbers above 0;
  // empty for none.
  std::vector<double> rope_factors;

  bool rope = true;  // false: attention is without positions
  // If not 0, layers unrotated_interval - 1, 2 * unrotated_interval - 1 and so
  // on are without positions.
  int64_t unrotated_interval = 0;
  RotaryStyle rope_style = RotaryStyle::kPairs;
  LinearActivation activation = LinearActivation::kSiluAndMul;
  float embedding_scale = 1;  // x = scale * embedding[token]
  float residual_scale = 1;   // x += scale * contribution of a part
  float attention_scale = 0;  // of q k; 0 means 1 / sqrt(head_dim)
  float attention_cap = 0;    // of scale * q k, see AttentionSpec; 0: none
  float logit_cap = 0;        // logit = cap * tanh(logit / cap); 0: none
  float logit_divisor = 1;    // logit = logit / divisor
  // Number of tokens that a local layer attends to, including the query's own.
  // 0 means that no layer is local.
  int64_t window = 0;
  // With a window, layers window_interval - 1, 2 * window_interval - 1 and so
  // on see the whole text, and all others are local; 0: all are local.
  int64_t window_interval = 2;

  bool Has(ModelPart part) const { return parts.Has(part); }
  // Whether the architecture has layers of this kind.
  bool HasRecurrent() const { return parts.HasAny(kRecurrentParts); }
  // Whether the file tells which layers are recurrent by their numbers of
  // key/value heads, and not by an interval.
  bool ListsLayers() const {
    return HasRecurrent() && !Has(ModelPart::kDeltaNet);
  }
  bool IsRecurrent(int64_t layer) const {
    return !recurrent.empty() && recurrent[static_cast<size_t>(layer)] != 0;
  }
  // The parts of one layer: it is either recurrent or attends, and it either
  // has experts or is dense.
  ModelParts PartsIn(int64_t layer) const {
    ModelParts all = parts;
    if (!IsRecurrent(layer)) {
      all.Remove(kRecurrentParts);
      if (!Has(ModelPart::kLatent)) all.Add(ModelPart::kAttention);
    }
    if (Has(ModelPart::kExperts) && Has(ModelPart::kDense)) {
      all.Remove(layer < leading_dense ? kMixtureParts : ModelPart::kDense);
    }
    return all;
  }
  bool LayerHas(int64_t layer, ModelPart part) const {
    return PartsIn(layer).Has(part);
  }
  bool IsLocal(int64_t layer) const {
    return window > 0 &&
           (window_interval == 0 || (layer + 1) % window_interval != 0);
  }

  bool Rotates(int64_t layer) const {
    return rope &&
           (unrotated_interval == 0 || (layer + 1) % unrotated_interval != 0);
  }

  int64_t q_cols() const { return q_heads * head_dim; }
  int64_t kv_cols() const { return kv_heads * head_dim; }
  // With kRouting: columns of all shared experts, which are shared_ffn.
  int64_t shared_cols() const { return shared_experts * expert_ffn; }
  // With kLatent: elements of a query or key that do not rotate.
  int64_t nope() const { return head_dim - rope_dim; }
  // Rows of attn_q.weight: each head's query, and behind it its gate if it has
  // one.
  int64_t query_rows() const {
    return Has(ModelPart::kAttnGate) ? 2 * q_cols() : q_cols();
  }
  // Channels that a recurrent layer convolves.
  int64_t conv_channels() const {
    return Has(ModelPart::kStates) ? ssm_inner + 2 * ssm_groups * ssm_state
                                   : hidden;
  }

  // Reads and checks the keys <architecture>.* and the tensors' shapes: every
  // needed tensor must exist with the right dimensions, and no others may.
  // InvalidArgument names the key or tensor, which may be missing, and the
  // bound. A refused tensor's message describes the file and lists the
  // supported architectures and formats. Unimplemented for
  //
  //   - other architectures;
  //   - scaling of rotary positions by keys, other than YaRN and linear
  //     scaling where the architecture may have them;
  //   - experts where the architecture has none, groups of experts, and biases
  //     of experts where no key says how experts are scored;
  //   - latents whose size is not a multiple of 4;
  //   - keys that change what the model computes
  //     (models/architectures/fixed_keys.h), such as attention that is not
  //     causal;
  //   - layers that attend with different numbers of key/value heads;
  //   - tensors that the architecture does not have.
  //
  // Memory and time are within a small multiple of the file's header, of
  // rope_freqs.weight and of a layer.
  static absl::StatusOr<DecoderConfig> Create(const GgufFile& file);
};

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_DECODER_CONFIG_H_
