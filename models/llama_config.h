#ifndef QUERN_MODELS_LLAMA_CONFIG_H_
#define QUERN_MODELS_LLAMA_CONFIG_H_

// The shape of a model, and what its architecture does differently from others,
// from the metadata of a GGUF file.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/gemm/epilogue.h"
#include "quern/models/gguf.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

struct LlamaConfig {
  std::string architecture;  // "llama", "qwen2", "qwen3" or "gemma2"
  std::string name;          // general.name, or ""

  int64_t vocab = 0;    // rows of token_embd.weight
  int64_t context = 0;  // positions that the model was made for
  int64_t hidden = 0;   // elements of a token's row
  int64_t layers = 0;
  int64_t ffn = 0;      // of the feed-forward layer
  int64_t q_heads = 0;  // a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_dim = 0;  // even, <= head_dim
  double rope_base = 10000;
  float norm_eps = 0;
  // What the rotary frequencies are divided by, rope_dim / 2 finite numbers
  // above 0, as Llama 3.1 and later has them; empty for none.
  std::vector<double> rope_factors;

  // What an architecture adds to Llama, or does differently.
  RotaryStyle rope_style = RotaryStyle::kPairs;
  bool qkv_bias = false;    // q, k and v have one
  bool head_norms = false;  // each head of q and k: rms_norm, before RoPE
  bool post_norms = false;  // what is added to x: rms_norm, before it is
  LinearActivation activation = LinearActivation::kSiluAndMul;
  float embedding_scale = 1;  // x = scale * embedding[token]
  float attention_scale = 0;  // of q k; 0: 1 / sqrt(head_dim)
  float attention_cap = 0;    // of scale * q k, see AttentionSpec; 0: none
  float logit_cap = 0;        // logit = cap * tanh(logit / cap); 0: none
  // Tokens that a local layer sees, the query's own among them; 0: no layer is
  // local.
  int64_t window = 0;

  bool IsLocal(int64_t layer) const { return window > 0 && layer % 2 == 0; }

  int64_t q_cols() const { return q_heads * head_dim; }
  int64_t kv_cols() const { return kv_heads * head_dim; }

  // Reads and checks the keys, <architecture>.*, and the tensors' shapes: every
  // tensor that the model needs is there with the right dimensions, and there
  // is no other. NotFound and InvalidArgument name the key or tensor and the
  // bound; Unimplemented: another architecture, rope scaling by keys, experts,
  // tensors that the architecture does not have, with what the file is and
  // which architectures and formats are supported. Memory and time are within a
  // small multiple of the file's header, of rope_freqs.weight and of a layer.
  static absl::StatusOr<LlamaConfig> Create(const GgufFile& file);
};

// Whether the file has an output.weight; else token_embd.weight serves twice.
inline bool HasOutputWeight(const GgufFile& file) {
  return file.HasTensor("output.weight");
}

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_CONFIG_H_
