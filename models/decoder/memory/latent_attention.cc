#include "quern/models/decoder/memory/latent_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

// A file gives a tenth of mscale_all_dim and not mscale: in DeepSeek's models
// the two are equal, so that cosines and sines keep their magnitude.
RotaryScaling ScalingOf(const DecoderConfig& c) {
  RotaryScaling scaling;
  if (!c.Has(ModelPart::kYarn)) return scaling;
  scaling.kind = RotaryScalingKind::kYarn;
  scaling.factor = static_cast<double>(c.yarn_factor);
  scaling.original = c.yarn_original;
  scaling.mscale = scaling.mscale_all_dim =
      10 * static_cast<double>(c.yarn_log_mul);
  return scaling;
}

AnyTensorView ViewOf(const AlignedBuffer& norm, int64_t size) {
  return DenseVector<const float>(norm.data<float>(), size);
}

}  // namespace

absl::StatusOr<RotaryEmbeddingPlan> LatentAttention::Rope(
    const DecoderConfig& config, DType rows, int64_t context) {
  RotaryEmbeddingSpec spec;
  spec.head_dim = spec.rot_dim = config.rope_dim;
  spec.max_positions = context;
  spec.base = static_cast<double>(config.rope_base);
  spec.style = config.rope_style;
  spec.scaling = ScalingOf(config);
  spec.dtype = rows;
  return RotaryEmbeddingPlan::Create(spec);
}

LatentSpec LatentAttention::SpecOf(const DecoderConfig& config, DType rows,
                                   const RotaryEmbeddingPlan& rope) {
  LatentSpec spec;
  spec.rope = &rope;
  spec.rows = rows;
  spec.hidden = config.hidden;
  spec.q_lora = config.q_lora;
  spec.kv_lora = config.kv_lora;
  spec.scale = MlaScale(config.head_dim, ScalingOf(config));
  spec.eps = config.norm_eps;
  return spec;
}

void LatentAttention::SetLayout(const DecoderConfig& config,
                                KvLayoutSpec& layout) {
  layout.kv_heads = 1;
  layout.head_dim = config.kv_lora + config.rope_dim;
  layout.v_head_dim = config.kv_lora;
  layout.form = KvForm::kLatent;
  // Latents have one head, and scales of their own for blocks.
  if (layout.dtype == DType::kF8E4M3) layout.scaling = KvScaling::kPerBlock;
}

absl::StatusOr<std::unique_ptr<LatentAttention>> LatentAttention::Create(
    const LatentSpec& spec, const KvLayout& layout, int64_t pages,
    const OpDispatcher& ops) {
  std::unique_ptr<LatentAttention> a(new LatentAttention());
  a->spec_ = spec;
  a->shape_ = MlaSpecOf(spec.layers[0]->weights, layout);
  a->shape_.dtype = spec.rows;
  for (const LatentLayer* layer : spec.layers) {
    NamedArgs args = {
        {"hidden_states", TensorMeta{spec.rows, {1, spec.hidden}}},
        {"positions", TensorMeta{DType::kI64, {1}}},
        {"kv_norm", TensorMeta{DType::kF32, {spec.kv_lora}}},
        {"cache", TensorMeta{DType::kU8, {pages, layout.page_bytes()}}},
        {"weights", &layer->weights},
        {"layout", &layout},
        {"rope", spec.rope},
        {"step", static_cast<const MlaStep*>(&a->step_)},
        {"scale", spec.scale},
        {"eps", spec.eps},
        {"out_dtype", DTypeName(DType::kF32)},
        {"activations", spec.activations}};
    if (spec.q_lora > 0) {
      args.emplace_back("q_norm", TensorMeta{DType::kF32, {spec.q_lora}});
    }
    if (spec.residual) {
      args.emplace_back("residual", TensorMeta{DType::kF32, {1, spec.hidden}});
    }
    QUERN_ASSIGN_OR_RETURN(MadeOp op,
                           ops.Make("multi_head_latent_attention", args));
    a->ops_.push_back(std::move(op.op));
  }
  return a;
}

absl::Status LatentAttention::Prepare(const MlaBatch& batch, int num_workers) {
  QUERN_ASSIGN_OR_RETURN(
      step_.schedule, MlaSchedule::Build(shape_, batch, num_workers, storage_));
  int64_t bytes = 0;
  for (const auto& op : ops_) {
    QUERN_ASSIGN_OR_RETURN(
        const int64_t need,
        op->WorkspaceBytes(step_.schedule.num_tokens(), num_workers));
    bytes = std::max(bytes, need);
  }
  if (static_cast<int64_t>(workspace_.bytes()) < bytes) {
    workspace_ = AlignedBuffer();  // freed before a new one exists
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
  }
  return absl::OkStatus();
}

void LatentAttention::Execute(int64_t layer, const AnyTensorView& rows,
                              const AnyTensorView& positions,
                              const KvCacheView& cache,
                              const AnyTensorView& residual,
                              const AnyTensorView& y,
                              Executor& executor) noexcept {
  const auto index = static_cast<size_t>(layer);
  const LatentLayer& l = *spec_.layers[index];
  const AnyTensorView q_norm =
      spec_.q_lora > 0 ? ViewOf(l.q_norm, spec_.q_lora) : AnyTensorView();
  ops_[index]->Execute(
      {rows, positions, q_norm, ViewOf(l.kv_norm, spec_.kv_lora),
       CachePages(cache), residual, y},
      Workspace(workspace_), executor);
}

}  // namespace quern
