#ifndef QUERN_MODELS_DECODER_LOADING_MODEL_SHARD_H_
#define QUERN_MODELS_DECODER_LOADING_MODEL_SHARD_H_

// Private: the part of a model that one rank holds.
//
//   query heads   [rank * q_heads / size, ...), and the columns of q and of
//                 attention's output that are theirs
//   kv heads      those that its query heads meet: with more ranks than
//                 key/value heads, several ranks have the same one
//   ffn           columns [rank * width, + width), the last rank fewer; in a
//                 mixture, these columns of every expert
//   vocabulary    likewise, rows of the embedding and of the output matrix
//
// Every other tensor is whole on every rank.

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

struct ModelRange {
  int64_t begin = 0;
  int64_t count = 0;
};

class ModelShard {
 public:
  // Matrices are divided at columns that are multiples of `block`, the block
  // size of the file's tensors. InvalidArgument if a dimension cannot be
  // divided so that every rank has a part. Unimplemented for several ranks and
  // a model with recurrent layers, with latents, or with kWholeNorms.
  static absl::StatusOr<ModelShard> Create(const DecoderConfig& config,
                                           int rank, int size, int64_t block);

  int rank() const { return rank_; }
  int size() const { return size_; }
  ModelRange Of(Extent extent) const {
    return ranges_[static_cast<size_t>(extent)];
  }
  int64_t Count(Extent extent) const { return Of(extent).count; }
  // The part of a tensor that this rank reads.
  GgufPart PartOf(const TensorEntry& entry) const {
    const ModelRange rows = Of(entry.rows), cols = Of(entry.cols);
    return {rows.begin, rows.count, cols.begin, cols.count};
  }

  int64_t q_heads() const { return q_heads_; }
  int64_t kv_heads() const { return kv_heads_; }
  // How the columns of logits are divided over the ranks.
  ColumnShards vocab() const { return vocab_; }

 private:
  int rank_ = 0, size_ = 1;
  int64_t q_heads_ = 0, kv_heads_ = 0;
  ColumnShards vocab_;
  std::array<ModelRange, kNumExtents> ranges_;
};

// Whether a layer's contribution to the residual stream is computed apart from
// it: because the ranks' parts are summed, because a norm comes between,
// because a recurrent layer's operator adds to nothing, or because the shared
// expert's result is multiplied by its gate.
inline bool NeedsBranch(const DecoderConfig& config, const ModelShard& shard) {
  return shard.size() > 1 || config.Has(ModelPart::kPostNorms) ||
         config.HasRecurrent() || config.Has(ModelPart::kSharedGate);
}

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_MODEL_SHARD_H_
