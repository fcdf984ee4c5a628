#ifndef QUERN_OPS_RECURRENT_DELTA_RULE_KERNELS_H_
#define QUERN_OPS_RECURRENT_DELTA_RULE_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// Columns of a state that one call takes at most. The plan takes all columns of
// a head where there are heads enough for all workers.
inline constexpr size_t kDeltaColumns = 256;

// What a token has for all columns of a value head. Each array has room for dk
// floats rounded up to 16, zeros behind those of q and k, and is aligned to 64
// bytes.
struct DeltaRuleToken {
  float* q;
  float* k;
  float* a;   // decay of each row
  float* ak;  // a[i] * k[i]
  float* aq;  // a[i] * q[i]
  float kq;   // k . q
  float beta;
};

// One token's step on a block of columns of a head. Row strides are in
// elements.
struct DeltaRuleStep {
  // Row 0 of the block before the token and after it, of the kernel's state
  // dtype. They are the same place or apart.
  const void* from;
  size_t from_stride;
  void* to;
  size_t to_stride;
  size_t rows;     // dk
  size_t columns;  // 1 <= columns <= kDeltaColumns
  // columns floats, in arrays of kDeltaColumns, aligned to 64 bytes. What is
  // behind them is computed on and not used.
  const float* v;
  float* out;
  const void* next;  // the block of the same shape that is wanted next, or null
  size_t next_stride;
};

// Columns of a block that the tokens of a sequence pass over: at dk = 128, 16
// KiB of f32, which stay in L1.
inline constexpr size_t kPassColumns = 32;

// A state that is wanted soon. Passes over another state ask for it, cache line
// by cache line, `lines` of them in the course of `steps` rows.
struct StateAhead {
  const char* row;  // null: none is wanted
  size_t rows;
  size_t row_bytes;
  size_t stride;  // bytes from row to row
  size_t at;      // bytes of `row` that were asked for
  size_t lines;
  size_t steps;
  size_t share;  // of a line, in 1 / steps
};

// One pass over a block of columns of a head, from a token to the next: the
// update of the state by `token` and the two sums over rows that `next` needs
// of it. A sequence of n tokens takes n + 1 passes. The first has no `token`:
// it copies the state that the sequence begins from. The last has no `next`,
// and `state` does not keep what it computes.
struct DeltaRulePass {
  const DeltaRuleToken* token;
  const DeltaRuleToken* next;
  const void* from;  // of the kernel's state dtype; read without `token`
  size_t from_stride;
  // [rows, state_stride], aligned to 64 bytes: what the state dtype holds, as
  // f32. Strides are multiples of 16, and there is room for whole vectors.
  float* state;
  size_t state_stride;
  void* to;  // where the state after `token` goes also, or null
  size_t to_stride;
  bool stream;  // past the caches; `to` and its rows are aligned to 64 bytes
  size_t rows;
  size_t columns;  // 1 <= columns <= kPassColumns
  // kPassColumns floats each, aligned to 64 bytes: what one pass leaves for the
  // next, the v of `token`, and its output.
  float* a;
  float* b;
  const float* v;
  float* out;
  StateAhead* ahead;
};

// What becomes of q and k first: division by their norms, with eps below the
// root, if l2; q is multiplied by scale.
struct DeltaRuleNorm {
  bool l2;
  float eps;
  float scale;
};

struct DeltaRuleKernels {
  const char* target;
  // token.q and token.k hold what the operator was given. Normalises them, and
  // computes a, ak, aq and kq. g: dk floats, or one if g_per_row is false; it
  // may be token.a.
  void (*prepare)(const float* g, bool g_per_row, size_t dk,
                  const DeltaRuleNorm& norm, DeltaRuleToken& token);
  void (*step)(const DeltaRuleToken& token, const DeltaRuleStep& step);
  void (*pass)(const DeltaRulePass& pass);
  void (*flush)();  // behind passes that stream
};

// The kernels of the best instruction set this CPU supports, for a state of
// f32, bf16 or f16.
DeltaRuleKernels GetDeltaRuleKernels(DType state);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_RULE_KERNELS_H_
