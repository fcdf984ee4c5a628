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
// floats rounded up to kRowBlock, zeros behind those of q and k, and is aligned
// to 64 bytes.
struct DeltaRuleToken {
  float* q;
  float* k;
  float* a;   // decay of each row
  float* ak;  // a[i] * k[i]
  float* aq;  // a[i] * q[i]
  float kq;   // k . q
  float beta;
};

// One token's step on a block of columns of a head.
struct DeltaRuleStep {
  void* state;        // row 0 of the block, of the kernel's state dtype
  size_t row_stride;  // elements from row to row
  size_t rows;        // dk
  size_t columns;     // 1 <= columns <= kDeltaColumns
  // columns floats, in arrays of kDeltaColumns, aligned to 64 bytes. What is
  // behind them is computed on and not used.
  const float* v;
  float* out;
  const void* next;  // the block of the same shape that is wanted next, or null
};

struct DeltaRuleKernels {
  const char* target;
  // token.q and token.k hold what the operator was given. Divides them by their
  // norms if l2, multiplies q by scale, and computes a, ak, aq and kq. g: dk
  // floats, or one if g_per_row is false.
  void (*prepare)(const float* g, bool g_per_row, size_t dk, bool l2,
                  float scale, DeltaRuleToken& token);
  void (*step)(const DeltaRuleToken& token, const DeltaRuleStep& step);
};

// The kernels of the best instruction set this CPU supports, for a state of
// f32, bf16 or f16.
DeltaRuleKernels GetDeltaRuleKernels(DType state);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_DELTA_RULE_KERNELS_H_
