#ifndef QUERN_OPS_MIXER_GATED_DELTA_NET_H_
#define QUERN_OPS_MIXER_GATED_DELTA_NET_H_

// Gated DeltaNet (Qwen3-Next and after), a layer over pools of windows and
// states:
//
//   q, k, v, z, b, a = in_proj(x)   key_heads * dk twice, value_heads * dv
//                                   twice, value_heads twice
//   q, k, v = silu(causal_conv1d(q, k, v))
//   g = -exp(a_log) * ln(1 + e^(a + dt_bias))     beta = 1 / (1 + e^-b)
//   y = delta_rule(q, k, v, g, beta)    kL2: normalised q and k
//   out = out_proj(rms(y) * weight * silu(z))     rms over dv, head by head
//
// The delta rule is that of ops/recurrent/delta_rule.h, and the norm that of
// ops/norm/rms_norm_gated.h with kNormFirst. Each step rounds its result to the
// dtype of x; g and beta stay f32, and the state has a dtype of its own.
// Checkpoints that interleave the columns of in_proj by key
// head are put into this order when they are packed.

#include <cstdint>
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
#include "quern/ops/recurrent/delta_gates.h"
#include "quern/ops/recurrent/delta_rule.h"

namespace quern {

struct GatedDeltaNetSpec {
  int64_t hidden = 0;
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t dk = 0;
  int64_t dv = 0;
  int64_t width = 4;  // of the convolution: 2, 3 or 4
  float eps = 1e-6f;
  DType dtype = DType::kF32;         // of x, windows and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of the convolution and of the norm
  DType state_dtype = DType::kF32;   // f32, bf16 or f16
  int64_t null_slot = -1;            // state index of a sequence to skip
  std::string kernels = {};          // LinearSpec::kernels
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;

  int64_t keys() const { return key_heads * dk; }
  int64_t values() const { return value_heads * dv; }
  // Channels of the convolution: those of q, k and v.
  int64_t conv_channels() const { return 2 * keys() + values(); }
  // Columns of in_proj.
  int64_t projected() const {
    return conv_channels() + values() + 2 * value_heads;
  }
};

struct GatedDeltaNetArgs {
  MixerArgs layer;        // convolves conv_channels channels
  AnyTensorView state;    // [slots, value_heads, dk, dv]
  AnyTensorView a_log;    // f32 [value_heads]
  AnyTensorView dt_bias;  // f32 [value_heads]
  AnyTensorView norm;     // [dv]
};

class GatedDeltaNetPlan {
 public:
  // in_proj is [projected, hidden], out_proj is [hidden, values], both in any
  // format; they may be dropped afterwards as LinearPlan::Create allows.
  // InvalidArgument: weights of another shape; what the plans of the steps
  // refuse. Unimplemented: other dtypes.
  static absl::StatusOr<GatedDeltaNetPlan> Create(const GatedDeltaNetSpec& spec,
                                                  const LinearWeights& in_proj,
                                                  const LinearWeights& out_proj,
                                                  Executor& executor);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return frame_.target(); }
  const GatedDeltaNetSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for x of up to max_tokens rows.
  // InvalidArgument and ResourceExhausted as LinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; indices that CheckSequences refuses; a tensor that is written
  // and touches another.
  absl::Status CheckArgs(const GatedDeltaNetArgs& args) const;

  // Writes the windows and states that are named, and out for the tokens of
  // sequences. Allocates nothing (oneDNN allocates small blocks); safe to call
  // concurrently on distinct slots, each call with its own workspace. With less
  // than WorkspaceBytes, aborts.
  void Execute(const GatedDeltaNetArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  struct Scratch {
    void* projected;
    float* g;
    float* beta;
    char* norm;  // the norm's weight, once for each head
  };
  GatedDeltaNetPlan(const GatedDeltaNetSpec& spec, MixerFrame frame,
                    const DeltaRulePlan& rule, const DeltaGatesPlan& gates,
                    const RmsNormGatedPlan& norm);

  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t tokens) const;
  // g and beta of the tokens of sequences, from p.
  void ComputeGates(const GatedDeltaNetArgs& args, const AnyTensorView& p,
                    const Scratch& scratch, Executor& executor) const;

  GatedDeltaNetSpec spec_;
  MixerFrame frame_;
  DeltaRulePlan rule_;
  DeltaGatesPlan gates_;
  RmsNormGatedPlan norm_;
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_GATED_DELTA_NET_H_
