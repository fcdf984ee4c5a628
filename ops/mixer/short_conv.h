#ifndef QUERN_OPS_MIXER_SHORT_CONV_H_
#define QUERN_OPS_MIXER_SHORT_CONV_H_

// The short convolution of LFM2, a layer over a pool of windows:
//
//   B, C, u = in_proj(x)                  channels columns each, in this order
//   v = round(B * u)
//   y = round(C * causal_conv1d(v))       without an activation
//   out = out_proj(y)
//
// The window of a sequence holds its last width - 1 values of v. Everything is
// rounded to the dtype of x: projections, v, the convolution, y and out.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct ShortConvSpec {
  int64_t hidden = 0;
  int64_t channels = 0;
  int64_t width = 3;                 // 2, 3 or 4
  DType dtype = DType::kF32;         // of x, windows and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of conv_weight and conv_bias
  int64_t null_slot = -1;            // state index of a sequence to skip
  std::string kernels = {};          // LinearSpec::kernels
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;
};

class ShortConvPlan {
 public:
  // in_proj is [3 * channels, hidden], out_proj is [hidden, channels], both in
  // any format, and may be dropped afterwards as LinearPlan::Create allows.
  // InvalidArgument: weights of another shape; what CausalConv1dPlan and
  // LinearPlan refuse. Unimplemented: other dtypes.
  static absl::StatusOr<ShortConvPlan> Create(const ShortConvSpec& spec,
                                              const LinearWeights& in_proj,
                                              const LinearWeights& out_proj,
                                              Executor& executor);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return frame_.target(); }
  const ShortConvSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for x of up to max_tokens rows.
  // InvalidArgument and ResourceExhausted as LinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; indices that CheckSequences refuses; a tensor that is written
  // and touches another.
  absl::Status CheckArgs(const MixerArgs& args) const;

  // Writes the windows that are named, and out for the tokens of sequences.
  // Allocates nothing (oneDNN allocates small blocks); safe to call
  // concurrently on distinct slots, each call with its own workspace. With less
  // than WorkspaceBytes, aborts. A sequence that is cut into several calls has
  // the bits of one call where those of the products do not depend on the
  // number of rows (gemm/linear.h).
  void Execute(const MixerArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  ShortConvPlan(const ShortConvSpec& spec, MixerFrame frame);

  ShortConvSpec spec_;
  MixerFrame frame_;
  RowBlockKernels blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_SHORT_CONV_H_
