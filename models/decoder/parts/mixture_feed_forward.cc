#include "quern/models/decoder/parts/mixture_feed_forward.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/parts/dense_feed_forward.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

// The operator's name of a gated activation; decoders have these three.
const char* NameOf(LinearActivation activation) {
  switch (activation) {
    case LinearActivation::kGeluTanhAndMul:
      return "gelu_tanh";
    case LinearActivation::kSwigluOaiAndMul:
      return "swigluoai";
    default:
      return "silu";
  }
}

}  // namespace

MixtureFeedForward::MixtureFeedForward(Matrix router,
                                       std::unique_ptr<const BoundOp> experts,
                                       int64_t count)
    : router_(std::move(router)), experts_(std::move(experts)), count_(count) {}

absl::StatusOr<std::unique_ptr<FeedForward>> MixtureFeedForward::Create(
    DecoderLoader& loader, const DecoderConfig& config, int64_t layer) {
  QUERN_ASSIGN_OR_RETURN(Matrix router,
                         loader.MakeMatrix(loader.RouterParts(layer)));
  ExpertWeights weights;
  for (int64_t e = 0; e < config.experts; ++e) {
    QUERN_ASSIGN_OR_RETURN(
        const LinearWeights gate_up,
        loader.MakeWeights(loader.ExpertGateUpParts(layer, e)));
    QUERN_ASSIGN_OR_RETURN(
        const LinearWeights down,
        loader.MakeWeights(loader.ExpertDownParts(layer, e)));
    weights.gate_up.push_back(gate_up);
    weights.down.push_back(down);
  }
  const TensorMeta y = {DType::kF32, {1, config.hidden}};
  NamedArgs args = {
      {"hidden_states", TensorMeta{loader.rows_dtype(), {1, config.hidden}}},
      {"router_logits", TensorMeta{DType::kF32, {1, config.experts}}},
      {"experts", &weights},
      {"top_k", config.experts_used},
      {"renormalize", config.experts_sum_to_one},
      {"scoring_func",
       config.gating == DecoderConfig::kSigmoid ? "sigmoid" : "softmax"},
      {"routed_scaling_factor", config.expert_scale},
      {"activation", NameOf(config.activation)},
      {"out_dtype", DTypeName(DType::kF32)},
      {"activations", loader.activations()}};
  AlignedBuffer bias;
  if (config.Has(ModelPart::kRouterBias)) {
    QUERN_ASSIGN_OR_RETURN(bias, loader.Vector(TensorId::kRouterBias, layer));
    args.emplace_back("e_score_correction_bias",
                      TensorMeta{DType::kF32, {config.experts}});
  }
  const bool shared = config.Has(ModelPart::kSharedExpert);
  if (shared || loader.ExpertDownParts(layer, 0).residual) {
    args.emplace_back("shared_output", y);
  }
  QUERN_ASSIGN_OR_RETURN(MadeOp experts, loader.ops().Make("fused_moe", args));
  std::unique_ptr<MixtureFeedForward> m(new MixtureFeedForward(
      std::move(router), std::move(experts.op), config.experts));
  m->bias_ = std::move(bias);
  if (shared) {
    QUERN_ASSIGN_OR_RETURN(
        m->shared_,
        DenseFeedForward::Create(loader, loader.SharedGateUpParts(layer),
                                 loader.SharedDownParts(layer)));
    if (config.Has(ModelPart::kSharedGate)) {
      QUERN_RETURN_IF_ERROR(m->AddSharedGate(loader, config, layer));
    }
  }
  return std::unique_ptr<FeedForward>(std::move(m));
}

absl::Status MixtureFeedForward::AddSharedGate(DecoderLoader& loader,
                                               const DecoderConfig& config,
                                               int64_t layer) {
  QUERN_ASSIGN_OR_RETURN(shared_router_,
                         loader.MakeMatrix(loader.SharedRouterParts(layer)));
  QUERN_ASSIGN_OR_RETURN(
      MadeOp gate,
      loader.ops().Make("sigmoid_mul",
                        {{"x", TensorMeta{DType::kF32, {1, config.hidden}}},
                         {"gate", TensorMeta{DType::kF32, {1, 1}}}}));
  shared_gate_ = std::move(gate.op);
  return absl::OkStatus();
}

// Lays out the router's logits, of which the shared expert's are one a token.
template <typename Allocator>
float* MixtureFeedForward::LayOut(Allocator& a, int64_t tokens) const {
  return a.template Allocate<float>("router logits", tokens * count_);
}

absl::StatusOr<int64_t> MixtureFeedForward::ScratchBytes(
    int64_t max_tokens, int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t router,
                         router_.WorkspaceBytes(max_tokens, max_workers));
  QUERN_ASSIGN_OR_RETURN(const int64_t experts,
                         experts_->WorkspaceBytes(max_tokens, max_workers));
  int64_t shared_router = 0, shared_gate = 0;
  if (shared_gate_ != nullptr) {
    QUERN_ASSIGN_OR_RETURN(
        shared_router, shared_router_->WorkspaceBytes(max_tokens, max_workers));
    QUERN_ASSIGN_OR_RETURN(
        shared_gate, shared_gate_->WorkspaceBytes(max_tokens, max_workers));
  }
  WorkspaceLayout counted;
  LayOut(counted, max_tokens);
  counted.Allocate<uint8_t>(
      "operators", std::max({router, experts, shared_router, shared_gate}));
  if (counted.overflow()) {
    return absl::ResourceExhaustedError(
        "decoder: the scratch of experts needs more than 2^63 bytes");
  }
  if (shared_ == nullptr) return counted.bytes();
  QUERN_ASSIGN_OR_RETURN(const int64_t shared,
                         shared_->ScratchBytes(max_tokens, max_workers));
  return std::max(shared, counted.bytes());
}

void MixtureFeedForward::WeighShared(const LayerStep& step,
                                     const AnyTensorView& y) const {
  Workspace memory = step.scratch;
  const int64_t tokens = step.rows.extent(0);
  const AnyTensorView gate = DenseMatrix(LayOut(memory, tokens), tokens, 1);
  shared_router_->Execute(step.rows, gate, {}, memory, *step.executor);
  shared_gate_->Execute({y, gate, y}, memory, *step.executor);
}

void MixtureFeedForward::Execute(const LayerStep& step,
                                 const LayerTarget& target) const noexcept {
  // The experts add to what the shared one has written.
  if (shared_ != nullptr) shared_->Execute(step, target);
  if (shared_gate_ != nullptr) {
    QUERN_DCHECK(target.residual.rank() == 0);
    WeighShared(step, target.y);
  }
  const AnyTensorView added = shared_ == nullptr ? target.residual : target.y;
  Workspace memory = step.scratch;
  const int64_t tokens = step.rows.extent(0);
  const AnyTensorView logits =
      DenseMatrix(LayOut(memory, tokens), tokens, count_);
  router_.Execute(step.rows, logits, {}, memory, *step.executor);
  const AnyTensorView bias =
      bias_.bytes() == 0
          ? AnyTensorView()
          : DenseVector<const float>(bias_.data<float>(), count_);
  experts_->Execute({step.rows, logits, bias, {}, added, target.y}, memory,
                    *step.executor);
}

}  // namespace quern
