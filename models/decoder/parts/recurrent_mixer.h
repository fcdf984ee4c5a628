#ifndef QUERN_MODELS_DECODER_PARTS_RECURRENT_MIXER_H_
#define QUERN_MODELS_DECODER_PARTS_RECURRENT_MIXER_H_

// Private: layers whose memory of a sequence does not grow with it. Each is one
// operator, from projection to projection:
//
//   short_conv     LFM2: y = W_out (C * conv(B * u)); B, C, u = W_in x
//   mamba_mixer2   Granite-4-H: ops/mixer/mamba_mixer2.h, its states in f32
//   gated_delta_net   Qwen3-Next: ops/mixer/gated_delta_net.h, its states in
//   f32
//
// The operator rounds its steps to the dtype of its input. Its result becomes
// f32 in the target, which has no residual (NeedsBranch).

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/memory/recurrent_pool.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/convert.h"

namespace quern {

class RecurrentMixer final : public Mixer {
 public:
  // What the layers of this model remember, for so many layers and slots.
  static RecurrentPoolSpec PoolSpec(const DecoderConfig& config, DType rows,
                                    int64_t layers, int64_t slots);

  // `layer` is one of config's recurrent layers, and pool_layer is its index
  // among them.
  static absl::StatusOr<std::unique_ptr<Mixer>> Create(
      DecoderLoader& loader, const DecoderConfig& config, int64_t layer,
      int64_t pool_layer);

  absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                       int max_workers) const override;
  void Execute(const LayerStep& step, const MixerMemory& memory,
               const LayerTarget& target) const noexcept override;

 private:
  // Tensors of the longest operator.
  static constexpr size_t kMaxTensors = 16;

  RecurrentMixer() = default;
  // Reads the tensors of the convolution, of Mamba-2 or of a gated delta net,
  // and adds to `args` what the operator is made with for them.
  absl::Status AddConvolution(DecoderLoader& loader,
                              const DecoderConfig& config, int64_t layer,
                              TensorId id, NamedArgs& args);
  absl::Status AddMamba2(DecoderLoader& loader, const DecoderConfig& config,
                         int64_t layer, NamedArgs& args);
  absl::Status AddDeltaNet(DecoderLoader& loader, const DecoderConfig& config,
                           int64_t layer, NamedArgs& args);
  // Keeps a tensor of `size` numbers, the operator's next one, as `name`.
  void AddOwn(const char* name, AlignedBuffer buffer, int64_t size,
              NamedArgs& args);
  template <typename Allocator>
  uint8_t* LayOut(Allocator& a, int64_t tokens) const;

  int64_t pool_layer_ = 0;
  int64_t hidden_ = 0;
  DType rows_ = DType::kF32;
  std::unique_ptr<const BoundOp> op_;
  // The operator's tensors that no step changes, all f32: the weights and the
  // bias of the convolution, and those behind the memory.
  AlignedBuffer conv_, bias_;
  std::vector<AlignedBuffer> own_buffers_;
  AnyTensorView conv_weight_, conv_bias_;
  std::vector<AnyTensorView> own_;
  std::optional<ConvertPlan> convert_;  // to f32; nullopt if the rows are
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_RECURRENT_MIXER_H_
