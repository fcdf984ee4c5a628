#include "quern/models/decoder/parts/latent_mixer.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {

absl::StatusOr<std::unique_ptr<Mixer>> LatentMixer::Create(
    DecoderLoader& loader, const DecoderConfig& config, int64_t layer,
    int64_t pool, int64_t pool_layer, LatentSpec& spec) {
  LatentLayer l;
  QUERN_ASSIGN_OR_RETURN(l.weights, loader.MakeLatentWeights(layer));
  if (config.Has(ModelPart::kQueryLora)) {
    QUERN_ASSIGN_OR_RETURN(l.q_norm,
                           loader.Norm(TensorId::kLatentQANorm, layer));
  }
  QUERN_ASSIGN_OR_RETURN(l.kv_norm,
                         loader.Norm(TensorId::kLatentKvANorm, layer));
  std::unique_ptr<LatentMixer> m(
      new LatentMixer(std::move(l), pool, pool_layer));
  spec.residual = loader.LatentOutParts(layer).residual;
  spec.activations = loader.activations();
  spec.layers.push_back(&m->layer_);
  return std::unique_ptr<Mixer>(std::move(m));
}

void LatentMixer::Execute(const LayerStep& step, const MixerMemory& memory,
                          const LayerTarget& target) const noexcept {
  memory.pages[static_cast<size_t>(pool_)].AttendLatents(
      pool_layer_, step.rows, step.positions, target.residual, target.y,
      *step.executor);
}

}  // namespace quern
