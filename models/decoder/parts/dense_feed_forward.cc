#include "quern/models/decoder/parts/dense_feed_forward.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {

DenseFeedForward::DenseFeedForward(Matrix gate_up, Matrix down)
    : gate_up_(std::move(gate_up)), down_(std::move(down)) {}

absl::StatusOr<std::unique_ptr<FeedForward>> DenseFeedForward::Create(
    DecoderLoader& loader, const MatrixParts& gate_up,
    const MatrixParts& down) {
  QUERN_ASSIGN_OR_RETURN(Matrix first, loader.MakeMatrix(gate_up));
  QUERN_ASSIGN_OR_RETURN(Matrix second, loader.MakeMatrix(down));
  return std::unique_ptr<FeedForward>(
      new DenseFeedForward(std::move(first), std::move(second)));
}

// Lays out the activations [tokens, ffn], of the rows' type.
template <typename Allocator>
uint8_t* DenseFeedForward::LayOut(Allocator& a, int64_t tokens) const {
  const auto row_bytes = down_.k() * static_cast<int64_t>(SizeOf(down_.rows()));
  return a.template Allocate<uint8_t>("activated", tokens * row_bytes);
}

absl::StatusOr<int64_t> DenseFeedForward::ScratchBytes(int64_t max_tokens,
                                                       int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t gate_up,
                         gate_up_.WorkspaceBytes(max_tokens, max_workers));
  QUERN_ASSIGN_OR_RETURN(const int64_t down,
                         down_.WorkspaceBytes(max_tokens, max_workers));
  WorkspaceLayout counted;
  LayOut(counted, max_tokens);
  counted.Allocate<uint8_t>("matrix", std::max(gate_up, down));
  if (counted.overflow()) {
    return absl::ResourceExhaustedError(
        "decoder: the feed-forward scratch needs more than 2^63 bytes");
  }
  return counted.bytes();
}

void DenseFeedForward::Execute(const LayerStep& step,
                               const LayerTarget& target) const noexcept {
  const int64_t t = step.rows.extent(0), ffn = down_.k();
  Workspace memory = step.scratch;
  const AnyTensorView activated(down_.rows(),
                                static_cast<void*>(LayOut(memory, t)), 2,
                                {t, ffn}, {ffn, 1});
  gate_up_.Execute(step.rows, activated, {}, memory, *step.executor);
  down_.Execute(activated, target.y, target.residual, memory, *step.executor);
}

}  // namespace quern
