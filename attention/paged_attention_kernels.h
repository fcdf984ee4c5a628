#ifndef QUERN_ATTENTION_PAGED_ATTENTION_KERNELS_H_
#define QUERN_ATTENTION_PAGED_ATTENTION_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.
//
// Rows of queries, logits and values are f32 in the workspace, each `stride`
// elements apart: a multiple of every vector length, so that kernels work on
// whole vectors there. Logits are in units of log2: the scale and log2(e) are
// in the queries. No kernel masks: each call is given rows and keys that all
// see one another.

#include <cstddef>

#include "core/dtype.h"

namespace quern {

struct PagedAttentionKernels {
  const char* target;

  // to[d] = q[d] * scale, d < count.
  void (*load_query)(const void* q, size_t count, float scale, float* to);

  // logits[row][t] = sum over d of q[row][d] * k[t][d].
  void (*logits)(const float* q, size_t q_stride, size_t rows, const void* k,
                 size_t head_dim, size_t tokens, float* logits,
                 size_t logits_stride);

  // logits[t] = exp2(logits[t] - max), t < tokens, 0 beyond it to the next
  // whole vector; state[0] = max of the logits, state[1] = the sum.
  void (*softmax)(float* logits, size_t tokens, float* state);

  // out[row][d] += sum over t of p[row][t] * v[t][d], in the order of t.
  void (*values)(const float* p, size_t p_stride, size_t rows, const void* v,
                 size_t v_head_dim, size_t tokens, float* out,
                 size_t out_stride);

  // (state, out) becomes that of its keys and those of (other_state, other).
  void (*merge)(const float* other_state, const float* other, size_t count,
                float* state, float* out);

  // to[d] = out[d] / sum, d < count; 0 if nothing was seen.
  void (*store_output)(const float* state, const float* out, size_t count,
                       void* to);
};

// The kernels of the best instruction set this CPU supports. `q` and `out` are
// kF32 or kBF16; `kv` kF32, kBF16 or kF16.
PagedAttentionKernels GetPagedAttentionKernels(DType q, DType kv, DType out);

}  // namespace quern

#endif  // QUERN_ATTENTION_PAGED_ATTENTION_KERNELS_H_
