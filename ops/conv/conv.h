#ifndef QUERN_OPS_CONV_CONV_H_
#define QUERN_OPS_CONV_CONV_H_

// Convolution of images (conv2d) and videos (conv3d), channels first:
//
//   out[b, o, z, y, x] = round(bias[o] +
//       sum over i < in_channels / groups and (dz, dy, dx) < kernel of
//           weight[o, i, dz, dy, dx] *
//           in[b, g * in_channels / groups + i,
//              z * stride.depth + dz * dilation.depth - padding.depth,
//              y * stride.height + dy * dilation.height - padding.height,
//              x * stride.width + dx * dilation.width - padding.width])
//
// with g = o / (out_channels / groups), and zeros for `in` beyond its edges. An
// image has depth 1, and so has its kernel. Each extent of out is
//
//   floor((in + 2 padding - dilation * (kernel - 1) - 1) / stride) + 1
//
// Sums are in f32; the result is rounded once, to nearest even. Two
// implementations:
//
//   patches   where patches do not overlap, as in the patch embedding of a
//             vision tower: kernel = stride, no padding, dilation 1 and one
//             group. Each patch is a row of a product (gemm/linear.h, which
//             says in which order it sums).
//   direct    all else. It sums in the order of (i, dz, dy, dx), from the bias
//             on.
//
// Zeros beyond the edges are multiplied, too: a weight that is infinite or NaN
// makes each output NaN that it meets there.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/conv_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct ConvSpec {
  // Largest number of channels, and largest extent of anything. Positions
  // within a padded image then fit 63 bits.
  static constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

  int64_t in_channels = 0;
  int64_t out_channels = 0;
  int64_t groups = 1;  // divides both
  ConvExtents kernel;
  ConvExtents stride;
  ConvExtents padding = {0, 0, 0};  // on both sides
  ConvExtents dilation;
  DType dtype = DType::kF32;         // of in and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of weight and bias: f32, bf16 or f16
  // LinearSpec::kernels of the product of patches.
  std::string kernels = {};
};

// Extents of an output for inputs of extents `in`. Refuses a spec as
// ConvPlan::Create does, and `in` as ConvPlan::OutExtents does.
absl::StatusOr<ConvExtents> ConvOutExtents(const ConvSpec& spec,
                                           const ConvExtents& in);

class ConvPlan {
 public:
  // Packs weight[out_channels, in_channels / groups, depth, height, width],
  // whose strides but the first are dense, and bias[out_channels], or no view.
  // Both may be dropped afterwards.
  //
  // InvalidArgument: a number of the spec that is negative, above kMaxExtent,
  // or zero where it is no padding; groups that do not divide the channels; a
  // kernel of more than kMaxExtent weights for an output; a weight or a bias of
  // another shape or dtype; a weight with gaps between the weights of an
  // output, or whose outputs overlap. Unimplemented: other dtypes, and what
  // LinearPlan::Create cannot run. ResourceExhausted: no memory.
  static absl::StatusOr<ConvPlan> Create(const ConvSpec& spec,
                                         const AnyTensorView& weight,
                                         const AnyTensorView& bias,
                                         Executor& executor);

  // Instruction set of plans that are created now.
  static const char* BestTarget();

  const ConvSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const;
  // "patches" or "direct".
  const char* implementation() const;

  // Extents of an output for inputs of extents `in`. InvalidArgument names the
  // dimension: an extent outside [1, kMaxExtent], or a kernel that is larger
  // than the padded input.
  absl::StatusOr<ConvExtents> OutExtents(const ConvExtents& in) const;

  // Bytes of workspace that Execute needs for up to max_batch inputs of extents
  // `in` on up to max_workers workers. InvalidArgument: what OutExtents
  // refuses; max_batch < 0; max_workers outside [1, LinearPlan::kMaxWorkers].
  // ResourceExhausted: 2^63 or more.
  //
  // patches: up to 1024 patches and their outputs. direct: a padded input in
  // f32.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_batch,
                                         const ConvExtents& in,
                                         int max_workers) const;

  // Whether Execute may be called with in[batch, in_channels, depth, height,
  // width] and out[batch, out_channels, ..] of OutExtents: dtypes, shapes,
  // strides, and that they do not touch. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& in,
                         const AnyTensorView& out) const;

  // Writes the elements of out and nothing else. Views may have any strides,
  // the last one 1. A batch of none does nothing. Allocates nothing (oneDNN
  // allocates small blocks); safe to call concurrently, each call with its own
  // workspace. With less workspace than WorkspaceBytes, aborts. The bits depend
  // neither on the workers nor, with the packed kernels, on the rest of the
  // batch.
  //
  // A patch that fills its input is read in place where the input is dense, and
  // outputs of one position are written in place; images 2^29 elements apart or
  // more are copied.
  void Execute(const AnyTensorView& in, const AnyTensorView& out,
               const Workspace& workspace, Executor& executor) const noexcept;

 private:
  explicit ConvPlan(const ConvSpec& spec);

  absl::Status PackPatches(const AnyTensorView& weight, Executor& executor);
  absl::Status PackDirect(const AnyTensorView& weight);
  void ExecutePatches(const AnyTensorView& in, const AnyTensorView& out,
                      Workspace workspace, Executor& executor) const;
  void ExecuteDirect(const AnyTensorView& in, const AnyTensorView& out,
                     Workspace workspace, Executor& executor) const;

  ConvSpec spec_;
  ConvKernels kernels_;
  RowBlockKernels blocks_;
  std::optional<LinearPlan> linear_;  // set for patches
  // What the direct kernel reads, in f32: for each block of output channels
  // weight[i, dz, dy, dx, channel of the block], and the bias of all.
  AlignedBuffer weights_;
  AlignedBuffer bias_;
};

}  // namespace quern

#endif  // QUERN_OPS_CONV_CONV_H_
