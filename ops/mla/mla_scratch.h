#ifndef QUERN_OPS_MLA_MLA_SCRATCH_H_
#define QUERN_OPS_MLA_MLA_SCRATCH_H_

// Private to this folder: the workspace of one Execute of MlaPlan. All pieces
// are dense matrices of the dtype of x, as bytes. The forms run one after the
// other in the same memory behind MlaScratch.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/ops/mla/mla_spec.h"

namespace quern {

struct MlaScratch {
  char* q_a;       // [tokens, q_lora]
  char* q;         // [tokens, heads, nope + rope]
  char* latents;   // [tokens, kv_lora + rope]
  char* attended;  // [tokens, heads, v_head_dim]
};
struct MlaDirectScratch {
  char* latents;  // [direct tokens, kv_lora]
  char* kv;       // [direct tokens, heads, nope + v_head_dim]
  char* keys;     // [direct tokens, heads, nope + rope]
};
struct MlaAbsorbedScratch {
  char* queries;  // [heads, absorbed tokens, kv_lora + rope]
  char* latents;  // [heads, absorbed tokens, kv_lora]
  char* values;   // [heads, absorbed tokens, v_head_dim]
};

// A piece of rows * columns elements. A size of 2^63 bytes or more is passed on
// as -1, which the allocator reports as an overflow.
template <typename Allocator>
char* MlaPiece(Allocator& a, const char* name, DType dtype, int64_t rows,
               int64_t columns) {
  int64_t bytes = 0;
  const bool fits =
      CheckedMul(rows, columns, &bytes) &&
      CheckedMul(bytes, static_cast<int64_t>(SizeOf(dtype)), &bytes);
  return a.template Allocate<char>(name, fits ? bytes : -1);
}

template <typename Allocator>
MlaScratch LayOutMla(Allocator& a, const MlaSpec& s, int64_t tokens) {
  return {MlaPiece(a, "q_a", s.dtype, tokens, s.q_lora),
          MlaPiece(a, "q", s.dtype, tokens, s.heads * s.head_dim()),
          MlaPiece(a, "latents", s.dtype, tokens, s.latent_row()),
          MlaPiece(a, "attended", s.dtype, tokens, s.heads * s.v_head_dim)};
}

template <typename Allocator>
MlaDirectScratch LayOutMlaDirect(Allocator& a, const MlaSpec& s,
                                 int64_t tokens) {
  return {MlaPiece(a, "direct latents", s.dtype, tokens, s.kv_lora),
          MlaPiece(a, "keys and values", s.dtype, tokens,
                   s.heads * (s.nope + s.v_head_dim)),
          MlaPiece(a, "keys", s.dtype, tokens, s.heads * s.head_dim())};
}

template <typename Allocator>
MlaAbsorbedScratch LayOutMlaAbsorbed(Allocator& a, const MlaSpec& s,
                                     int64_t tokens) {
  return {MlaPiece(a, "absorbed queries", s.dtype, tokens,
                   s.heads * s.latent_row()),
          MlaPiece(a, "attended latents", s.dtype, tokens, s.heads * s.kv_lora),
          MlaPiece(a, "values", s.dtype, tokens, s.heads * s.v_head_dim)};
}

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_SCRATCH_H_
