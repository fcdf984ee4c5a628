#ifndef QUERN_OPS_ROPE_ROTARY_EMBEDDING_H_
#define QUERN_OPS_ROPE_ROTARY_EMBEDDING_H_

// Rotary position embedding: rotates pairs of elements of each head by an angle
// that is proportional to the token's position p.
//
//   angle[p, j] = p * frequency[j]                  0 <= j < rot_dim / 2
//   frequency[j] = base^(-2j / rot_dim)             or what rotary_scaling.h
//                                                   makes of it
//   out[a] = x[a] * cos(angle) - x[b] * sin(angle)
//   out[b] = x[b] * cos(angle) + x[a] * sin(angle)
//
//   kHalves (GPT-NeoX)  (a, b) = (j, j + rot_dim / 2)
//   kPairs  (GPT-J)     (a, b) = (2j, 2j + 1)
//
// Elements [rot_offset, rot_offset + rot_dim) are rotated, and the others are
// copied. Create computes cosines and sines in double, multiplies them by the
// magnitude of the scaling, and keeps them as f32. The rotation is f32
// arithmetic, rounded once, to nearest even, to the dtype of the tensors.

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {

// Immutable after Create. Has a table of max_positions * rot_dim f32 (kPairs:
// twice that), which copies of the plan share. One plan serves all layers.
class RotaryEmbeddingPlan {
 public:
  // InvalidArgument if a dimension, max_positions or base is out of range;
  // Unimplemented for other dtypes; ResourceExhausted if the table cannot be
  // allocated. Unless null, `tables` has the table, which plans then share.
  static absl::StatusOr<RotaryEmbeddingPlan> Create(
      const RotaryEmbeddingSpec& spec, RotaryTables* tables = nullptr);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RotaryEmbeddingSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks shapes, dtypes,
  // strides, memory and aliasing, and that every position is in [0,
  // max_positions).
  absl::Status CheckArgs(IndexView positions, const AnyTensorView& x,
                         const AnyTensorView& out) const;

  // x[tokens, heads, head_dim], positions[tokens] -> out of the shape of x.
  // Token and head strides may be any number and may differ between x and out;
  // out may be x itself. Does nothing without tokens or heads. Allocates
  // nothing; safe to call concurrently; the result does not depend on the
  // number of workers.
  void Execute(IndexView positions, const AnyTensorView& x,
               const AnyTensorView& out, Executor& executor) const noexcept;

  // ExecuteQk rotates q[tokens, q_heads, head_dim] and k[tokens, kv_heads,
  // head_dim] in place, in one pass over the tokens. Everything else is as for
  // Execute.
  absl::Status CheckQkArgs(IndexView positions, const AnyTensorView& q,
                           const AnyTensorView& k) const;
  void ExecuteQk(IndexView positions, const AnyTensorView& q,
                 const AnyTensorView& k, Executor& executor) const noexcept;

 private:
  RotaryEmbeddingPlan(const RotaryEmbeddingSpec& spec,
                      const RotaryEmbeddingKernels& kernels,
                      std::shared_ptr<const AlignedBuffer> table);
  const float* Row(int64_t position) const;

  RotaryEmbeddingSpec spec_;
  RotaryEmbeddingKernels kernels_;
  std::shared_ptr<const AlignedBuffer> table_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_EMBEDDING_H_
