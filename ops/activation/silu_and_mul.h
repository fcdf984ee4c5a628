#ifndef QUERN_OPS_ACTIVATION_SILU_AND_MUL_H_
#define QUERN_OPS_ACTIVATION_SILU_AND_MUL_H_

// The gated activation of Llama's feed-forward layer.
//
//   out[t, i] = round(silu(gate[t, i]) * up[t, i])     silu(v) = v / (1 + e^-v)
//
//   Execute:       x[t, 0:d] is gate, x[t, d:2d] is up
//   ExecuteSplit:  gate and up are two views
//
// f32 arithmetic, rounded once, to nearest even, to out_dtype. silu is within
// 10 units of 2^-24, relative, plus 140 * 2^-149, absolute: below -87, e^v is
// no normal number, and its own rounding is multiplied by v. From between -103
// and -108 down it is -0, -infinity included (the limit, where v / (1 + e^-v)
// read literally has none). A NaN in gate or up gives NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "ops/activation/silu_and_mul_kernels.h"

namespace quern {

struct SiluAndMulSpec {
  int64_t d = 0;                  // columns of out, >= 1
  DType x_dtype = DType::kF32;    // of x, or gate and up: f32 or bf16
  DType out_dtype = DType::kF32;  // f32 or bf16
};

class SiluAndMulPlan {
 public:
  // InvalidArgument unless 1 <= d < 2^62; Unimplemented for other dtypes.
  static absl::StatusOr<SiluAndMulPlan> Create(const SiluAndMulSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const SiluAndMulSpec& spec() const { return spec_; }

  // Whether Execute or ExecuteSplit may be called with these: dtypes, shapes,
  // strides, memory, aliasing. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x,
                         const AnyTensorView& out) const;
  absl::Status CheckSplitArgs(const AnyTensorView& gate,
                              const AnyTensorView& up,
                              const AnyTensorView& out) const;

  // x[rows, 2d] -> out[rows, d]. Rows may have any stride; out may lie exactly
  // on the gate half or the up half of x, where the dtypes agree. rows = 0 does
  // nothing. Allocates nothing; safe to call concurrently; the result does not
  // depend on the number of workers.
  void Execute(const AnyTensorView& x, const AnyTensorView& out,
               Executor& executor) const noexcept;

  // gate[rows, d], up[rows, d] -> out[rows, d]; out may be gate or up.
  // Otherwise as Execute.
  void ExecuteSplit(const AnyTensorView& gate, const AnyTensorView& up,
                    const AnyTensorView& out,
                    Executor& executor) const noexcept;

 private:
  SiluAndMulPlan(const SiluAndMulSpec& spec, const SiluAndMulKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  SiluAndMulSpec spec_;
  SiluAndMulKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_SILU_AND_MUL_H_
