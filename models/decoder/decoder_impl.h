#ifndef QUERN_MODELS_DECODER_DECODER_IMPL_H_
#define QUERN_MODELS_DECODER_DECODER_IMPL_H_

// Private: the data of a Decoder, shared by its loader and its forward pass.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/loading/model_work.h"
#include "quern/models/decoder/loading/packed_file.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/models/decoder/parts/decoder_operators.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_embedding.h"

namespace quern {

struct Decoder::Impl {
  DecoderConfig config;
  ModelShard shard;
  SelfCommunicator self;
  Communicator* communicator = &self;
  int64_t context = 0;
  DType dtype = DType::kF32;  // of the rows that matrices multiply
  DType embedding_dtype = DType::kF32;
  std::string weights;  // the forms of matrices, for people to read
  int64_t weight_bytes = 0;
  ModelWork work;

  std::optional<PackedFile> packed;  // memory of the matrices, if mapped
  AlignedBuffer embedding;  // embedding_dtype[rows of this rank, hidden]
  std::vector<DecoderLayer> layers;
  AlignedBuffer output_norm;     // f32[hidden]
  std::optional<Matrix> output;  // of this rank's columns

  // What the operators come from: the caller's, or a dispatcher of our own that
  // takes each one's first provider.
  OpRegistry own_registry;
  std::optional<OpDispatcher> own_ops;
  // With kLatent: what the layers share.
  std::optional<RotaryEmbeddingPlan> latent_rope;
  std::optional<LatentSpec> latent;
  const OpDispatcher* ops = nullptr;
  std::optional<DecoderOperators> operators;

  // Whether the layers' results are kept apart from the residual stream.
  bool branches() const { return NeedsBranch(config, shard); }
  // Type of what attention gives. A gate reads it before it is rounded.
  DType attended_dtype() const {
    return config.Has(ModelPart::kAttnGate) ? DType::kF32 : dtype;
  }
  // Index of the pool with a layer's keys and values. Local layers share a
  // second pool. The memory of recurrent layers is in a RecurrentPool.
  static constexpr int64_t kFullPool = 0, kLocalPool = 1, kRecurrentPool = 2;
  static constexpr size_t kNumPools = 3;
  int64_t PoolOf(int64_t layer) const {
    if (config.IsRecurrent(layer)) return kRecurrentPool;
    return config.IsLocal(layer) ? kLocalPool : kFullPool;
  }
  int64_t LayersIn(int64_t pool) const;

  // Sets `ops`.
  absl::Status ChooseOperators(const OpDispatcher* callers);
  absl::Status LoadLayers(DecoderLoader& loader);
  absl::StatusOr<std::unique_ptr<Mixer>> LoadMixer(DecoderLoader& loader,
                                                   int64_t layer, int64_t pool,
                                                   int64_t pool_layer);
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_DECODER_IMPL_H_
