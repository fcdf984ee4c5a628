#ifndef QUERN_OPS_MIXER_MAMBA_MIXER2_H_
#define QUERN_OPS_MIXER_MAMBA_MIXER2_H_

// The mixer of Mamba-2 (Bamba, Zamba2, Granite-4, Falcon-H1, Nemotron-H), a
// layer over pools of windows and states. With I = heads * head_dim channels:
//
//   z, u, B, C, dt = in_proj(x)           I, I, groups * d_state twice, heads
//   u, B, C = silu(causal_conv1d(u, B, C))
//   y = state_update(u, dt, A, B, C, D)   kPerHead, with softplus and dt_bias
//   out = out_proj(rms(y * silu(z)))      kGroups: over I / groups columns each
//   out = out_proj(y * silu(z))           kNone
//
// The state update is that of ops/recurrent/state_update.h, and the norm that
// of ops/norm/mixer2_gated_rms_norm.h on one rank. Each step rounds its result
// to the dtype of x; in kNone, y is rounded once, after its gate. The state has
// a dtype of its own. A model that multiplies the columns
// of in_proj by constants has them in the weights.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/recurrent/state_update.h"

namespace quern {

enum class Mamba2Norm : uint8_t { kNone, kGroups };

struct MambaMixer2Spec {
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t groups = 1;  // divides heads
  int64_t head_dim = 0;
  int64_t d_state = 0;
  int64_t width = 4;  // of the convolution: 2, 3 or 4
  Mamba2Norm norm = Mamba2Norm::kGroups;
  float eps = 1e-5f;
  DType dtype = DType::kF32;         // of x, windows and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of the convolution and of the norm
  DType state_dtype = DType::kF32;   // f32, bf16 or f16
  int64_t null_slot = -1;            // state index of a sequence to skip
  std::string kernels = {};          // LinearSpec::kernels
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;

  int64_t channels() const { return heads * head_dim; }
  // Channels of the convolution: those of u, B and C.
  int64_t conv_channels() const { return channels() + 2 * groups * d_state; }
  // Columns of in_proj.
  int64_t projected() const { return channels() + conv_channels() + heads; }
};

struct MambaMixer2Args {
  MixerArgs layer;          // convolves conv_channels channels
  AnyTensorView ssm_state;  // [slots, heads, head_dim, d_state]
  AnyTensorView a;          // f32 [heads]: -exp(A_log)
  AnyTensorView d;          // f32 [heads], or no view
  AnyTensorView dt_bias;    // f32 [heads], or no view
  AnyTensorView norm;       // [channels]; kNone: no view
};

class MambaMixer2Plan {
 public:
  // in_proj is [projected, hidden], out_proj is [hidden, channels], both in any
  // format; they may be dropped afterwards as LinearPlan::Create allows.
  // InvalidArgument: weights of another shape; what the plans of the steps
  // refuse. Unimplemented: other dtypes.
  static absl::StatusOr<MambaMixer2Plan> Create(const MambaMixer2Spec& spec,
                                                const LinearWeights& in_proj,
                                                const LinearWeights& out_proj,
                                                Executor& executor);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return frame_.target(); }
  const MambaMixer2Spec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for x of up to max_tokens rows.
  // InvalidArgument and ResourceExhausted as LinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; indices that CheckSequences refuses; a tensor that is written
  // and touches another.
  absl::Status CheckArgs(const MambaMixer2Args& args) const;

  // Writes the windows and states that are named, and out for the tokens of
  // sequences. Allocates nothing (oneDNN allocates small blocks); safe to call
  // concurrently on distinct slots, each call with its own workspace. With less
  // than WorkspaceBytes, aborts.
  void Execute(const MambaMixer2Args& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  MambaMixer2Plan(const MambaMixer2Spec& spec, MixerFrame frame,
                  const StateUpdatePlan& update);

  MambaMixer2Spec spec_;
  MixerFrame frame_;
  StateUpdatePlan update_;
  std::optional<RmsNormGatedPlan> norm_;
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MAMBA_MIXER2_H_
