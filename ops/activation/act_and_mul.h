#ifndef QUERN_OPS_ACTIVATION_ACT_AND_MUL_H_
#define QUERN_OPS_ACTIVATION_ACT_AND_MUL_H_

// The gated activations of feed-forward layers:
//
//   out[t, i] = round(activation(gate[t, i]) * up[t, i])
//
//   Execute:       gate and up are parts of x[rows, 2 d]:
//     kGateFirst     gate = x[:, 0:d], up = x[:, d:2d]    silu_and_mul
//     kGateSecond    up = x[:, 0:d], gate = x[:, d:2d]    mul_and_silu
//     kInterleaved   gate = x[:, 0::2], up = x[:, 1::2]   swigluoai_and_mul
//   ExecuteSplit:  gate and up are two views
//
// kSwigluOai multiplies by clamp(up, -limit, limit) + 1.
//
// With sparsity p > 0, only the gates that exceed a cutoff of their row are
// passed on (gelu_and_mul_sparse; p = 0.95 in Gemma 3n):
//
//   out[t, i] = round(activation(max(gate[t, i] - cutoff[t], 0)) * up[t, i])
//   cutoff[t] = mean of gate[t] + quantile(p) * standard deviation of gate[t]
//
// quantile is the inverse of the standard normal distribution function, and the
// deviation is the population's. p = 1 gives zeros, or NaN where the deviation
// is 0.
//
// Arithmetic is in f32, and the result is rounded once, to nearest even, to
// out_dtype. The error of activation is bounded in activation_spec.h; the
// product adds 2^-24, relative. A NaN in gate or up gives NaN in that element;
// with sparsity, a NaN in gate gives a row of NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/activation_kernels.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

enum class GateOrder : uint8_t { kGateFirst, kGateSecond, kInterleaved };

struct ActAndMulSpec {
  Activation activation = Activation::kSilu;
  ActivationParams params;
  GateOrder order = GateOrder::kGateFirst;  // ExecuteSplit ignores it
  // In [0, 1]; 0 disables sparsity. Supported with kGelu and kGeluTanh, and not
  // with kInterleaved.
  double sparsity = 0.0;
  int64_t d = 0;                  // columns of out, >= 1
  DType x_dtype = DType::kF32;    // of x, or gate and up: f32, bf16 or f16
  DType out_dtype = DType::kF32;  // of out: f32, bf16 or f16
  // kAuto streams in one pass (bf16 or f32) when out is not an input and
  // input and output together exceed the last-level cache, which measured best.
  Stores stores = Stores::kAuto;
};

// The operator's name in messages: "silu_and_mul", "mul_and_silu",
// "gelu_and_mul", "gelu_and_mul_sparse", "swigluoai_and_mul" or
// "fatrelu_and_mul"; "act_and_mul" for combinations that no known model uses.
absl::string_view ActAndMulName(const ActAndMulSpec& spec);

// Returns x such that a standard normal number is below x with probability p,
// within 1e-14 relative to the density at x. Returns -infinity for p <= 0 and
// +infinity for p >= 1.
double NormalQuantile(double p);

class ActAndMulPlan {
 public:
  // InvalidArgument unless 1 <= d < 2^59 and the parameters and the sparsity
  // are in range. Unimplemented for other dtypes, and for sparsity with other
  // activations or with kInterleaved.
  static absl::StatusOr<ActAndMulPlan> Create(const ActAndMulSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const ActAndMulSpec& spec() const { return spec_; }

  // Whether Execute or ExecuteSplit may be called with these arguments: checks
  // dtypes, shapes, strides, memory and aliasing. InvalidArgument names the
  // argument.
  absl::Status CheckArgs(const AnyTensorView& x,
                         const AnyTensorView& out) const;
  absl::Status CheckSplitArgs(const AnyTensorView& gate,
                              const AnyTensorView& up,
                              const AnyTensorView& out) const;

  // x[rows, 2d] -> out[rows, d]. Rows may have any stride; out may lie exactly
  // on the first or the second half of x, where the dtypes agree, unless
  // kInterleaved. rows = 0 does nothing. Allocates nothing; safe to call
  // concurrently; the result does not depend on the number of workers.
  void Execute(const AnyTensorView& x, const AnyTensorView& out,
               Executor& executor) const noexcept;

  // gate[rows, d], up[rows, d] -> out[rows, d]; out may be gate or up.
  // Everything else is as for Execute.
  void ExecuteSplit(const AnyTensorView& gate, const AnyTensorView& up,
                    const AnyTensorView& out,
                    Executor& executor) const noexcept;

 private:
  explicit ActAndMulPlan(const ActAndMulSpec& spec);
  float Cutoff(const char* gate) const;
  void Run(const AnyTensorView& gate, const AnyTensorView* up,
           const AnyTensorView& out, Executor& executor) const;

  ActAndMulSpec spec_;
  ActivationKernels kernels_;
  RowBlockKernels blocks_;
  ActivationKernels::Gated gated_;  // null: in blocks
  int64_t stream_from_bytes_;
  float deviations_;  // quantile(sparsity)
};

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_ACT_AND_MUL_H_
