#ifndef QUERN_OPS_ROPE_ROTARY_ROWS_H_
#define QUERN_OPS_ROPE_ROTARY_ROWS_H_

// Private to this folder: what its plans share. The kernels rotate the heads of
// a token by a row of cosines and sines. The row comes from a table, from
// pieces of several of its rows, or from the caller.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

// Largest rot_dim of the plans that make a row for each token: the row takes up
// to 8 KiB of stack.
inline constexpr int64_t kMaxMadeRotDim = 1024;

// Number of floats in a row, whose order depends on the style.
inline int64_t RotaryRowFloats(RotaryStyle style, int64_t rot_dim) {
  return style == RotaryStyle::kHalves ? rot_dim : 2 * rot_dim;
}

// Sets pair j of a row to the angle with cosine c and sine s.
inline void SetRotaryPair(RotaryStyle style, int64_t rot_dim, int64_t j,
                          float c, float s, float* row) {
  if (style == RotaryStyle::kHalves) {
    row[j] = c;
    row[rot_dim / 2 + j] = s;
  } else {
    row[2 * j] = c;
    row[2 * j + 1] = c;
    row[rot_dim + 2 * j] = -s;
    row[rot_dim + 2 * j + 1] = s;
  }
}

// Refuses what RotaryEmbeddingPlan::Create refuses, except the table's size.
absl::Status CheckRotarySpec(absl::string_view op,
                             const RotaryEmbeddingSpec& spec);

// Makes the table's rows for positions [0, count), with the spec's frequencies,
// style and turn. Refusals call count `count_field`.
absl::StatusOr<AlignedBuffer> MakeRotaryTable(absl::string_view op,
                                              const RotaryEmbeddingSpec& spec,
                                              absl::string_view count_field,
                                              int64_t count);

// InvalidArgument unless there are `count` positions, each in [0,
// max_positions).
absl::Status CheckRotaryPositions(absl::string_view op, IndexView positions,
                                  int64_t count, int64_t max_positions);

// Rotates the heads of x[token, heads, head_dim] by `row` into out, and copies
// the elements outside the rotated range unless out is x.
void RotateToken(const RotaryEmbeddingKernels& kernels,
                 const RotaryEmbeddingSpec& spec, const float* row,
                 const AnyTensorView& x, const AnyTensorView& out,
                 int64_t token);

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_ROWS_H_
