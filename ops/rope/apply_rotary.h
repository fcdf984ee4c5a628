#ifndef QUERN_OPS_ROPE_APPLY_ROTARY_H_
#define QUERN_OPS_ROPE_APPLY_ROTARY_H_

// Turns pairs of elements of each head by angles whose cosines and sines are
// given: what vision encoders do, whose positions are of two dimensions.
//
//   out[b, t, h, a] = x[.., a] * cos[t, j] - x[.., b'] * sin[t, j]
//   out[b, t, h, b'] = x[.., b'] * cos[t, j] + x[.., a] * sin[t, j]
//
// (a, b') is pair j of the style, of ops/rope/rotary_embedding.h; all of a head
// turns. f32 arithmetic, rounded once, to nearest even, to the dtype of x.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct ApplyRotarySpec {
  int64_t head_dim = 0;  // even, 2 <= head_dim <= 1024
  RotaryStyle style = RotaryStyle::kHalves;
  DType dtype = DType::kF32;        // of x and out: f32, bf16 or f16
  DType table_dtype = DType::kF32;  // of cos and sin: the same
};

class ApplyRotaryPlan {
 public:
  // InvalidArgument if head_dim is out of range or odd; Unimplemented for other
  // dtypes.
  static absl::StatusOr<ApplyRotaryPlan> Create(const ApplyRotarySpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const ApplyRotarySpec& spec() const { return spec_; }

  // x and out [tokens, heads, head_dim] or [batch, tokens, heads, head_dim],
  // cos and sin [tokens, head_dim / 2]. out may be x itself and overlaps
  // neither cos nor sin. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& cos,
                         const AnyTensorView& sin,
                         const AnyTensorView& out) const;

  // Writes out. Any strides but the last. No tokens, heads or batch: nothing.
  // Allocates nothing; safe to call concurrently; the result does not depend on
  // the number of workers.
  void Execute(const AnyTensorView& x, const AnyTensorView& cos,
               const AnyTensorView& sin, const AnyTensorView& out,
               Executor& executor) const noexcept;

 private:
  explicit ApplyRotaryPlan(const ApplyRotarySpec& spec);

  ApplyRotarySpec spec_;
  RotaryEmbeddingKernels kernels_;
  RowBlockKernels table_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_APPLY_ROTARY_H_
