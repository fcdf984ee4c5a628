#ifndef QUERN_OPS_ROPE_ROTARY_ROWS_H_
#define QUERN_OPS_ROPE_ROTARY_ROWS_H_

// Private to this folder: what its plans share. The kernels turn the heads of a
// token by a row of cosines and sines, which comes from a table, from pieces of
// several of its rows, or from the caller.

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

// Rows that plans make for each token are this long at most: 8 KiB of stack.
inline constexpr int64_t kMaxMadeRotDim = 1024;

// f32 of a row, in the order that the kernel of the style reads.
inline int64_t RotaryRowFloats(RotaryStyle style, int64_t rot_dim) {
  return style == RotaryStyle::kHalves ? rot_dim : 2 * rot_dim;
}

// Pair j of a row turns by the angle of cosine c and sine s.
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

// All that Create of RotaryEmbeddingPlan refuses but the size of its table.
absl::Status CheckRotarySpec(absl::string_view op,
                             const RotaryEmbeddingSpec& spec);

// Rows of positions [0, count), of the spec's frequencies, style and turn.
// Refusals name the field that count is of.
absl::StatusOr<AlignedBuffer> MakeRotaryTable(absl::string_view op,
                                              const RotaryEmbeddingSpec& spec,
                                              absl::string_view count_field,
                                              int64_t count);

// `count` positions, each in [0, max_positions).
absl::Status CheckRotaryPositions(absl::string_view op, IndexView positions,
                                  int64_t count, int64_t max_positions);

// Turns the heads of x[token, heads, head_dim] into out by `row`; copies what
// does not turn, unless out is x.
void RotateToken(const RotaryEmbeddingKernels& kernels,
                 const RotaryEmbeddingSpec& spec, const float* row,
                 const AnyTensorView& x, const AnyTensorView& out,
                 int64_t token);

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_ROWS_H_
