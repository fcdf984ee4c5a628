#ifndef QUERN_TOOLS_RANDOM_MODEL_H_
#define QUERN_TOOLS_RANDOM_MODEL_H_

// GGUF files with random weights, of each architecture in
// models/architectures/architecture.h. Their results mean nothing, but cost
// what the real model costs.
//
// A matrix of fan-in n has the standard deviation n^-1/2, and so have the
// weights of a convolution of n tokens. The matrices that add
// to the residual stream (attn_output, ffn_down) have (2 * layers * n)^-1/2, so
// that the stream stays of order 1 through any number of layers. Weights of
// norms are uniform from 0.5 to 1.5, biases from -0.25 to 0.25, and decays from
// -1.5 to -0.5, so that one that is applied in another place, or not at all,
// shows. The embedding has the standard deviation 1; in Gemma,
// LFM2 and Granite, where it is the output matrix too, it has that of a
// matrix, and in Gemma it is multiplied by sqrt(n), in Granite by 12.
// A weight is the sum of four random bytes, less its mean, scaled: bell-shaped,
// at most 3.5 standard deviations, and the same bits on every machine.
//
// The vocabulary is <unk> <s> </s>, the 256 bytes, the space, and numbered
// words that no text encodes to, so that a text of n bytes is about n tokens.
// For Qwen's models it is the 256 bytes, " t", <|endoftext|> and such words.

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

// Recurrent layers of a model, if it has any, and what else such models have.
struct RandomRecurrence {
  // 'r' for a recurrent layer and 'a' for one that attends, repeated for all
  // layers.
  absl::string_view kinds = "";
  int64_t conv_width = 0;  // tokens that a recurrent layer convolves
  // Mamba-2: channels, heads, groups, and the numbers of a state's row. Its
  // other layers have no rotary positions.
  int64_t ssm_inner = 0;
  int64_t ssm_heads = 0;
  int64_t ssm_groups = 0;
  int64_t ssm_state = 0;
  // Gated delta nets, whose heads of values are ssm_heads, and of keys
  // ssm_groups: each layer so many after another attends, and `kinds` is empty.
  // With fewer layers than that, the last one attends.
  int64_t attention_interval = 0;
  int64_t rope_dim = 0;    // elements of a head that are rotated; 0: all
  int64_t shared_ffn = 0;  // columns of a shared expert; 0: none
};

// Attention over latents, if a model has it. head_dim is then what a query has,
// the last `rope` elements of which rotate.
struct RandomLatent {
  int64_t kv_lora = 0;  // 0: attention is over keys and values of heads
  int64_t rope = 0;
  int64_t value_dim = 0;
  // Layers before the first with experts, also in models without latents.
  int64_t leading_dense = 0;
  int64_t shared_experts = 0;  // each as wide as one of the others
  // YaRN, also in models without latents: how much longer the context became,
  // the context before, and, with latents, a tenth of mscale_all_dim.
  float yarn_factor = 0;
  int64_t yarn_original = 0;
  float yarn_log_mul = 0;
  int64_t q_lora = 0;  // between two matrices of queries; 0: one matrix
};

struct RandomModelShape {
  absl::string_view name;
  int64_t layers = 0;  // 1 to DecoderConfig::kMaxLayers; one of them attends
  int64_t hidden = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;  // >= 260: control tokens, bytes, space
  int64_t context = 0;
  float rope_base = 10000;
  float norm_eps = 1e-5f;
  absl::string_view architecture =
      "llama";         // from models/architectures/architecture.h
  int64_t window = 0;  // window of gemma2's local layers
  // If positive, the file has rope_freqs.weight: Llama 3.1's factors, which
  // divide low rotary frequencies by this value (kLlama3 in
  // ops/rope/rotary_scaling.h, for an original context of 8192).
  float rope_scale = 0;
  // Experts of a layer, of a token, and the columns of each; 0: a dense
  // feed-forward layer.
  int64_t experts = 0;
  int64_t experts_used = 0;
  int64_t expert_ffn = 0;
  RandomRecurrence recurrence = {};
  RandomLatent latent = {};
};

// The shapes that can be chosen by name.
absl::Span<const RandomModelShape> RandomModelShapes();

// InvalidArgument: a number of layers that no model may have, or of which all
// are recurrent; a vocabulary that is too small.
absl::Status CheckRandomModel(const RandomModelShape& shape);

// Writes a file at `path`; the same seed gives the same bytes. `progress`,
// unless null, is called now and then with the bytes done and the total.
// Memory: the vocabulary and 1 MiB. Refuses what CheckRandomModel and
// GgufFileWriter refuse.
absl::Status WriteRandomModel(
    const RandomModelShape& shape, GgufTensorType type, uint64_t seed,
    const std::string& path,
    const std::function<void(int64_t done, int64_t total)>& progress);

}  // namespace quern

#endif  // QUERN_TOOLS_RANDOM_MODEL_H_
