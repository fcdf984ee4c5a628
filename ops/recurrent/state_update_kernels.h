#ifndef QUERN_OPS_RECURRENT_STATE_UPDATE_KERNELS_H_
#define QUERN_OPS_RECURRENT_STATE_UPDATE_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// Rows of a state that one call takes at most.
inline constexpr size_t kStateRows = 256;

// One token's step on a block of rows of a head. Row strides are in elements.
// Arrays of floats are aligned to 64 bytes and end with a whole vector. What
// follows b and c in theirs is zero; what follows the rows is computed on and
// not used.
struct StateUpdateStep {
  // Row 0 of the block before the token and after it, of the kernel's state
  // dtype. They are the same place or apart.
  const void* from;
  size_t from_stride;
  void* to;
  size_t to_stride;
  size_t rows;         // 1 <= rows <= kStateRows
  size_t n;            // d_state
  const float* b;      // [n]
  const float* c;      // [n]
  const float* delta;  // [rows]
  const float* x;      // [rows]
  // a[rows, n], rows a_stride apart; without it a_head is the number of all.
  const float* a;
  size_t a_stride;
  float a_head;
  float* y;  // [rows]: sum over n of s[p, n] c[n]
};

// Rows of a state, and tokens, that one call of `drafts` takes at most.
inline constexpr size_t kDraftRows = 64;
inline constexpr size_t kDraftTokens = 16;

// Where a token leaves its state: row 0, or null where no one keeps it.
struct StateKeep {
  void* to;
  size_t stride;
  bool stream;  // past the caches: all rows are aligned to 64 bytes
};

// Several tokens' steps on a block of rows of a head. A row stays in registers,
// some columns at a time, from the first token to the last.
struct StateUpdateDrafts {
  const void* from;  // row 0 before the first token
  size_t from_stride;
  const StateKeep* keep;  // of each token; a place may be `from`
  size_t rows;            // 1 <= rows <= kDraftRows
  size_t n;               // d_state
  size_t tokens;          // 1 <= tokens <= kDraftTokens
  const float* b;         // [tokens, n], rows bc_stride apart, a multiple of 16
  const float* c;
  size_t bc_stride;
  const float* delta;  // [tokens, rows], rows kDraftRows apart
  const float* x;
  const float* a;  // as in StateUpdateStep
  size_t a_stride;
  float a_head;
  float* y;  // [tokens, rows], rows kDraftRows apart
};

struct StateUpdateKernels {
  const char* target;
  // delta[i] = ln(1 + e^(dt[i] + bias[i])), or the sum alone
  void (*delta)(const float* dt, const float* bias, bool softplus, size_t rows,
                float* delta);
  void (*step)(const StateUpdateStep& step);
  void (*drafts)(const StateUpdateDrafts& drafts);
  void (*flush)();  // behind drafts that stream
  // y[i] = y[i] + d[i] x[i], times silu(z[i]) unless z is null
  void (*finish)(const float* d, const float* x, const float* z, size_t rows,
                 float* y);
};

// The kernels of the best instruction set this CPU supports, for a state of
// f32, bf16 or f16.
StateUpdateKernels GetStateUpdateKernels(DType state);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_UPDATE_KERNELS_H_
