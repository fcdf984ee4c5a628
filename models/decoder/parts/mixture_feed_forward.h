#ifndef QUERN_MODELS_DECODER_PARTS_MIXTURE_FEED_FORWARD_H_
#define QUERN_MODELS_DECODER_PARTS_MIXTURE_FEED_FORWARD_H_

// Private: a mixture of experts as a feed-forward layer.
//
//   logits = R x;  w = softmax(logits) of the experts_used largest, sum 1
//   y = residual + sum over those of w * W_down (act(W_gate x) * W_up x)
//       + the same of the shared expert, if there is one, with w = 1, or with
//         w = sigmoid(S x) and kSharedGate
//
// With kRouting the file says how w follows from the logits: by softmax or
// sigmoid, with what sum and times what factor.
//
// The router is a matrix in f32; everything behind it is the operator
// `fused_moe`. Ranks divide the columns of gate and up, not the experts, so
// that each does the same amount of work whatever the router chooses.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/parts/layer.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

class MixtureFeedForward final : public FeedForward {
 public:
  static absl::StatusOr<std::unique_ptr<FeedForward>> Create(
      DecoderLoader& loader, const DecoderConfig& config, int64_t layer);

  absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                       int max_workers) const override;
  void Execute(const LayerStep& step,
               const LayerTarget& target) const noexcept override;
  std::string Explain(int64_t m) const override { return experts_->Explain(m); }

 private:
  MixtureFeedForward(Matrix router, std::unique_ptr<const BoundOp> experts,
                     int64_t count);
  // Adds what weighs the shared expert.
  absl::Status AddSharedGate(DecoderLoader& loader, const DecoderConfig& config,
                             int64_t layer);
  template <typename Allocator>
  float* LayOut(Allocator& a, int64_t tokens) const;
  // Multiplies the shared expert's result y by its weights.
  void WeighShared(const LayerStep& step, const AnyTensorView& y) const;

  std::unique_ptr<FeedForward> shared_;  // null if there is none
  // With kSharedGate: hidden -> 1, and the operator sigmoid_mul.
  std::optional<Matrix> shared_router_;
  std::unique_ptr<const BoundOp> shared_gate_;
  Matrix router_;       // hidden -> experts
  AlignedBuffer bias_;  // f32[experts], with kRouterBias
  std::unique_ptr<const BoundOp> experts_;
  int64_t count_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_MIXTURE_FEED_FORWARD_H_
