#ifndef QUERN_OPS_ROPE_APPLY_ROTARY_H_
#define QUERN_OPS_ROPE_APPLY_ROTARY_H_

// Rotates pairs of elements of each head by angles whose cosines and sines the
// caller gives. Vision encoders use this, because their positions have two
// dimensions.
//
//   out[b, t, h, a] = x[.., a] * cos[t, j] - x[.., b'] * sin[t, j]
//   out[b, t, h, b'] = x[.., b'] * cos[t, j] + x[.., a] * sin[t, j]
//
// (a, b') is pair j of the style, as in ops/rope/rotary_embedding.h; the whole
// head is rotated. With RotaryRows::kEach, cos and sin have an angle for each
// element, and stand at a in the first equation and at b' in the second: cos[t,
// a], sin[t, a], cos[t, b'], sin[t, b']. Arithmetic is in f32, and the result
// is rounded once, to nearest even, to the dtype of x.

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

// A row of cos and of sin has an angle for each pair, or for each element.
enum class RotaryRows : uint8_t { kPairs, kEach };

struct ApplyRotarySpec {
  int64_t head_dim = 0;  // even, 2 <= head_dim <= 1024
  RotaryStyle style = RotaryStyle::kHalves;
  DType dtype = DType::kF32;        // of x and out: f32, bf16 or f16
  DType table_dtype = DType::kF32;  // of cos and sin: f32, bf16 or f16
  RotaryRows rows = RotaryRows::kPairs;

  // The elements of a row of cos and of sin.
  int64_t RowElements() const {
    return rows == RotaryRows::kEach ? head_dim : head_dim / 2;
  }
};

class ApplyRotaryPlan {
 public:
  // InvalidArgument if head_dim is out of range or odd; Unimplemented for other
  // dtypes.
  static absl::StatusOr<ApplyRotaryPlan> Create(const ApplyRotarySpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const ApplyRotarySpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: x and out are [tokens,
  // heads, head_dim] or [batch, tokens, heads, head_dim]; cos and sin are
  // [tokens, head_dim / 2], or with kEach [tokens, head_dim]. out may be x
  // itself, and must overlap neither cos nor sin. InvalidArgument names the
  // argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& cos,
                         const AnyTensorView& sin,
                         const AnyTensorView& out) const;

  // Writes out. All strides but the last may be any number. Does nothing
  // without tokens, heads or batches. Allocates nothing; safe to call
  // concurrently; the result does not depend on the number of workers.
  void Execute(const AnyTensorView& x, const AnyTensorView& cos,
               const AnyTensorView& sin, const AnyTensorView& out,
               Executor& executor) const noexcept;

 private:
  // The kernels' rows of a token: that of the first elements of the pairs, and
  // with kEach that of the second ones.
  struct TokenRows;
  explicit ApplyRotaryPlan(const ApplyRotarySpec& spec);
  void MakeRows(const AnyTensorView& cos, const AnyTensorView& sin, int64_t t,
                TokenRows& rows) const;
  void Rotate(const TokenRows& rows, const AnyTensorView& x,
              const AnyTensorView& out, int64_t t) const;

  ApplyRotarySpec spec_;
  RotaryEmbeddingKernels kernels_;
  RowBlockKernels table_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_APPLY_ROTARY_H_
