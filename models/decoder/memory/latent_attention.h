#ifndef QUERN_MODELS_DECODER_MEMORY_LATENT_ATTENTION_H_
#define QUERN_MODELS_DECODER_MEMORY_LATENT_ATTENTION_H_

// Private: attention over latents (DeepSeek), ops/mla/mla.h as the operator
// multi_head_latent_attention. A model has each layer's weights, and a state
// has the operators, because an operator knows the cache that it reads.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/memory/attention_work.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/families/attention/mla_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_embedding.h"

namespace quern {

struct LatentLayer {
  MlaWeights weights;
  AlignedBuffer q_norm;   // f32[q_lora], with kQueryLora
  AlignedBuffer kv_norm;  // f32[kv_lora]
};

// What the layers of a model share. Everything is borrowed from the model.
struct LatentSpec {
  std::vector<const LatentLayer*> layers;
  const RotaryEmbeddingPlan* rope = nullptr;
  DType rows = DType::kF32;  // the dtype of a layer's input
  int64_t hidden = 0, q_lora = 0, kv_lora = 0;
  float scale = 0, eps = 0;
  bool residual = false;              // whether a result is added to the stream
  const char* activations = "exact";  // the operator's argument
};

class LatentAttention {
 public:
  // The rotation of a model's queries and keys, for `context` positions.
  static absl::StatusOr<RotaryEmbeddingPlan> Rope(const DecoderConfig& config,
                                                  DType rows, int64_t context);
  // The spec without layers, `residual` and `activations`.
  static LatentSpec SpecOf(const DecoderConfig& config, DType rows,
                           const RotaryEmbeddingPlan& rope);
  // Makes `layout` that of a model's latents: one head, whose rows are a latent
  // and the rotated part of a key.
  static void SetLayout(const DecoderConfig& config, KvLayoutSpec& layout);

  // `spec` has layers, which outlive this, as does what it borrows. `ops` is
  // not kept.
  static absl::StatusOr<std::unique_ptr<LatentAttention>> Create(
      const LatentSpec& spec, const KvLayout& layout, int64_t pages,
      const OpDispatcher& ops);

  // Prepares a step. The page table of `batch` outlives it.
  absl::Status Prepare(const MlaBatch& batch, int num_workers);
  // y = residual + attention of rows[tokens, hidden]. Rows have the dtype
  // LatentSpec::rows; y and the residual are f32. A residual of rank 0 adds
  // nothing. Writes the step's latents to the layer's `cache`.
  void Execute(int64_t layer, const AnyTensorView& rows,
               const AnyTensorView& positions, const KvCacheView& cache,
               const AnyTensorView& residual, const AnyTensorView& y,
               Executor& executor) noexcept;

  // The products of a sequence of q_len new tokens among kv_len, in the form
  // that computes it.
  PairShape PairOf(int64_t q_len, int64_t kv_len) const {
    if (UsesDirectForm(shape_, q_len, kv_len)) {
      return {shape_.heads, shape_.head_dim(), shape_.v_head_dim, shape_.dtype,
              shape_.dtype};
    }
    return {shape_.heads, shape_.latent_row(), shape_.kv_lora, shape_.dtype,
            shape_.cache.dtype()};
  }
  // The kernel of attention, for a person to read.
  std::string Explain() const { return ops_[0]->Explain(1); }
  int64_t scratch_bytes() const {
    return static_cast<int64_t>(workspace_.bytes());
  }

 private:
  LatentAttention() = default;

  LatentSpec spec_;
  MlaSpec shape_;  // of every layer
  MlaStep step_;   // where ops_ find it
  MlaScheduleStorage storage_;
  std::vector<std::unique_ptr<const BoundOp>> ops_;  // one for each layer
  AlignedBuffer workspace_;                          // of each; grows
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_MEMORY_LATENT_ATTENTION_H_
