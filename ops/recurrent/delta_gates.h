#ifndef QUERN_OPS_RECURRENT_DELTA_GATES_H_
#define QUERN_OPS_RECURRENT_DELTA_GATES_H_

// The gates of a gated delta net, from two projections a and b of a token:
//
//   g[t, h]    = -exp(a_log[h]) * ln(1 + e^(a[t, h] + dt_bias[h]))
//   beta[t, h] = 1 / (1 + e^-b[t, h])
//
// Both are computed in double and rounded once, to nearest even. A NaN in a,
// a_log or dt_bias makes its g NaN, and a NaN in b its beta.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct DeltaGatesSpec {
  int64_t heads = 0;               // >= 1
  DType dtype = DType::kF32;       // of a and b: f32, bf16 or f16
  DType log_dtype = DType::kF32;   // of a_log: f32, bf16 or f16
  DType bias_dtype = DType::kF32;  // of dt_bias: f32, bf16 or f16
  DType beta_dtype = DType::kF32;  // f32, bf16 or f16
};

struct DeltaGatesArgs {
  AnyTensorView a;        // [tokens, heads]
  AnyTensorView b;        // [tokens, heads]
  AnyTensorView a_log;    // [heads]
  AnyTensorView dt_bias;  // [heads]
  AnyTensorView g;        // f32 [tokens, heads]
  AnyTensorView beta;     // [tokens, heads]
};

class DeltaGatesPlan {
 public:
  // InvalidArgument if heads is out of range; Unimplemented for other dtypes.
  static absl::StatusOr<DeltaGatesPlan> Create(const DeltaGatesSpec& spec);

  // Instruction set of the delta rule that takes the gates, which themselves
  // are functions of the C library.
  const char* target() const { return target_; }
  const DeltaGatesSpec& spec() const { return spec_; }

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; rows of a or b that overlap; g or beta on another tensor.
  absl::Status CheckArgs(const DeltaGatesArgs& args) const;

  // Writes g and beta. Views may have any strides, the last one 1. Allocates
  // nothing; safe to call concurrently. Workers divide the tokens. Cost: about
  // 50 ns for each head of a token.
  void Execute(const DeltaGatesArgs& args, Executor& executor) const noexcept;

 private:
  explicit DeltaGatesPlan(const DeltaGatesSpec& spec);

  DeltaGatesSpec spec_;
  const char* target_;
  RowBlockKernels blocks_, logs_, biases_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_GATES_H_
