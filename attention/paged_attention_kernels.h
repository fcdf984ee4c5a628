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
#include <limits>

#include "core/dtype.h"

namespace quern {

// The softmax of some logits: their maximum, and the sum of exp2(logit - max).
// As it is here, of none: the identity of merging.
struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
};

struct PagedAttentionKernels {
  const char* target;

  // to[d] = q[d] * scale, d < count; 0 from there to the next whole vector.
  void (*load_query)(const void* q, size_t count, float scale, float* to);

  // logits[row][t] = sum over d of q[row][d] * k[t][d].
  void (*logits)(const float* q, size_t q_stride, size_t rows, const void* k,
                 size_t head_dim, size_t tokens, float* logits,
                 size_t logits_stride);

  // p[t] = exp2(logits[t] - state->max), in place. Writes whole vectors.
  void (*softmax)(float* logits, size_t tokens, SoftmaxState* state);

  // out[row][d] += sum over t of p[row][t] * v[t][d], in the order of t.
  void (*values)(const float* p, size_t p_stride, size_t rows, const void* v,
                 size_t v_head_dim, size_t tokens, float* out,
                 size_t out_stride);

  // (state, out) of some keys becomes that of them and of (other, other_out)'s.
  void (*merge)(const SoftmaxState& other, const float* other_out, size_t count,
                SoftmaxState* state, float* out);

  // to[d] = out[d] / state.sum, d < count; 0 if that sum is 0.
  void (*store)(const SoftmaxState& state, const float* out, size_t count,
                void* to);
};

// The kernels of the best instruction set this CPU supports. `q` and `out` are
// kF32 or kBF16; `kv` kF32, kBF16 or kF16.
PagedAttentionKernels GetPagedAttentionKernels(DType q, DType kv, DType out);

}  // namespace quern

#endif  // QUERN_ATTENTION_PAGED_ATTENTION_KERNELS_H_
