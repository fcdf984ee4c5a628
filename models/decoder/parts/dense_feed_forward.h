#ifndef QUERN_MODELS_DECODER_PARTS_DENSE_FEED_FORWARD_H_
#define QUERN_MODELS_DECODER_PARTS_DENSE_FEED_FORWARD_H_

// Private: the gated feed-forward layer.
//
//   [gate, up] = W x;  y = residual + W_down (act(gate) * up)

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {

class DenseFeedForward final : public FeedForward {
 public:
  // From the parts GateUpParts and DownParts of a layer, or those of its shared
  // expert.
  static absl::StatusOr<std::unique_ptr<FeedForward>> Create(
      DecoderLoader& loader, const MatrixParts& gate_up,
      const MatrixParts& down);

  absl::StatusOr<int64_t> ScratchBytes(int64_t max_tokens,
                                       int max_workers) const override;
  void Execute(const LayerStep& step,
               const LayerTarget& target) const noexcept override;
  std::string Explain(int64_t m) const override { return gate_up_.Explain(m); }

 private:
  DenseFeedForward(Matrix gate_up, Matrix down);
  template <typename Allocator>
  uint8_t* LayOut(Allocator& a, int64_t tokens) const;

  Matrix gate_up_;  // hidden -> this rank's columns: act(gate) * up
  Matrix down_;     // this rank's columns -> hidden
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_DENSE_FEED_FORWARD_H_
