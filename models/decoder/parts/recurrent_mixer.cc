#include "quern/models/decoder/parts/recurrent_mixer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/memory/recurrent_pool.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

// Replaces each a of a file by ln(-a), which is -infinity for a = 0.
// InvalidArgument names a number of the tensor `name` that is no decay.
absl::Status ToLogs(const std::string& name, absl::Span<float> decays) {
  for (size_t i = 0; i < decays.size(); ++i) {
    if (!std::isfinite(decays[i]) || decays[i] > 0) {
      return InvalidArgument("decoder", name, "[", i, "]=", decays[i],
                             "; need a finite number <= 0");
    }
    decays[i] = static_cast<float>(std::log(-double{decays[i]}));
  }
  return absl::OkStatus();
}

}  // namespace

RecurrentPoolSpec RecurrentMixer::PoolSpec(const DecoderConfig& config,
                                           DType rows, int64_t layers,
                                           int64_t slots) {
  RecurrentPoolSpec spec;
  spec.layers = layers;
  spec.slots = slots;
  spec.window_dtype = rows;
  spec.window = config.conv_width - 1;
  spec.channels = config.conv_channels();
  if (config.Has(ModelPart::kStates)) {
    spec.heads = config.ssm_heads;
    spec.rows = config.ssm_inner / config.ssm_heads;
    spec.cols = config.ssm_state;
    // A token's input is added to the state of Mamba-2, and its C multiplies
    // it. A gated delta net also multiplies it by the key, and has a row for
    // each element of a key. A decay is not counted, because a chunk of tokens
    // needs one alone.
    spec.products = 2;
    if (config.Has(ModelPart::kDeltaNet)) {
      spec.products = 3;
      std::swap(spec.rows, spec.cols);
    }
  }
  return spec;
}

absl::StatusOr<std::unique_ptr<Mixer>> RecurrentMixer::Create(
    DecoderLoader& loader, const DecoderConfig& config, int64_t layer,
    int64_t pool_layer) {
  std::unique_ptr<RecurrentMixer> m(new RecurrentMixer());
  m->pool_layer_ = pool_layer;
  m->hidden_ = config.hidden;
  m->rows_ = loader.rows_dtype();
  if (m->rows_ != DType::kF32) {
    ConvertSpec convert;
    convert.from = m->rows_;
    convert.to = DType::kF32;
    convert.stores = Stores::kCached;
    QUERN_ASSIGN_OR_RETURN(m->convert_, ConvertPlan::Create(convert));
  }
  const bool mamba2 = config.Has(ModelPart::kMamba2);
  const bool delta_net = config.Has(ModelPart::kDeltaNet);
  QUERN_ASSIGN_OR_RETURN(const LinearWeights in,
                         loader.MakeWeights(loader.RecurrentInParts(layer)));
  QUERN_ASSIGN_OR_RETURN(const LinearWeights out,
                         loader.MakeWeights(loader.RecurrentOutParts(layer)));
  NamedArgs args = {{"in_proj", &in},
                    {"out_proj", &out},
                    {"activations", loader.activations()}};
  QUERN_RETURN_IF_ERROR(m->AddConvolution(
      loader, config, layer,
      mamba2 || delta_net ? TensorId::kSsmConv : TensorId::kShortConv, args));
  if (mamba2) {
    QUERN_RETURN_IF_ERROR(m->AddMamba2(loader, config, layer, args));
  }
  if (delta_net) {
    QUERN_RETURN_IF_ERROR(m->AddDeltaNet(loader, config, layer, args));
  }
  QUERN_ASSIGN_OR_RETURN(MadeOp op,
                         loader.ops().Make(delta_net ? "gated_delta_net"
                                           : mamba2  ? "mamba_mixer2"
                                                     : "short_conv",
                                           args));
  m->op_ = std::move(op.op);
  return std::unique_ptr<Mixer>(std::move(m));
}

absl::Status RecurrentMixer::AddConvolution(DecoderLoader& loader,
                                            const DecoderConfig& config,
                                            int64_t layer, TensorId id,
                                            NamedArgs& args) {
  QUERN_ASSIGN_OR_RETURN(conv_, loader.Vector(id, layer));
  const int64_t channels = config.conv_channels(), width = config.conv_width;
  conv_weight_ = DenseMatrix<const float>(conv_.data<float>(), channels, width);
  args.insert(args.end(),
              {{"x", TensorMeta{rows_, {1, hidden_}}},
               {"conv_weight", TensorMeta{DType::kF32, {channels, width}}},
               {"conv_state", TensorMeta{rows_, {1, width - 1, channels}}},
               {"state_indices", TensorMeta{DType::kI32, {1}}},
               {"query_start_loc", TensorMeta{DType::kI64, {2}}},
               {"has_initial_state", TensorMeta{DType::kU8, {1}}}});
  return absl::OkStatus();
}

absl::Status RecurrentMixer::AddMamba2(DecoderLoader& loader,
                                       const DecoderConfig& config,
                                       int64_t layer, NamedArgs& args) {
  const int64_t channels = config.conv_channels(), inner = config.ssm_inner;
  const int64_t heads = config.ssm_heads;
  QUERN_ASSIGN_OR_RETURN(bias_, loader.Vector(TensorId::kSsmConvBias, layer));
  conv_bias_ = DenseVector<const float>(bias_.data<float>(), channels);
  const struct {
    const char* name;
    TensorId id;
    int64_t size;
  } kOwn[] = {{"a", TensorId::kSsmA, heads},
              {"d", TensorId::kSsmD, heads},
              {"dt_bias", TensorId::kSsmDtBias, heads},
              {"norm", TensorId::kSsmNorm, inner}};
  for (const auto& own : kOwn) {
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer, loader.Vector(own.id, layer));
    AddOwn(own.name, std::move(buffer), own.size, args);
  }
  args.insert(
      args.end(),
      {{"conv_bias", TensorMeta{DType::kF32, {channels}}},
       {"ssm_state",
        TensorMeta{DType::kF32, {1, heads, inner / heads, config.ssm_state}}},
       {"n_groups", config.ssm_groups},
       {"eps", config.norm_eps}});
  return absl::OkStatus();
}

absl::Status RecurrentMixer::AddDeltaNet(DecoderLoader& loader,
                                         const DecoderConfig& config,
                                         int64_t layer, NamedArgs& args) {
  const int64_t heads = config.ssm_heads, dv = config.ssm_inner / heads;
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer a_log,
                         loader.Vector(TensorId::kDeltaA, layer));
  QUERN_RETURN_IF_ERROR(
      ToLogs(TensorName(TensorId::kDeltaA, layer),
             absl::MakeSpan(a_log.data<float>(), static_cast<size_t>(heads))));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer dt_bias,
                         loader.Vector(TensorId::kSsmDtBias, layer));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer norm,
                         loader.Vector(TensorId::kDeltaNorm, layer));
  AddOwn("a_log", std::move(a_log), heads, args);
  AddOwn("dt_bias", std::move(dt_bias), heads, args);
  AddOwn("norm", std::move(norm), dv, args);
  args.insert(
      args.end(),
      {{"state", TensorMeta{DType::kF32, {1, heads, config.ssm_state, dv}}},
       {"num_k_heads", config.ssm_groups},
       {"eps", config.norm_eps}});
  return absl::OkStatus();
}

void RecurrentMixer::AddOwn(const char* name, AlignedBuffer buffer,
                            int64_t size, NamedArgs& args) {
  own_.push_back(DenseVector<const float>(buffer.data<float>(), size));
  own_buffers_.push_back(std::move(buffer));
  args.emplace_back(name, TensorMeta{DType::kF32, {size}});
}

// Lays out the operator's result, unless the target takes it.
template <typename Allocator>
uint8_t* RecurrentMixer::LayOut(Allocator& a, int64_t tokens) const {
  const int64_t row_bytes = hidden_ * static_cast<int64_t>(SizeOf(rows_));
  return a.template Allocate<uint8_t>(
      "result", convert_.has_value() ? tokens * row_bytes : 0);
}

absl::StatusOr<int64_t> RecurrentMixer::ScratchBytes(int64_t max_tokens,
                                                     int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t op,
                         op_->WorkspaceBytes(max_tokens, max_workers));
  WorkspaceLayout counted;
  LayOut(counted, max_tokens);
  counted.Allocate<uint8_t>("operator", op);
  if (counted.overflow()) {
    return absl::ResourceExhaustedError(
        "decoder: the scratch of a recurrent layer needs more than 2^63 bytes");
  }
  return counted.bytes();
}

void RecurrentMixer::Execute(const LayerStep& step, const MixerMemory& memory,
                             const LayerTarget& target) const noexcept {
  QUERN_DCHECK(target.residual.rank() == 0);
  const RecurrentPool& pool = *memory.recurrent;
  const int64_t tokens = step.rows.extent(0);
  Workspace scratch = step.scratch;
  uint8_t* result = LayOut(scratch, tokens);
  const AnyTensorView out = convert_.has_value()
                                ? DenseAny(rows_, result, tokens, hidden_)
                                : target.y;
  std::array<AnyTensorView, kMaxTensors> tensors;
  size_t count = 0;
  const auto add = [&](const AnyTensorView& tensor) {
    tensors[count++] = tensor;
  };
  add(step.rows);
  add(conv_weight_);
  add(conv_bias_);
  add(pool.Windows(pool_layer_));
  if (const AnyTensorView states = pool.States(pool_layer_);
      states.rank() != 0) {
    add(states);
  }
  for (const AnyTensorView& tensor : own_) add(tensor);
  add(pool.slots());
  add(pool.starts());
  add(pool.initial());
  add(out);
  op_->Execute(absl::MakeConstSpan(tensors.data(), count), scratch,
               *step.executor);
  if (convert_.has_value()) convert_->Execute(out, target.y, *step.executor);
}

}  // namespace quern
