#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_impl.h"
#include "quern/models/decoder/decoder_options.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/loading/packed_file.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/models/decoder/parts/attention_mixer.h"
#include "quern/models/decoder/parts/decoder_operators.h"
#include "quern/models/decoder/parts/dense_feed_forward.h"
#include "quern/models/decoder/parts/latent_mixer.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/models/decoder/parts/mixture_feed_forward.h"
#include "quern/models/decoder/parts/recurrent_mixer.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

// Path of this rank's packed file, because each rank has its own.
std::string PackedPathOf(const DecoderOptions& options,
                         const ModelShard& shard) {
  if (options.packed_path.empty() || shard.size() == 1) {
    return options.packed_path;
  }
  return absl::StrCat(options.packed_path, ".", shard.rank(), "-of-",
                      shard.size());
}

absl::Status CheckActivations(const DecoderOptions& options) {
  if (options.activations != DecoderActivations::kInt8 ||
      options.weights == DecoderWeights::kAsInFile) {
    return absl::OkStatus();
  }
  return InvalidArgument(kOp, "activations=int8 with weights=",
                         DecoderWeightsName(options.weights),
                         "; need weights as in the file, whose blocks they "
                         "multiply");
}

}  // namespace

Decoder::Decoder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;
Decoder::~Decoder() = default;

int64_t Decoder::Impl::LayersIn(int64_t pool) const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    count += PoolOf(layer) == pool ? 1 : 0;
  }
  return count;
}

absl::Status Decoder::Impl::ChooseOperators(const OpDispatcher* callers) {
  ops = callers;
  if (ops != nullptr) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(RegisterDecoderOps(own_registry));
  ops = &own_ops.emplace(own_registry, OpPolicy());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Mixer>> Decoder::Impl::LoadMixer(
    DecoderLoader& loader, int64_t layer, int64_t pool, int64_t pool_layer) {
  if (pool == kRecurrentPool) {
    return RecurrentMixer::Create(loader, config, layer, pool_layer);
  }
  if (latent.has_value()) {
    return LatentMixer::Create(loader, config, layer, pool, pool_layer,
                               *latent);
  }
  return AttentionMixer::Create(loader, config, shard, *operators, layer, pool,
                                pool_layer);
}

absl::Status Decoder::Impl::LoadLayers(DecoderLoader& loader) {
  int64_t in_pool[kNumPools] = {};
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const int64_t pool = PoolOf(layer), pool_layer = in_pool[pool]++;
    DecoderLayer l;
    if (config.Has(ModelPart::kAttnNorm)) {
      QUERN_ASSIGN_OR_RETURN(l.attn_norm,
                             loader.Norm(TensorId::kAttnNorm, layer));
    }
    QUERN_ASSIGN_OR_RETURN(l.mixer, LoadMixer(loader, layer, pool, pool_layer));
    if (!config.Has(ModelPart::kBareInputs)) {
      QUERN_ASSIGN_OR_RETURN(l.ffn_norm,
                             loader.Norm(config.Has(ModelPart::kPostMixNorm)
                                             ? TensorId::kPostMixNorm
                                             : TensorId::kFfnNorm,
                                         layer));
    }
    QUERN_ASSIGN_OR_RETURN(
        l.feed_forward,
        config.LayerHas(layer, ModelPart::kExperts)
            ? MixtureFeedForward::Create(loader, config, layer)
            : DenseFeedForward::Create(loader, loader.GateUpParts(layer),
                                       loader.DownParts(layer)));
    if (config.Has(ModelPart::kPostNorms)) {
      QUERN_ASSIGN_OR_RETURN(l.post_attn_norm,
                             loader.Norm(TensorId::kPostAttnNorm, layer));
      QUERN_ASSIGN_OR_RETURN(l.post_ffn_norm,
                             loader.Norm(TensorId::kPostFfnNorm, layer));
    }
    layers.push_back(std::move(l));
  }
  return absl::OkStatus();
}

absl::StatusOr<Decoder> Decoder::Create(const GgufFile& file,
                                        const DecoderOptions& callers,
                                        Executor& executor) {
  DecoderOptions options = callers;
  if (!options.activations.has_value()) {
    options.activations = DefaultActivations(options.weights);
  }
  auto m = std::make_unique<Impl>();
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "max_context", options.max_context, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_bytes", options.max_bytes, 0));
  QUERN_RETURN_IF_ERROR(CheckActivations(options));
  QUERN_ASSIGN_OR_RETURN(m->config, DecoderConfig::Create(file));
  const DecoderConfig& c = m->config;
  if (options.communicator != nullptr) m->communicator = options.communicator;
  QUERN_ASSIGN_OR_RETURN(
      m->shard,
      ModelShard::Create(c, m->communicator->rank(), m->communicator->size(),
                         DecoderLoader::BlockOf(file)));
  m->context = std::min(c.context, options.max_context);
  QUERN_RETURN_IF_ERROR(m->ChooseOperators(options.operators));
  DecoderLoader loader(file, c, m->shard, options, *m->ops, executor);
  QUERN_RETURN_IF_ERROR(loader.CheckBytes(m->context));
  const std::string packed_path = PackedPathOf(options, m->shard);
  bool write_packed = false;
  if (!packed_path.empty()) {
    auto packed = PackedFile::Open(packed_path);
    write_packed = absl::IsNotFound(packed.status());
    if (!write_packed) {
      QUERN_RETURN_IF_ERROR(packed.status());
      m->packed.emplace(*std::move(packed));
      QUERN_RETURN_IF_ERROR(loader.Adopt(*m->packed));
    }
  }
  m->dtype = loader.rows_dtype();
  m->embedding_dtype = loader.embedding_dtype();
  QUERN_ASSIGN_OR_RETURN(
      m->operators, DecoderOperators::Create(*m->ops, c, m->shard,
                                             {m->dtype, m->embedding_dtype},
                                             m->context, *m->communicator));

  if (c.Has(ModelPart::kLatent)) {
    QUERN_ASSIGN_OR_RETURN(m->latent_rope,
                           LatentAttention::Rope(c, m->dtype, m->context));
    m->latent = LatentAttention::SpecOf(c, m->dtype, *m->latent_rope);
  }
  QUERN_ASSIGN_OR_RETURN(m->embedding, loader.Embedding());
  QUERN_RETURN_IF_ERROR(m->LoadLayers(loader));
  QUERN_ASSIGN_OR_RETURN(
      m->output_norm,
      loader.Norm(c.Has(ModelPart::kEmbdNorm) ? TensorId::kEmbdNorm
                                              : TensorId::kOutputNorm));
  QUERN_ASSIGN_OR_RETURN(m->output, loader.MakeMatrix(loader.OutputParts()));
  m->weight_bytes =
      loader.packed_bytes() + static_cast<int64_t>(m->embedding.bytes());
  m->work = loader.work();
  if (c.Has(ModelPart::kExperts)) {
    m->work.experts = c.experts;
    m->work.experts_used = c.experts_used;
  }
  m->work.embedding_row_bytes =
      c.hidden * static_cast<int64_t>(SizeOf(m->embedding_dtype));
  m->weights = loader.Forms();
  if (write_packed) {
    const absl::Status written = loader.WritePacked(packed_path);
    // AlreadyExists means that another process has just written the file.
    if (!absl::IsAlreadyExists(written)) QUERN_RETURN_IF_ERROR(written);
  }
  return Decoder(std::move(m));
}

const DecoderConfig& Decoder::config() const { return impl_->config; }
int64_t Decoder::context() const { return impl_->context; }
const std::string& Decoder::weights() const { return impl_->weights; }
int64_t Decoder::weight_bytes() const { return impl_->weight_bytes; }
int Decoder::ranks() const { return impl_->shard.size(); }
int Decoder::rank() const { return impl_->shard.rank(); }
int64_t Decoder::rank_bytes_per_token() const {
  if (ranks() == 1) return 0;
  // f32 sums of the embedding and two per layer, and this rank's logits.
  const DecoderConfig& c = impl_->config;
  return static_cast<int64_t>(sizeof(float)) *
         ((1 + 2 * c.layers) * c.hidden + impl_->shard.Count(Extent::kVocab));
}
int64_t Decoder::step_tokens() const {
  constexpr int64_t kMost = 512, kFewest = 256;
  const DecoderConfig& c = impl_->config;
  const int64_t widest = std::max(c.Has(ModelPart::kDense) ? c.ffn : 0,
                                  c.experts_used * c.expert_ffn + c.shared_ffn);
  // The stream in f32; its norm, and the widest rows between two matrices, in
  // the type of rows.
  const int64_t token_bytes =
      4 * c.hidden +
      static_cast<int64_t>(SizeOf(impl_->dtype)) * (c.hidden + widest);
  return kMost * token_bytes <= LastLevelBytes() / 2 ? kMost : kFewest;
}

const char* Decoder::target() const { return impl_->operators->target(); }

std::string Decoder::Explain() const {
  // The text before the semicolon names the kernel; the reason comes after it.
  const auto kernel = [this](int64_t m) {
    const std::string text = impl_->layers[0].feed_forward->Explain(m);
    return text.substr(0, text.find(';'));
  };
  return absl::StrCat("operators: Highway ", target(),
                      "; matrices: ", kernel(1), " (one row), ", kernel(256),
                      " (256 rows)");
}

}  // namespace quern
