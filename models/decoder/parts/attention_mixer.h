#ifndef QUERN_MODELS_DECODER_PARTS_ATTENTION_MIXER_H_
#define QUERN_MODELS_DECODER_PARTS_ATTENTION_MIXER_H_

// Private: grouped-query attention as a layer.
//
//   [q, gate, k, v] = W x + b, where gate is there with kAttnGate, and W is
//       several matrices if its parts have several forms
//   each head of q and k: rms_norm, with kHeadNorms; all of q, and all of k,
//       with kWholeNorms
//   q, k = rope(q), rope(k), unless there is none; with kLateHeadNorms before
//       the norms of heads;  k, v to the pool
//   y = residual + W_out (attention(q, pool) * sigmoid(gate)) + b_out, where
//       attention may have sinks (attention/paged_attention.h)

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/attention/attention_spec.h"
#include "quern/core/aligned_buffer.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/parts/decoder_operators.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {

class AttentionMixer final : public Mixer {
 public:
  // `operators` must outlive the mixer. The layer's keys and values are layer
  // `pool_layer` of the state's pool `pool`.
  static absl::StatusOr<std::unique_ptr<Mixer>> Create(
      DecoderLoader& loader, const DecoderConfig& config,
      const ModelShard& shard, const DecoderOperators& operators, int64_t layer,
      int64_t pool, int64_t pool_layer);

  absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                       int max_workers) const override;
  void Execute(const LayerStep& step, const MixerMemory& memory,
               const LayerTarget& target) const noexcept override;

 private:
  struct Scratch {
    float* qkv;         // [tokens, q, gate, k and v]
    uint8_t* queries;   // attention's input, if not in qkv
    float* ungated;     // [tokens, q_cols], if there is a gate
    uint8_t* attended;  // [tokens, q_cols], of the rows' type
  };

  AttentionMixer(std::vector<Matrix> qkv, Matrix out);
  int64_t q_cols() const { return q_heads_ * head_dim_; }
  int64_t gate_cols() const { return operators_->has_gate() ? q_cols() : 0; }
  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t tokens) const;

  const DecoderOperators* operators_ = nullptr;
  int64_t pool_ = 0, pool_layer_ = 0;
  int64_t q_heads_ = 0, kv_heads_ = 0, head_dim_ = 0;
  std::vector<Matrix> qkv_;  // hidden -> q, gate, k and v of this rank
  bool rotates_ = false, local_ = false;
  bool whole_norms_ = false, late_norms_ = false;
  // f32[head_dim] with kHeadNorms; f32[q_cols] and f32[kv_cols] with
  // kWholeNorms.
  AlignedBuffer q_norm_, k_norm_;
  AlignedBuffer sinks_;  // f32[q_heads] with kSinks
  Matrix out_;           // this rank's heads -> hidden
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_ATTENTION_MIXER_H_
