#ifndef QUERN_MODELS_LLAMA_IMPL_H_
#define QUERN_MODELS_LLAMA_IMPL_H_

// Private: what a LlamaModel owns, shared by its loader and its forward pass.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/packed_file.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/rope/rotary_embedding.h"

namespace quern {

struct LlamaLayer {
  AlignedBuffer attn_norm;       // f32[hidden]
  LinearPlan qkv;                // hidden -> q_cols + 2 kv_cols
  AlignedBuffer q_norm, k_norm;  // f32[head_dim], with head_norms
  LinearPlan attn_out;           // q_cols -> hidden
  AlignedBuffer post_attn_norm;  // f32[hidden], with post_norms
  AlignedBuffer ffn_norm;        // f32[hidden]
  LinearPlan gate_up;            // hidden -> ffn: act(gate) * up
  LinearPlan down;               // ffn -> hidden
  AlignedBuffer post_ffn_norm;   // f32[hidden], with post_norms
};

struct LlamaModel::Impl {
  LlamaConfig config;
  int64_t context = 0;
  DType dtype = DType::kF32;  // of the rows that matrices multiply
  DType embedding_dtype = DType::kF32;
  std::string weights;  // the forms of matrices, for a person to read
  int64_t weight_bytes = 0;

  std::optional<PackedFile> packed;  // what matrices lie in, if they do
  AlignedBuffer embedding;           // embedding_dtype[vocab, hidden]
  std::vector<LlamaLayer> layers;
  AlignedBuffer output_norm;  // f32[hidden]
  std::optional<LinearPlan> output;

  std::optional<VocabEmbeddingPlan> embed;
  std::optional<RmsNormPlan> norm;
  std::optional<RmsNormPlan> head_norm;  // with head_norms
  std::optional<RmsNormPlan> post_norm;  // with post_norms
  std::optional<RotaryEmbeddingPlan> rope;
  std::optional<LogitsPlan> logits;
};

// A dense view of bytes whose type is a value. `data` may be null if a
// dimension is 0.
AnyTensorView DenseAny(DType dtype, void* data, int64_t rows, int64_t cols);

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_IMPL_H_
