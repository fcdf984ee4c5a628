#ifndef QUERN_MODELS_DECODER_PARTS_LATENT_MIXER_H_
#define QUERN_MODELS_DECODER_PARTS_LATENT_MIXER_H_

// Private: attention over latents as a layer. It holds the weights, and the
// pool of a state has the operator (models/decoder/memory/latent_attention.h).

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/memory/latent_attention.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {

class LatentMixer final : public Mixer {
 public:
  // Adds its layer, which the mixer holds, to `spec`. The layer's latents are
  // layer `pool_layer` of the state's pool `pool`, and are added in this order.
  static absl::StatusOr<std::unique_ptr<Mixer>> Create(
      DecoderLoader& loader, const DecoderConfig& config, int64_t layer,
      int64_t pool, int64_t pool_layer, LatentSpec& spec);

  // The pool has the operator's workspace.
  absl::StatusOr<int64_t> ScratchBytes(int64_t, int) const override {
    return 0;
  }
  void Execute(const LayerStep& step, const MixerMemory& memory,
               const LayerTarget& target) const noexcept override;

 private:
  LatentMixer(LatentLayer layer, int64_t pool, int64_t pool_layer)
      : layer_(std::move(layer)), pool_(pool), pool_layer_(pool_layer) {}

  LatentLayer layer_;
  int64_t pool_, pool_layer_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_LATENT_MIXER_H_
