#ifndef QUERN_OPS_ACTIVATION_SIGMOID_MUL_H_
#define QUERN_OPS_ACTIVATION_SIGMOID_MUL_H_

// A result times its gate, as Qwen3-Next has it behind attention and behind its
// shared expert:
//
//   out[t, i] = round(x[t, i] * sigmoid(gate[t, i]))     gate_cols = d
//   out[t, i] = round(x[t, i] * sigmoid(gate[t, 0]))     gate_cols = 1
//
//   sigmoid(g) = 1 / (1 + e^-g)
//
// Arithmetic is in f32, and the result is rounded once, to nearest even, to
// out_dtype. The sigmoid is off by at most 10 units of 2^-24, relative, or by
// 2^-149 where that is more; the product adds one unit, or 2^-149. A gate of
// -infinity gives 0 for a finite x. A NaN in x makes that element NaN, and a
// NaN in gate all elements that it multiplies.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/sigmoid_mul_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct SigmoidMulSpec {
  int64_t d = 0;                   // columns of x and out, >= 1
  int64_t gate_cols = 0;           // d, or 1: a gate for the whole row
  DType x_dtype = DType::kF32;     // f32, bf16 or f16
  DType gate_dtype = DType::kF32;  // f32, bf16 or f16
  DType out_dtype = DType::kF32;   // f32, bf16 or f16
};

class SigmoidMulPlan {
 public:
  // InvalidArgument unless 1 <= d < 2^59 and gate_cols is d or 1. Unimplemented
  // for other dtypes.
  static absl::StatusOr<SigmoidMulPlan> Create(const SigmoidMulSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const SigmoidMulSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing. x and out are [rows, d] and gate [rows,
  // gate_cols], or all three are [tokens, heads, ..] with any token and head
  // strides. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& gate,
                         const AnyTensorView& out) const;

  // Writes the rows of out and nothing between them. Rows may have any stride;
  // out may be x itself, where the dtypes agree, and is apart from gate. rows =
  // 0 does nothing. Allocates nothing; safe to call concurrently; the result
  // does not depend on the number of workers, who share the rows, or the tokens
  // of tensors of rank 3.
  void Execute(const AnyTensorView& x, const AnyTensorView& gate,
               const AnyTensorView& out, Executor& executor) const noexcept;

 private:
  explicit SigmoidMulPlan(const SigmoidMulSpec& spec);
  // Multiplies the rows [begin, end) of three matrices.
  void Multiply(const AnyTensorView& x, const AnyTensorView& gate,
                const AnyTensorView& out, int64_t begin, int64_t end) const;

  SigmoidMulSpec spec_;
  SigmoidMulKernels kernels_;
  RowBlockKernels blocks_, gate_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_SIGMOID_MUL_H_
