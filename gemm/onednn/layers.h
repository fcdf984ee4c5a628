#ifndef QUERN_GEMM_ONEDNN_LAYERS_H_
#define QUERN_GEMM_ONEDNN_LAYERS_H_

// Private: oneDNN's implementations of gemm/linear.h, one for each kind of
// arithmetic. LinearPlan has checked what they are given.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/onednn/packed_matmul.h"

namespace quern {

// oneDNN's kernels hold strides as 32-bit numbers of bytes.
inline constexpr int64_t kMaxOneDnnExtent = (int64_t{1} << 29) - 1;

// A product on weights that oneDNN has packed, with a copy of their bias.
class OneDnnLayer : public LinearLayer {
 public:
  OneDnnLayer(std::unique_ptr<const PackedMatmul> matmul, AlignedBuffer bias)
      : matmul_(std::move(matmul)), bias_(std::move(bias)) {}

  const char* target() const override { return "oneDNN"; }
  std::string Explain(int64_t m) const override {
    return absl::StrCat("onednn ", matmul_->Explain(m));
  }
  int64_t packed_bytes() const override { return matmul_->packed_bytes(); }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    return matmul_->WorkspaceBytes(max_m, max_workers);
  }
  RowStrides row_strides(int64_t columns) const override {
    return {columns, kMaxOneDnnExtent};
  }
  // Refuse a row stride that oneDNN cannot hold.
  absl::Status CheckRows(const AnyTensorView& a) const override;
  absl::Status CheckArgs(const LinearArgs& args) const override;

  // Counts of the generated kernels. Any thread, at any time.
  OneDnnCacheStats cache_stats() const { return matmul_->cache_stats(); }

 protected:
  const PackedMatmul& matmul() const { return *matmul_; }
  // f32[n], or null for none.
  const float* bias() const { return bias_.data<float>(); }

 private:
  std::unique_ptr<const PackedMatmul> matmul_;
  AlignedBuffer bias_;
};

using OneDnnLayerOr = absl::StatusOr<std::unique_ptr<const OneDnnLayer>>;

// Returns the layer that fits the weights' format, which has no groups.
// Unimplemented: oneDNN has no kernel on this CPU. ResourceExhausted: no memory
// for the packed weights.
OneDnnLayerOr CreateOneDnnLayer(const LinearSpec& spec,
                                const LinearWeights& weights,
                                Executor& executor);

// The two layers on `plain`, the codes of the weights as [n, k] without gaps.
OneDnnLayerOr CreateOneDnnFloat(const LinearSpec& spec,
                                const LinearWeights& weights,
                                const uint8_t* plain, Executor& executor);
OneDnnLayerOr CreateOneDnnInt8(const LinearSpec& spec,
                               const LinearWeights& weights,
                               const uint8_t* plain, Executor& executor);

// A copy of [n] elements of 4 bytes, or an empty buffer where `from` is null.
absl::StatusOr<AlignedBuffer> CopyOfColumns(const void* from, int64_t n);

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_LAYERS_H_
