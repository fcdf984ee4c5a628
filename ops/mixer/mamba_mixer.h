#ifndef QUERN_OPS_MIXER_MAMBA_MIXER_H_
#define QUERN_OPS_MIXER_MAMBA_MIXER_H_

// Mixers whose state update takes dt, B and C from a second projection of the
// convolved channels. With I = heads * head_dim channels:
//
//            kMamba (Mamba-1, Jamba)   kPlamo2 (PLaMo-2)
//   in_proj  u, z                                   z, u
//   conv     u = silu(causal_conv1d(u))             the same
//   x_proj   dt', B, C of dt_rank, d_state, d_state B, C, dt'
//   norm     of dt', B and C, where there is one    of dt', B and C
//   dt_proj  dt: one for each channel               one for each head
//   y        state_update(u, dt, A, B, C, D, z)     the same
//   out      out_proj(y)                            the same
//
// The state update is that of ops/recurrent/state_update.h with softplus and
// dt_bias: kPerRow with one head of I rows for Mamba-1, kPerHead for PLaMo-2.
// Its gate z is inside. Everything that a step makes is rounded to the dtype of
// x; the state has a dtype of its own.

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
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/recurrent/state_update.h"

namespace quern {

enum class MambaForm : uint8_t { kMamba, kPlamo2 };
// Whether dt', B and C are normalised, each by itself.
enum class MambaNorm : uint8_t { kNone, kRms };

struct MambaMixerSpec {
  MambaForm form = MambaForm::kMamba;
  int64_t hidden = 0;
  int64_t heads = 1;  // 1 for kMamba
  int64_t head_dim = 0;
  int64_t d_state = 0;
  int64_t dt_rank = 0;
  int64_t width = 4;  // of the convolution: 2, 3 or 4
  MambaNorm norm = MambaNorm::kNone;
  float eps = 1e-5f;
  DType dtype = DType::kF32;         // of x, windows and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of the convolution and of norms
  DType state_dtype = DType::kF32;   // f32, bf16 or f16
  int64_t null_slot = -1;            // state index of a sequence to skip
  std::string kernels = {};          // LinearSpec::kernels
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;

  int64_t channels() const { return heads * head_dim; }
};

// Products in any format, without a bias of dt_proj, which is dt_bias.
struct MambaMixerWeights {
  LinearWeights in_proj;   // [2 * channels, hidden]
  LinearWeights x_proj;    // [dt_rank + 2 * d_state, channels]
  LinearWeights dt_proj;   // [channels, dt_rank]; kPlamo2: [heads, dt_rank]
  LinearWeights out_proj;  // [hidden, channels]
};

struct MambaMixerArgs {
  MixerArgs layer;          // convolves `channels` channels
  AnyTensorView ssm_state;  // [slots, heads, head_dim, d_state]
  // f32, -exp(A_log): [heads, head_dim, d_state]; kPlamo2: [heads].
  AnyTensorView a;
  // f32, each may be no view: [heads, head_dim]; kPlamo2: [heads].
  AnyTensorView d;
  AnyTensorView dt_bias;
  // Views of rank 0 where the layer has no norm.
  AnyTensorView dt_norm;  // [dt_rank]
  AnyTensorView b_norm;   // [d_state]
  AnyTensorView c_norm;   // [d_state]
};

class MambaMixerPlan {
 public:
  // The weights may be dropped afterwards as LinearPlan::Create allows.
  // InvalidArgument: kMamba of several heads; weights of another shape; what
  // the plans of the steps refuse. Unimplemented: other dtypes.
  static absl::StatusOr<MambaMixerPlan> Create(const MambaMixerSpec& spec,
                                               const MambaMixerWeights& weights,
                                               Executor& executor);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return frame_.target(); }
  const MambaMixerSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for x of up to max_tokens rows.
  // InvalidArgument and ResourceExhausted as LinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; indices that CheckSequences refuses; a tensor that is written
  // and touches another.
  absl::Status CheckArgs(const MambaMixerArgs& args) const;

  // Writes the windows and states that are named, and out for the tokens of
  // sequences. Allocates nothing (oneDNN allocates small blocks); safe to call
  // concurrently on distinct slots, each call with its own workspace. With less
  // than WorkspaceBytes, aborts.
  void Execute(const MambaMixerArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  struct Scratch {
    void* projected;
    void* second;  // dt', B and C
    void* dt;
  };
  MambaMixerPlan(const MambaMixerSpec& spec, MixerFrame frame,
                 LinearPlan x_proj, LinearPlan dt_proj,
                 const StateUpdatePlan& update);

  // Columns of the second projection, and of dt.
  int64_t second_columns() const { return spec_.dt_rank + 2 * spec_.d_state; }
  int64_t dt_columns() const {
    return spec_.form == MambaForm::kMamba ? spec_.channels() : spec_.heads;
  }
  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t tokens) const;
  void Normalise(const MambaMixerArgs& args, const AnyTensorView& dt,
                 const AnyTensorView& b, const AnyTensorView& c,
                 Executor& executor) const;

  MambaMixerSpec spec_;
  MixerFrame frame_;
  LinearPlan x_proj_, dt_proj_;
  StateUpdatePlan update_;
  // Set where there are norms.
  std::optional<RmsNormPlan> dt_norm_, state_norm_;
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MAMBA_MIXER_H_
